//! Listeners whose connection or gateway goes away, and those that share a subscription.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::Value;

use crate::cutter::Cutter;
use crate::harness::{Gateway, eventually, forwarded, measurement, value_of};
use crate::peer::{Peer, Site};

const CLIENTS: [&str; 2] = ["c8y_api", "pyc8y"];

/// The values of a listener's messages, in the order in which they came first.
fn values(listener: &Peer) -> Vec<u64> {
    let mut seen = HashSet::new();
    let messages = listener.events("message");
    messages.iter().map(|message| value_of(&message["body"])).filter(|value| seen.insert(*value)).collect()
}

/// No message came again whose acknowledgement was sent at a quiet time: not within 250 ms before one of the `breaks`, from
/// and to in seconds since 1970, nor during it.
fn assert_acknowledged_ones_stay_away(listener: &Peer, breaks: &[(f64, f64)]) {
    let sent: HashMap<_, _> = listener
        .events("acked")
        .into_iter()
        .map(|event| (event["ack"].to_string(), event["time"].as_f64().unwrap()))
        .collect();
    let mut acknowledged = HashSet::new();
    for message in listener.events("message") {
        let value = value_of(&message["body"]);
        assert!(!acknowledged.contains(&value), "{value} came again after it was acknowledged");
        // An acknowledgement id belongs to one connection.
        let is_quiet = |time: &f64| breaks.iter().all(|(from, to)| *time < from - 0.25 || time > to);
        if sent.get(&message["ack"].to_string()).is_some_and(is_quiet) {
            acknowledged.insert(value);
        }
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

// "A dropped connection": the listeners reconnect by themselves, and nothing is lost or comes after what is newer.
#[tokio::test]
async fn listeners_go_on_after_their_connection_was_cut() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Cut", &device)).await;
    let cutter = Cutter::before(gateway.addr).await;
    let site = Site::by_way_of(&gateway, cutter.addr);
    let mut listeners = Vec::new();
    for client in CLIENTS {
        listeners.push(Peer::listener(&site, client, "Cut", &client.replace('_', ""), "exclusive").await);
    }
    let (mut value, mut breaks) = (0, Vec::new());
    for round in 1..=3 {
        for _ in 0..20 {
            value += 1;
            gateway.measure(&device, "t", value).await;
        }
        for listener in &mut listeners {
            listener.until("message", value as usize / 2).await;
        }
        let cut = now();
        cutter.cut();
        for listener in &mut listeners {
            listener.until("connected", round + 1).await;
        }
        breaks.push((cut, now()));
    }
    let expected: Vec<_> = (1..=value).collect();
    for listener in &mut listeners {
        eventually("all messages", async || (values(listener).len() == expected.len()).then_some(())).await;
        listener.stop().await;
        assert_eq!(values(listener), expected, "nothing is lost, and in order");
        assert_acknowledged_ones_stay_away(listener, &breaks);
    }
}

// "A killed gateway": what was answered with 201 comes, in order, and what was acknowledged does not come again.
#[tokio::test]
async fn listeners_go_on_after_their_gateway_was_killed() {
    let mut gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Kill", &device)).await;
    let site = Site::plain(&gateway);
    let mut listeners = Vec::new();
    for client in CLIENTS {
        listeners.push(Peer::listener(&site, client, "Kill", &client.replace('_', ""), "exclusive").await);
    }
    let producer = gateway.producer();
    let (stop, mut stopped) = tokio::sync::oneshot::channel::<()>();
    let production = tokio::spawn(async move {
        let mut promised = Vec::new();
        for value in 1.. {
            if stopped.try_recv().is_ok() {
                break;
            }
            match producer.post(&measurement(&device, "t", value), "PERSISTENT").await {
                Ok(201) => promised.push(value),
                Ok(status) => panic!("{status}"),
                // It may be stored all the same.
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
        promised
    });
    for listener in &mut listeners {
        listener.until("acked", 30).await;
    }
    let killed = now();
    gateway.kill9();
    gateway.restart_process().await;
    let restarted = now();
    for listener in &mut listeners {
        let (before, connected) = (listener.events("acked").len(), listener.events("connected").len());
        listener.until("connected", connected.max(2)).await;
        listener.until("acked", before + 30).await;
    }
    stop.send(()).unwrap();
    let promised = production.await.unwrap();
    for listener in &mut listeners {
        let has_last = async || values(listener).contains(promised.last().unwrap()).then_some(());
        eventually("the last message", has_last).await;
        listener.stop().await;
        let seen = values(listener);
        assert!(seen.is_sorted(), "in order");
        let lost: Vec<_> = promised.iter().filter(|value| !seen.contains(value)).collect();
        assert!(lost.is_empty(), "{lost:?}");
        assert_acknowledged_ones_stay_away(listener, &[(killed, restarted)]);
    }
}

/// All that the members have received: by device, the member and the value, in the order of each.
fn shares(members: &[Peer]) -> BTreeMap<String, Vec<(usize, u64)>> {
    let mut shares: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (at, member) in members.iter().enumerate() {
        for message in member.events("message") {
            let source = message["source"].as_str().unwrap();
            let device = source.strip_prefix("/edge/measurements/").unwrap().to_owned();
            shares.entry(device).or_default().push((at, value_of(&message["body"])));
        }
    }
    shares
}

/// Waits until the members have acknowledged so many messages.
async fn until_acknowledged(members: &[Peer], count: usize) {
    let acknowledged = async || members.iter().map(|member| member.events("acked").len()).sum::<usize>() >= count;
    eventually(&format!("{count} acknowledgements"), async || acknowledged().await.then_some(())).await;
}

// "Shared listeners": each message once, those of a device in order at one member; the others take over from one that leaves.
async fn share(client: &str) {
    let gateway = Gateway::start().await;
    let mut devices = Vec::new();
    // So many that a member without any would be a miracle.
    for at in 0..24 {
        let device = gateway.device(&format!("pump {at}")).await;
        gateway.subscribe(&forwarded("Shared", &device)).await;
        devices.push(device);
    }
    let site = Site::plain(&gateway);
    let mut members = Vec::new();
    for kind in ["member", "member", "shared"] {
        members.push(Peer::listener(&site, client, "Shared", "crew", kind).await);
    }
    let (mut value, mut total) = (0, 0);
    let mut round = async || {
        for _ in 0..3 {
            value += 1;
            for device in &devices {
                gateway.measure(device, "t", value).await;
                total += 1;
            }
        }
        total
    };

    let total = round().await;
    until_acknowledged(&members, total).await;
    let first = shares(&members);
    assert_eq!(first.len(), devices.len());
    for (device, share) in &first {
        let owner = share[0].0;
        assert_eq!(share, &[(owner, 1), (owner, 2), (owner, 3)], "{device}");
    }
    let owners: HashSet<_> = first.values().map(|share| share[0].0).collect();
    assert_eq!(owners.len(), 3, "each has its share");

    // The first one stops in the middle of a message, and leaves; the others get what it did not acknowledge.
    members[0].signal("USR1");
    let total = round().await;
    members[0].until("held", 1).await;
    members[0].stop().await;
    until_acknowledged(&members, total).await;
    // The second one dies.
    members[1].signal("KILL");
    members[1].gone().await;
    let total = round().await;
    until_acknowledged(&members, total).await;

    for (device, mut share) in shares(&members) {
        share.sort_unstable_by_key(|(_, value)| *value);
        let got: Vec<_> = share.iter().map(|(_, value)| *value).collect();
        assert_eq!(got, (1..=9).collect::<Vec<_>>(), "each message of {device} once");
        let at: Vec<_> = share.iter().map(|(member, _)| *member).collect();
        assert_eq!(at[6..], [2, 2, 2], "the last one gets all: {device}");
        if first[&device][0].0 != 0 {
            assert_eq!(at[..6], [first[&device][0].0; 6], "{device} stays where it was");
        }
    }
    for member in &members {
        let mut last: HashMap<Value, u64> = HashMap::new();
        for message in member.events("message") {
            let value = value_of(&message["body"]);
            let before = last.insert(message["source"].clone(), value);
            assert!(before.is_none_or(|before| before < value), "{message} came after {before:?}");
        }
    }

    members[2].stop().await;
    let token = gateway.shared_token("Shared", "crew").await;
    assert!(gateway.unsubscribe(&token).await.status >= 500, "the last one had unsubscribed");
}

#[tokio::test]
async fn members_of_c8y_api_share_and_take_over() {
    share("c8y_api").await;
}

#[tokio::test]
async fn members_of_pyc8y_share_and_take_over() {
    share("pyc8y").await;
}

// Each of several shared listeners unsubscribes when it stops: the first one succeeds, and the others find that it is done.
#[tokio::test]
async fn shared_listeners_that_stop_together_unsubscribe_once() {
    let gateway = Gateway::start().await;
    let site = Site::plain(&gateway);
    for client in CLIENTS {
        let mut members = Vec::new();
        for _ in 0..2 {
            members.push(Peer::listener(&site, client, "Together", "crew", "shared").await);
        }
        for member in &members {
            member.signal("TERM");
        }
        for member in &mut members {
            member.ended().await;
        }
        let token = gateway.shared_token("Together", "crew").await;
        assert!(gateway.unsubscribe(&token).await.status >= 500, "{client}");
    }
}
