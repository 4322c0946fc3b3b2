//! What is so at the moment of a scrape: sizes, queues, and what waits for whom.

use std::cmp::Reverse;

use metrics::{counter, gauge};

use super::{App, operator};
use crate::backlog::{ConsumerFigures, TopicFigures, TopicKey};
use crate::plugin::{Fault, Plugins};
use crate::store::Size;
use crate::telemetry::label;

type Labels = Vec<(&'static str, String)>;

/// Sets the gauges of the moment.
pub(super) fn observe(app: &App, size: Option<&Size>) {
    gauge!("tidegate_ready").set(if operator::trouble(app).is_none() { 1.0 } else { 0.0 });
    gauge!("tidegate_writer_queue_commands").set(app.writer.waiting() as f64);
    observe_plugins(&app.plugins);
    for (tenant, requests) in app.pipeline.waiting() {
        gauge!("tidegate_admission_queue_requests", "tenant" => label(tenant.as_str())).set(requests as f64);
    }
    gauge!("tidegate_database_limit_bytes").set(app.config.store.max_bytes as f64);
    if let Some(size) = size {
        gauge!("tidegate_database_bytes").set(size.database as f64);
        gauge!("tidegate_database_free_bytes").set(size.free as f64);
        gauge!("tidegate_wal_bytes").set(size.wal as f64);
        if let Some(available) = size.available {
            gauge!("tidegate_disk_available_bytes").set(available as f64);
        }
    }
    observe_backlogs(&app.topics.figures(None), app.config.metrics.topics, app.config.metrics.consumers);
}

/// A built-in plugin has its series for all tenants together; those of an uploaded one go with it.
fn observe_plugins(plugins: &Plugins) {
    gauge!("tidegate_plugin_instances").set(plugins.live_instances() as f64);
    gauge!("tidegate_plugin_quarantined").set(plugins.quarantine().list(None).len() as f64);
    for (plugin, usage) in plugins.usages() {
        let mut labels = vec![("plugin", label(&plugin.name))];
        if let Some(tenant) = &plugin.tenant {
            labels.extend([("tenant", label(tenant.as_str())), ("version", plugin.version.to_string())]);
        }
        counter!("tidegate_plugin_calls_total", &labels).absolute(usage.calls);
        counter!("tidegate_plugin_messages_total", &labels).absolute(usage.messages);
        counter!("tidegate_plugin_messages_dropped_total", &labels).absolute(usage.dropped);
        let microseconds = u64::try_from(usage.processor_time.as_micros()).unwrap_or(u64::MAX);
        counter!("tidegate_plugin_processor_microseconds_total", &labels).absolute(microseconds);
        gauge!("tidegate_plugin_memory_bytes", &labels).set(usage.memory_bytes as f64);
        for (kind, faults) in Fault::KINDS.into_iter().zip(usage.faults) {
            let labels = [&labels[..], &[("kind", kind.to_owned())]].concat();
            counter!("tidegate_plugin_faults_total", &labels).absolute(faults);
        }
    }
}

/// At most so many topics and consumers have series of their own: those with the most bytes.
fn observe_backlogs(topics: &[TopicFigures], most_topics: usize, most_consumers: usize) {
    let mut consumers: Vec<_> =
        topics.iter().flat_map(|topic| topic.consumers.iter().map(|consumer| (&*topic.key, consumer))).collect();
    gauge!("tidegate_backlog_messages").set(topics.iter().map(|topic| topic.messages).sum::<u64>() as f64);
    gauge!("tidegate_backlog_bytes").set(topics.iter().map(|topic| topic.bytes).sum::<u64>() as f64);
    gauge!("tidegate_topics").set(topics.len() as f64);
    gauge!("tidegate_topics_left_out").set(topics.len().saturating_sub(most_topics) as f64);
    gauge!("tidegate_consumers").set(consumers.len() as f64);
    gauge!("tidegate_consumers_left_out").set(consumers.len().saturating_sub(most_consumers) as f64);
    // By name where bytes say nothing, so that it is not chance who is left out.
    let name = |key: &TopicKey| (key.tenant.as_str().to_owned(), key.name.clone(), key.non_persistent);
    let mut topics: Vec<_> = topics.iter().collect();
    topics.sort_by_cached_key(|topic| (Reverse(topic.bytes), name(&topic.key)));
    consumers.sort_by_cached_key(|(key, consumer)| (Reverse(consumer.backlog_bytes), name(key), consumer.name.clone()));
    topics.into_iter().take(most_topics).for_each(observe_topic);
    consumers.into_iter().take(most_consumers).for_each(|(key, consumer)| observe_consumer(key, consumer));
}

fn observe_topic(topic: &TopicFigures) {
    let labels = labels(&topic.key);
    gauge!("tidegate_topic_messages", &labels).set(topic.messages as f64);
    gauge!("tidegate_topic_bytes", &labels).set(topic.bytes as f64);
    gauge!("tidegate_messages_held", &labels).set(topic.held.values().map(|held| held.messages).sum::<u64>() as f64);
    gauge!("tidegate_topic_quota_bytes", &labels).set(topic.policy.quota_bytes as f64);
    gauge!("tidegate_topic_oldest_seconds", &labels).set(seconds(topic.oldest_age_ms.unwrap_or_default()));
    if let Some(ms) = topic.expires_in_ms.filter(|_| !topic.key.non_persistent) {
        gauge!("tidegate_topic_expires_in_seconds", &labels).set(seconds(ms));
    }
    counter!("tidegate_topic_appended_total", &labels).absolute(topic.appended);
    counter!("tidegate_topic_delivered_total", &labels).absolute(topic.delivered);
}

fn observe_consumer(key: &TopicKey, consumer: &ConsumerFigures) {
    let mut labels = labels(key);
    labels.push(("consumer", label(&consumer.name)));
    gauge!("tidegate_consumer_clients", &labels).set(consumer.clients as f64);
    gauge!("tidegate_consumer_lag_messages", &labels).set(consumer.backlog_messages as f64);
    gauge!("tidegate_consumer_lag_bytes", &labels).set(consumer.backlog_bytes as f64);
    gauge!("tidegate_consumer_lag_seconds", &labels).set(seconds(consumer.oldest_age_ms.unwrap_or_default()));
    if let Some(ms) = consumer.expires_in_ms.filter(|_| !key.non_persistent) {
        gauge!("tidegate_consumer_expires_in_seconds", &labels).set(seconds(ms));
    }
    counter!("tidegate_consumer_delivered_total", &labels).absolute(consumer.delivered);
    counter!("tidegate_consumer_redelivered_total", &labels).absolute(consumer.redelivered);
    counter!("tidegate_consumer_acknowledged_total", &labels).absolute(consumer.acknowledged);
    if let Some(ms) = consumer.last_ack_ms {
        gauge!("tidegate_consumer_last_ack_time_seconds", &labels).set(ms as f64 / 1e3);
    }
    gauge!("tidegate_consumer_parked", &labels).set(f64::from(u8::from(consumer.parked)));
}

fn labels(TopicKey { tenant, name, non_persistent }: &TopicKey) -> Labels {
    let persistent = (!non_persistent).to_string();
    vec![("tenant", label(tenant.as_str())), ("topic", label(name)), ("persistent", persistent)]
}

fn seconds(ms: u64) -> f64 {
    ms as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    use crate::backlog::{HeldFigures, OnFull, Policy};
    use crate::telemetry::observed;

    fn topic(name: &str, bytes: u64, consumers: &[(&str, u64)]) -> TopicFigures {
        let consumer = |(name, bytes): &(&str, u64)| ConsumerFigures {
            name: (*name).into(),
            clients: 0,
            backlog_messages: bytes / 10,
            backlog_bytes: *bytes,
            oldest_age_ms: (*bytes > 0).then_some(1_500),
            expires_in_ms: (*bytes > 0).then_some(2_500),
            delivered: 0,
            redelivered: 0,
            acknowledged: 0,
            ack_rate: 0.0,
            last_ack_ms: None,
            parked: false,
        };
        TopicFigures {
            key: TopicKey { tenant: "edge".into(), name: name.into(), non_persistent: name.starts_with("Live") }.into(),
            policy: Policy { quota_bytes: 100, ttl_seconds: 4, on_full: OnFull::Reject, gap_messages: false },
            messages: bytes / 10,
            bytes,
            oldest_age_ms: (bytes > 0).then_some(1_500),
            expires_in_ms: (bytes > 0).then_some(2_500),
            held: BTreeMap::from([(7, HeldFigures { messages: bytes / 20, ..HeldFigures::default() })]),
            appended: 7,
            delivered: 0,
            rate_in: 0.0,
            rate_out: 0.0,
            consumers: consumers.iter().map(consumer).collect(),
        }
    }

    #[test]
    fn the_largest_backlogs_have_series_and_the_others_are_counted() {
        let topics = [
            topic("A", 0, &[("a", 0)]),
            topic("B", 20, &[("a", 10), ("b", 20)]),
            topic("LiveC", 30, &[("a", 30)]),
            topic("D", 0, &[("a", 0)]),
        ];
        let text = observed(|| observe_backlogs(&topics, 3, 2));
        let has = |line: &str| assert!(text.lines().any(|known| known == line), "{line} is not in\n{text}");
        let names = |family: &str| text.lines().filter(|line| line.starts_with(family)).count();
        has("tidegate_backlog_bytes 50");
        has("tidegate_topics 4");
        has("tidegate_topics_left_out 1");
        has("tidegate_consumers 5");
        has("tidegate_consumers_left_out 3");
        assert_eq!((names("tidegate_topic_bytes{"), names("tidegate_consumer_lag_bytes{")), (3, 2));
        has(r#"tidegate_topic_bytes{tenant="edge",topic="A",persistent="true"} 0"#);
        has(r#"tidegate_topic_bytes{tenant="edge",topic="LiveC",persistent="false"} 30"#);
        has(r#"tidegate_messages_held{tenant="edge",topic="B",persistent="true"} 1"#);
        has(r#"tidegate_topic_appended_total{tenant="edge",topic="B",persistent="true"} 7"#);
        has(r#"tidegate_consumer_lag_messages{tenant="edge",topic="B",persistent="true",consumer="b"} 2"#);
        has(r#"tidegate_consumer_lag_seconds{tenant="edge",topic="LiveC",persistent="false",consumer="a"} 1.5"#);
        // Only what is on disk expires, and only what waits.
        assert_eq!(
            (names("tidegate_topic_expires_in_seconds{"), names("tidegate_consumer_expires_in_seconds{")),
            (1, 1)
        );
        has(r#"tidegate_consumer_expires_in_seconds{tenant="edge",topic="B",persistent="true",consumer="b"} 2.5"#);
    }
}
