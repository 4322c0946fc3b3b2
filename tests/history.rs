//! The history of many devices over the ingest APIs, thrown by dice, with a model beside it: what consumers received and what lists
//! return equals the model, each device's messages came in order, and nothing crossed tenants. One device of each tenant is common
//! to all of its clients: there no request may undo another one.
//!
//! `TIDEGATE_HISTORY_REQUESTS` is the number of requests, `TIDEGATE_HISTORY_SEED` repeats the dice of a failed run.
#![allow(clippy::print_stderr, reason = "a seed, for a run that fails")]

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};
use tokio::sync::Barrier;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::harness::{Consumer, Dice, Frame, Gateway, PASSWORD, eventually, in_time};

const CLIENTS_EACH: usize = 8;
const DEVICES_EACH: usize = 3;
/// At the end, one request of so many goes to the common device, of all clients at once.
const RUSH: usize = 10;
const TYPES: [&str; 5] = ["t0", "t1", "t2", "t3", "t4"];
/// What the topic `typed` wants, and the only fragment that its messages keep.
const WANTED: [&str; 2] = ["t1", "t3"];
const KEPT: &str = "c8y_Kept";
const OTHER: &str = "c8y_Other";
const SEVERITIES: [&str; 4] = ["CRITICAL", "MAJOR", "MINOR", "WARNING"];
const STATUSES: [&str; 3] = ["ACTIVE", "ACKNOWLEDGED", "CLEARED"];
/// An alarm's first time in the model, which clients see once it has occurred again.
const FIRST: &str = "~first";
const RELATIONS: [&str; 6] =
    ["childDevices", "childAssets", "childAdditions", "deviceParents", "assetParents", "additionParents"];

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Api {
    Measurements,
    Events,
    Alarms,
    Operations,
    Objects,
}

impl Api {
    fn path(self) -> &'static str {
        match self {
            Self::Measurements => "/measurement/measurements",
            Self::Events => "/event/events",
            Self::Alarms => "/alarm/alarms",
            Self::Operations => "/devicecontrol/operations",
            Self::Objects => "/inventory/managedObjects",
        }
    }

    /// The member of its lists.
    fn many(self) -> &'static str {
        match self {
            Self::Objects => "managedObjects",
            _ => self.path().rsplit('/').next().unwrap(),
        }
    }

    /// Its modes, each with whether it stores and whether it tells.
    fn modes(self) -> &'static [(&'static str, bool, bool)] {
        const ALL: [(&str, bool, bool); 4] =
            [("PERSISTENT", true, true), ("TRANSIENT", false, true), ("QUIESCENT", true, false), ("CEP", false, false)];
        match self {
            Self::Measurements | Self::Events => &ALL,
            Self::Objects => &ALL[..3],
            Self::Alarms | Self::Operations => &ALL[..2],
        }
    }
}

/// A message that topics have to hear of, in the order of its device.
#[derive(Clone, Debug)]
struct Told {
    api: Api,
    action: &'static str,
    kind: Option<String>,
    /// A subscription of the device itself was there.
    followed: bool,
    body: Value,
}

/// A message as it has to come, or came: type, action, body.
type Heard = (String, String, Value);

impl Told {
    fn heard(&self, kind: &str) -> Heard {
        (kind.to_owned(), self.action.to_owned(), self.body.clone())
    }

    /// What becomes of it in a topic.
    fn in_topic(&self, topic: &str) -> Vec<Heard> {
        let name = self.api.many().to_lowercase();
        match topic {
            "all" if self.api != Api::Objects || self.action == "CREATE" => vec![self.heard(&name)],
            "typed" if self.api <= Api::Alarms && self.kind.as_deref().is_some_and(|kind| WANTED.contains(&kind)) => {
                let mut heard = self.heard(&name);
                heard.2.as_object_mut().unwrap().remove(OTHER);
                vec![heard]
            }
            "own" if self.followed && (self.api != Api::Objects || self.action != "CREATE") => {
                let with_children = matches!(self.api, Api::Events | Api::Alarms);
                let kinds = [Some(name.clone()), with_children.then(|| format!("{name}WithChildren"))];
                kinds.iter().flatten().map(|kind| self.heard(kind)).collect()
            }
            _ => Vec::new(),
        }
    }
}

struct Device {
    object: Value,
    followed: bool,
}

/// What one client has made of its devices, which no other client touches.
#[derive(Default)]
struct Model {
    devices: BTreeMap<u64, Device>,
    stored: BTreeMap<(Api, u64), Value>,
    told: BTreeMap<u64, Vec<Told>>,
}

impl Model {
    fn tell(&mut self, device: u64, api: Api, action: &'static str, kind: &Value, body: Value) {
        let followed = self.devices.get(&device).is_some_and(|device| device.followed);
        let kind = kind.as_str().map(str::to_owned);
        self.told.entry(device).or_default().push(Told { api, action, kind, followed, body });
    }

    /// An object as clients see it, but for links and the times that the gateway sets.
    fn shown(&self, api: Api, object: &Value) -> Value {
        let mut shown = object.clone();
        let name = |device: u64| self.devices[&device].object["name"].clone();
        match api {
            Api::Events | Api::Alarms => shown["source"]["name"] = name(device_of(api, object)),
            Api::Operations => shown["deviceName"] = name(device_of(api, object)),
            Api::Measurements | Api::Objects => {}
        }
        if let Some(first) = shown.as_object_mut().unwrap().remove(FIRST)
            && shown["count"] != 1
        {
            shown["firstOccurrenceTime"] = first;
        }
        shown
    }

    fn alarms(&self, device: u64) -> impl Iterator<Item = (u64, &Value)> {
        let alarms = self.stored.iter().filter(|((api, _), _)| *api == Api::Alarms);
        alarms.map(|((_, id), alarm)| (*id, alarm)).filter(move |(_, alarm)| device_of(Api::Alarms, alarm) == device)
    }

    /// How many open alarms of each severity a device has.
    fn open(&self, device: u64) -> Value {
        let mut open = json!({});
        for (_, alarm) in self.alarms(device).filter(|(_, alarm)| alarm["status"] != "CLEARED") {
            let severity = alarm["severity"].as_str().unwrap().to_lowercase();
            open[&severity] = json!(open[&severity].as_u64().unwrap_or_default() + 1);
        }
        open
    }

    /// The alarm that another one of its device and type is an occurrence of.
    fn again(&self, device: u64, kind: &Value) -> Option<u64> {
        let open = self.alarms(device).filter(|(_, alarm)| alarm["status"] != "CLEARED" && alarm["type"] == *kind);
        open.max_by_key(|(id, alarm)| (alarm["status"] == "ACTIVE", *id)).map(|(id, _)| id)
    }

    /// The open alarms of all devices.
    fn all_open(&self) -> Vec<(u64, Value)> {
        self.devices.keys().map(|device| (*device, self.open(*device))).collect()
    }

    /// Devices tell of their open alarms when there are others than `before`.
    fn tell_open(&mut self, before: Vec<(u64, Value)>) {
        for (device, before) in before {
            let open = self.open(device);
            if open != before {
                let object = &mut self.devices.get_mut(&device).unwrap().object;
                object["c8y_ActiveAlarmsStatus"] = open;
                let object = object.clone();
                self.tell(device, Api::Objects, "UPDATE", &object["type"], object.clone());
            }
        }
    }

    /// Tells of an object that a client sees.
    fn tell_object(&mut self, api: Api, action: &'static str, object: &Value) {
        let body = if action == "DELETE" { json!({"id": object["id"]}) } else { self.shown(api, object) };
        self.tell(device_of(api, object), api, action, &object["type"], body);
    }
}

fn device_of(api: Api, object: &Value) -> u64 {
    let id = match api {
        Api::Objects => &object["id"],
        Api::Operations => &object["deviceId"],
        _ => &object["source"]["id"],
    };
    number(id)
}

fn number(id: &Value) -> u64 {
    id.as_str().and_then(|id| id.parse().ok()).unwrap_or_else(|| panic!("no id: {id}"))
}

/// What came, without the links and the times that the gateway sets.
fn bare(mut came: Value) -> Value {
    if let Some(members) = came.as_object_mut() {
        for name in ["self", "creationTime", "lastUpdated", "history"].iter().chain(&RELATIONS) {
            members.remove(*name);
        }
        if let Some(source) = members.get_mut("source").and_then(Value::as_object_mut) {
            source.remove("self");
        }
    }
    came
}

/// What one client did to the common device.
#[derive(Default)]
struct Crowd {
    /// Its member there.
    name: String,
    /// Of measurements, and of changes of its member: their numbers.
    numbers: Vec<u64>,
    /// The last number of its member.
    last: Option<u64>,
    puts: usize,
    alarms: usize,
}

/// One client of a tenant.
struct Author {
    tenant: &'static str,
    user: String,
    http: reqwest::Client,
    addr: SocketAddr,
    dice: Dice,
    model: Model,
    /// A device of the other tenant.
    alien: u64,
    /// The device that all clients of the tenant share, and what this one did to it.
    common: u64,
    crowd: Crowd,
    /// Makes each text another one.
    texts: u64,
}

impl Author {
    async fn send(&self, method: Method, path: &str, mode: &str, body: Option<&Value>) -> (u16, Value) {
        let mut request = self.http.request(method, format!("http://{}{path}", self.addr));
        request = request.basic_auth(&self.user, Some(PASSWORD)).header("Accept", "application/json");
        request = request.header("X-Cumulocity-Processing-Mode", mode);
        if let Some(body) = body {
            request = request.json(body);
        }
        let answer = in_time(path, request.send()).await.unwrap();
        let status = answer.status().as_u16();
        let body = answer.bytes().await.unwrap();
        (status, serde_json::from_slice(&body).unwrap_or_default())
    }

    /// Sends what has to succeed; returns the answer's object.
    async fn expect(&self, status: u16, method: Method, path: &str, mode: &str, body: Option<&Value>) -> Value {
        let (came, answer) = self.send(method.clone(), path, mode, body).await;
        assert_eq!(came, status, "{} {method} {path} {mode}: {answer}\n{body:?}", self.tenant);
        answer
    }

    /// Mostly the default, else any mode of the API.
    fn mode(&mut self, api: Api) -> (&'static str, bool, bool) {
        if self.dice.one_in(3) { *self.dice.one_of(api.modes()) } else { api.modes()[0] }
    }

    fn device(&mut self) -> u64 {
        let devices: Vec<_> = self.model.devices.keys().copied().collect();
        *self.dice.one_of(&devices)
    }

    /// Any stored object of one API.
    fn any(&mut self, api: Api) -> Option<(u64, Value)> {
        let ids: Vec<_> = self.model.stored.keys().filter(|(of, _)| *of == api).map(|(_, id)| *id).collect();
        let id = *ids.get(usize::try_from(self.dice.below(ids.len().max(1) as u64)).unwrap())?;
        Some((id, self.model.stored[&(api, id)].clone()))
    }

    fn text(&mut self) -> String {
        self.texts += 1;
        let strange = *self.dice.one_of(&["", "\n", "\u{2028}", "\\\"", "ä€𝄞", "\u{85}\t", "message-id:1\n\n"]);
        format!("{strange} {}", self.texts)
    }

    fn time(&mut self) -> String {
        let mut below = |end| self.dice.below(end);
        format!("2026-03-{:02}T{:02}:{:02}:{:02}.{:03}Z", 1 + below(28), below(24), below(60), below(60), below(1000))
    }

    /// What a client posts.
    fn new_object(&mut self, api: Api) -> Value {
        let mut object = json!({"source": {"id": self.device().to_string()}, "type": self.dice.one_of(&TYPES)});
        object["time"] = json!(self.time());
        if api == Api::Measurements {
            let value = self.dice.below(1_000_000);
            object[KEPT] = json!({"R": {"value": value, "unit": "C"}});
            object[OTHER] = json!({"S": {"value": -0.5}});
            return object;
        }
        object["text"] = json!(self.text());
        object[KEPT] = json!(self.text());
        object[OTHER] = json!([{"a": null}, 1.25, true]);
        if api == Api::Alarms {
            object["severity"] = json!(self.dice.one_of(&SEVERITIES));
            if self.dice.one_in(4) {
                object["status"] = json!(self.dice.one_of(&STATUSES));
            }
        }
        object
    }

    /// One request, or a few that belong together.
    async fn act(&mut self) {
        match self.dice.below(100) {
            0..22 => self.create(Api::Measurements).await,
            22..35 => self.create(Api::Events).await,
            35..38 => self.crowd().await,
            38..52 => self.raise().await,
            52..62 => self.update_event().await,
            62..66 => self.delete(Api::Events).await,
            66..69 => self.delete(Api::Measurements).await,
            69..77 => self.update_alarm().await,
            77..79 => self.clear_alarms().await,
            79..83 => self.create_operation().await,
            83..87 => self.update_operation().await,
            87..89 => self.create_device(None).await,
            89..92 => self.update_device().await,
            92 => self.delete_device().await,
            93 => self.delete_events().await,
            94..98 => self.look().await,
            98 => self.trespass().await,
            _ => self.blunder().await,
        }
    }

    /// Posts one object, or some at once; returns the objects that the client sent with those that the answer holds.
    async fn post(&mut self, api: Api, mode: &str) -> Vec<(Value, Value)> {
        if !self.dice.one_in(6) {
            let new = self.new_object(api);
            let made = self.expect(201, Method::POST, api.path(), mode, Some(&new)).await;
            return vec![(new, made)];
        }
        let new: Vec<_> = (0..2 + self.dice.below(4)).map(|_| self.new_object(api)).collect();
        let mut made = self.expect(201, Method::POST, api.path(), mode, Some(&json!({api.many(): new}))).await;
        let Value::Array(made) = made[api.many()].take() else { panic!("no {} in the answer", api.many()) };
        assert_eq!(made.len(), new.len());
        new.into_iter().zip(made).collect()
    }

    async fn create(&mut self, api: Api) {
        let (mode, stores, tells) = self.mode(api);
        for (mut object, made) in self.post(api, mode).await {
            object["id"] = made["id"].clone();
            assert_eq!(bare(made), self.model.shown(api, &object));
            if tells {
                self.model.tell_object(api, "CREATE", &object);
            }
            if stores {
                self.model.stored.insert((api, number(&object["id"])), object);
            }
        }
    }

    /// Something that happens to the common device.
    async fn crowd(&mut self) {
        let (device, time) = (self.common, self.time());
        let number = (self.crowd.numbers.len() + self.crowd.alarms) as u64;
        let mut object = json!({"source": {"id": device.to_string()}, "type": "crowd", "time": time});
        let name = self.crowd.name.clone();
        match self.dice.below(3) {
            0 => {
                object["c8y_Crowd"] = json!({name: {"value": number}});
                self.expect(201, Method::POST, Api::Measurements.path(), "PERSISTENT", Some(&object)).await;
                self.crowd.numbers.push(number);
            }
            1 => {
                object["text"] = json!("too many");
                object["severity"] = json!("MAJOR");
                self.expect(201, Method::POST, Api::Alarms.path(), "PERSISTENT", Some(&object)).await;
                self.crowd.alarms += 1;
            }
            _ => {
                let path = format!("{}/{device}", Api::Objects.path());
                let changed =
                    self.expect(200, Method::PUT, &path, "PERSISTENT", Some(&json!({name.as_str(): number}))).await;
                assert_eq!(changed[&name], number);
                self.crowd.numbers.push(number);
                self.crowd.last = Some(number);
                self.crowd.puts += 1;
            }
        }
    }

    async fn raise(&mut self) {
        let (mode, stores, _) = self.mode(Api::Alarms);
        let before = self.model.all_open();
        let mut told = Vec::new();
        for (new, made) in self.post(Api::Alarms, mode).await {
            let again = self.model.again(device_of(Api::Alarms, &new), &new["type"]).filter(|_| stores);
            let (action, alarm) = if let Some(id) = again {
                let mut alarm = self.model.stored[&(Api::Alarms, id)].clone();
                alarm["count"] = json!(alarm["count"].as_u64().unwrap() + 1);
                alarm["time"] = new["time"].clone();
                ("UPDATE", alarm)
            } else {
                let mut alarm = new;
                alarm["id"] = made["id"].clone();
                alarm["count"] = json!(1);
                alarm[FIRST] = alarm["time"].clone();
                if alarm.get("status").is_none() {
                    alarm["status"] = json!("ACTIVE");
                }
                ("CREATE", alarm)
            };
            assert_eq!(bare(made), self.model.shown(Api::Alarms, &alarm));
            told.push((action, alarm.clone()));
            if stores {
                self.model.stored.insert((Api::Alarms, number(&alarm["id"])), alarm);
            }
        }
        self.model.tell_open(before);
        told.iter().for_each(|(action, alarm)| self.model.tell_object(Api::Alarms, action, alarm));
    }

    async fn update_event(&mut self) {
        let Some((id, mut event)) = self.any(Api::Events) else { return };
        let (mode, stores, tells) = self.mode(Api::Events);
        let patch = match self.dice.below(4) {
            0 => json!({"text": self.text()}),
            1 => json!({KEPT: {"n": self.text()}, OTHER: null}),
            2 => json!({OTHER: self.text()}),
            _ => json!({"id": id.to_string()}),
        };
        merge(&mut event, &patch);
        let path = format!("{}/{id}", Api::Events.path());
        let answer = self.expect(200, Method::PUT, &path, mode, Some(&patch)).await;
        assert_eq!(bare(answer), self.model.shown(Api::Events, &event));
        if tells && patch.get("id").is_none() {
            self.model.tell_object(Api::Events, "UPDATE", &event);
        }
        if stores {
            self.model.stored.insert((Api::Events, id), event);
        }
    }

    async fn delete(&mut self, api: Api) {
        let Some((id, object)) = self.any(api) else { return };
        let (mode, stores, tells) = self.mode(api);
        self.expect(204, Method::DELETE, &format!("{}/{id}", api.path()), mode, None).await;
        if tells {
            self.model.tell_object(api, "DELETE", &object);
        }
        if stores {
            self.model.stored.remove(&(api, id));
        }
    }

    async fn update_alarm(&mut self) {
        let Some((id, before)) = self.any(Api::Alarms) else { return };
        let (mode, stores, _) = self.mode(Api::Alarms);
        let patch = match self.dice.below(4) {
            0 => json!({"status": self.dice.one_of(&STATUSES)}),
            1 => json!({"severity": self.dice.one_of(&SEVERITIES), "text": self.text()}),
            2 => json!({OTHER: null}),
            _ => json!({"status": before["status"], "text": before["text"]}),
        };
        let mut alarm = before.clone();
        merge(&mut alarm, &patch);
        let answer = self.expect(200, Method::PUT, &format!("{}/{id}", Api::Alarms.path()), mode, Some(&patch)).await;
        assert_eq!(bare(answer), self.model.shown(Api::Alarms, &alarm));
        let open = self.model.all_open();
        if stores {
            self.model.stored.insert((Api::Alarms, id), alarm.clone());
        }
        self.model.tell_open(open);
        if alarm != before {
            self.model.tell_object(Api::Alarms, "UPDATE", &alarm);
        }
    }

    /// The status of all alarms of a device that have another one.
    async fn clear_alarms(&mut self) {
        let device = self.device();
        let (from, to) = (*self.dice.one_of(&STATUSES), *self.dice.one_of(&STATUSES));
        let path = format!("{}?source={device}&status={from}", Api::Alarms.path());
        let mut alarms: Vec<_> = self.model.alarms(device).map(|(id, alarm)| (id, alarm.clone())).collect();
        alarms.retain(|(_, alarm)| alarm["status"] == from && from != to);
        // More than fifty are changed in several commits, after each of which the device tells of its alarms.
        if alarms.len() > 50 {
            return;
        }
        self.expect(200, Method::PUT, &path, "PERSISTENT", Some(&json!({"status": to}))).await;
        let open = self.model.all_open();
        for (id, alarm) in &mut alarms {
            alarm["status"] = json!(to);
            self.model.stored.insert((Api::Alarms, *id), alarm.clone());
        }
        self.model.tell_open(open);
        alarms.iter().for_each(|(_, alarm)| self.model.tell_object(Api::Alarms, "UPDATE", alarm));
    }

    async fn create_operation(&mut self) {
        let (mode, stores, _) = self.mode(Api::Operations);
        let mut operation = json!({"deviceId": self.device().to_string(), "description": self.text(), KEPT: {}});
        let made = self.expect(201, Method::POST, Api::Operations.path(), mode, Some(&operation)).await;
        operation["id"] = made["id"].clone();
        operation["status"] = json!("PENDING");
        assert_eq!(bare(made), self.model.shown(Api::Operations, &operation));
        self.model.tell_object(Api::Operations, "CREATE", &operation);
        if stores {
            self.model.stored.insert((Api::Operations, number(&operation["id"])), operation);
        }
    }

    async fn update_operation(&mut self) {
        let Some((id, mut operation)) = self.any(Api::Operations) else { return };
        let (mode, stores, _) = self.mode(Api::Operations);
        let mut patch = json!({"status": self.dice.one_of(&["EXECUTING", "SUCCESSFUL", "FAILED"])});
        if patch["status"] == "FAILED" {
            patch["failureReason"] = json!(self.text());
        } else {
            patch[OTHER] = json!({"result": self.text()});
        }
        merge(&mut operation, &patch);
        let path = format!("{}/{id}", Api::Operations.path());
        let answer = self.expect(200, Method::PUT, &path, mode, Some(&patch)).await;
        assert_eq!(bare(answer), self.model.shown(Api::Operations, &operation));
        self.model.tell_object(Api::Operations, "UPDATE", &operation);
        if stores {
            self.model.stored.insert((Api::Operations, id), operation);
        }
    }

    /// Makes a device, half of which are followed by a subscription of their own.
    async fn create_device(&mut self, mode: Option<(&'static str, bool, bool)>) {
        let (mode, stores, tells) = mode.unwrap_or_else(|| *self.dice.one_of(Api::Objects.modes()));
        let mut object = json!({"name": self.text(), "type": self.dice.one_of(&TYPES), "c8y_IsDevice": {}});
        let made = self.expect(201, Method::POST, Api::Objects.path(), mode, Some(&object)).await;
        object["id"] = made["id"].clone();
        object["owner"] = json!(self.user.rsplit('/').next().unwrap());
        assert_eq!(bare(made), object);
        let id = number(&object["id"]);
        if tells {
            self.model.tell(id, Api::Objects, "CREATE", &object["type"], object.clone());
        }
        if stores {
            let followed = self.dice.one_in(2);
            if followed {
                let own = json!({"context": "mo", "source": {"id": id.to_string()}, "subscription": "own"});
                self.expect(201, Method::POST, "/notification2/subscriptions", "PERSISTENT", Some(&own)).await;
            }
            self.model.devices.insert(id, Device { object, followed });
        }
    }

    async fn update_device(&mut self) {
        let id = self.device();
        let (mode, stores, tells) = self.mode(Api::Objects);
        let patch = match self.dice.below(4) {
            0 => json!({"name": self.text()}),
            1 => json!({KEPT: self.text(), OTHER: null}),
            2 => json!({OTHER: [self.text()], "type": self.dice.one_of(&TYPES)}),
            _ => json!({}),
        };
        let path = format!("{}/{id}", Api::Objects.path());
        let answer = bare(self.expect(200, Method::PUT, &path, mode, Some(&patch)).await);
        if patch == json!({}) {
            assert_eq!(answer, json!({"id": id.to_string()}), "a heartbeat");
            return;
        }
        let mut object = self.model.devices[&id].object.clone();
        merge(&mut object, &patch);
        assert_eq!(answer, object);
        if tells {
            self.model.tell(id, Api::Objects, "UPDATE", &object["type"], object.clone());
        }
        if stores {
            self.model.devices.get_mut(&id).unwrap().object = object;
        }
    }

    /// What belongs to the device goes with it, and nothing is told of that.
    async fn delete_device(&mut self) {
        let id = self.device();
        if self.model.devices.len() <= DEVICES_EACH {
            return;
        }
        let (mode, stores, tells) = self.mode(Api::Objects);
        self.expect(204, Method::DELETE, &format!("{}/{id}", Api::Objects.path()), mode, None).await;
        let object = self.model.devices[&id].object.clone();
        if tells {
            self.model.tell_object(Api::Objects, "DELETE", &object);
        }
        if stores {
            self.model.devices.remove(&id);
            self.model.stored.retain(|(api, _), object| device_of(*api, object) != id);
        }
    }

    /// A collection goes without a word.
    async fn delete_events(&mut self) {
        let (device, kind) = (self.device(), *self.dice.one_of(&TYPES));
        let path = format!("{}?source={device}&type={kind}", Api::Events.path());
        self.expect(204, Method::DELETE, &path, "PERSISTENT", None).await;
        self.model.stored.retain(|(api, _), object| {
            *api != Api::Events || device_of(*api, object) != device || object["type"] != kind
        });
    }

    /// What was answered can be read.
    async fn look(&mut self) {
        let api = *self.dice.one_of(&[Api::Measurements, Api::Events, Api::Alarms, Api::Operations]);
        let Some((id, object)) = self.any(api) else { return };
        let found = self.expect(200, Method::GET, &format!("{}/{id}", api.path()), "PERSISTENT", None).await;
        assert_eq!(bare(found), self.model.shown(api, &object));
    }

    /// A device of another tenant is not there.
    async fn trespass(&mut self) {
        let path = format!("{}/{}", Api::Objects.path(), self.alien);
        for method in [Method::GET, Method::PUT, Method::DELETE] {
            self.expect(404, method, &path, "PERSISTENT", Some(&json!({"name": "mine"}))).await;
        }
        for api in [Api::Measurements, Api::Events, Api::Alarms] {
            let mut object = self.new_object(api);
            object["source"]["id"] = json!(self.alien.to_string());
            self.expect(422, Method::POST, api.path(), "PERSISTENT", Some(&object)).await;
            let list = format!("{}?source={}", api.path(), self.alien);
            let list = self.expect(200, Method::GET, &list, "PERSISTENT", None).await;
            assert_eq!(list[api.many()], json!([]));
        }
    }

    /// What is refused leaves nothing behind.
    async fn blunder(&mut self) {
        for api in [Api::Measurements, Api::Events, Api::Alarms] {
            let mut wrong = self.new_object(api);
            wrong.as_object_mut().unwrap().remove("type");
            let many = json!({api.many(): [self.new_object(api), wrong]});
            self.expect(422, Method::POST, api.path(), "PERSISTENT", Some(&many)).await;
        }
    }
}

/// PUT: members replace those of the same name, null removes.
fn merge(object: &mut Value, patch: &Value) {
    let object = object.as_object_mut().unwrap();
    for (name, value) in patch.as_object().unwrap() {
        if value.is_null() {
            object.remove(name);
        } else {
            object.insert(name.clone(), value.clone());
        }
    }
}

/// What the clients of one consumer have received.
#[derive(Default)]
struct Inbox {
    heard: HashMap<u64, Vec<Heard>>,
    ids: HashSet<u64>,
    redelivered: usize,
}

impl Inbox {
    fn take(&mut self, tenant: &str, frame: &Frame) {
        if !self.ids.insert(frame.message_id()) {
            self.redelivered += 1;
            return;
        }
        let parts: Vec<_> = frame.description.split('/').collect();
        let ["", of, kind, source] = parts[..] else { panic!("{}", frame.description) };
        assert_eq!(of, tenant, "a message of another tenant");
        let heard = (kind.to_owned(), frame.action.clone(), bare(frame.json()));
        self.heard.entry(source.parse().unwrap()).or_default().push(heard);
    }
}

/// Connects as soon as the place of the connection before is free.
async fn connect(url: &str) -> Consumer {
    loop {
        match Consumer::connect(url).await {
            Ok(consumer) => return consumer,
            Err(409) => tokio::time::sleep(Duration::from_millis(10)).await,
            Err(status) => panic!("the upgrade was refused with {status}"),
        }
    }
}

/// A client of a consumer: receives and acknowledges, and drops its connection now and then with something unacknowledged.
async fn receive(url: String, tenant: &'static str, inbox: Arc<Mutex<Inbox>>, mut dice: Dice, over: CancellationToken) {
    const UNACKNOWLEDGED: u64 = 20;
    loop {
        let mut consumer = in_time("the consumer's place is free", connect(&url)).await;
        let mut left = 100 + dice.below(400);
        while left > 0 {
            let Some(frame) = over.run_until_cancelled(consumer.try_next()).await else {
                return consumer.close().await;
            };
            let frame = frame.expect("the gateway ended the connection");
            inbox.lock().unwrap().take(tenant, &frame);
            if left > UNACKNOWLEDGED {
                consumer.ack(&frame).await;
            }
            left -= 1;
        }
    }
}

/// A topic of a tenant, and what its consumer has received.
struct Topic {
    tenant: &'static str,
    /// The tenant's common device.
    common: u64,
    name: &'static str,
    inbox: Arc<Mutex<Inbox>>,
}

impl Topic {
    /// Holds what came against what was to come.
    fn judge(&self, authors: &[Author], seed: u64) {
        let inbox = self.inbox.lock().unwrap();
        let mut expected: HashMap<u64, Vec<Heard>> = HashMap::new();
        for author in authors.iter().filter(|author| author.tenant == self.tenant) {
            for (device, told) in &author.model.told {
                let heard: Vec<_> = told.iter().flat_map(|told| told.in_topic(self.name)).collect();
                if !heard.is_empty() {
                    expected.insert(*device, heard);
                }
            }
        }
        for (device, came) in inbox.heard.iter().filter(|(device, _)| **device != self.common) {
            let expected = expected.get(device).map_or(&[][..], Vec::as_slice);
            let at = came.iter().zip(expected).position(|(came, expected)| came != expected);
            let at = at.unwrap_or(came.len().min(expected.len()));
            assert!(
                came.len() == expected.len() && at == came.len(),
                "seed {seed}: topic {}/{}, device {device}, message {at} of {} expected and {} that came:\n{:#?}\n{:#?}",
                self.tenant,
                self.name,
                expected.len(),
                came.len(),
                expected.get(at),
                came.get(at),
            );
        }
        let devices = inbox.heard.keys().filter(|device| **device != self.common).count();
        assert_eq!(devices, expected.len(), "seed {seed}: devices in {}/{}", self.tenant, self.name);
    }

    /// Holds what came of the common device: no occurrence of the alarm is lost, no change of one client undoes that of another
    /// one, and each client's requests are in order.
    fn judge_crowd(&self, authors: &[Author], seed: u64) {
        let inbox = self.inbox.lock().unwrap();
        let (mut count, mut object) = (0, json!({}));
        let mut numbers: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        for (kind, action, body) in &inbox.heard[&self.common] {
            match kind.as_str() {
                "alarms" => {
                    count += 1;
                    let expected = if count == 1 { "CREATE" } else { "UPDATE" };
                    assert_eq!((&body["count"], action.as_str()), (&json!(count), expected), "seed {seed}");
                }
                "measurements" => {
                    let (name, series) = body["c8y_Crowd"].as_object().unwrap().iter().next().unwrap();
                    numbers.entry(name.clone()).or_default().push(series["value"].as_u64().unwrap());
                }
                "managedobjects" => {
                    for (name, value) in body.as_object().unwrap().iter().filter(|(name, _)| name.starts_with("client"))
                    {
                        if object[name] != *value {
                            numbers.entry(name.clone()).or_default().push(value.as_u64().unwrap());
                        }
                    }
                    object = body.clone();
                }
                _ => {}
            }
        }
        for author in authors.iter().filter(|author| author.tenant == self.tenant) {
            let Crowd { name, numbers: sent, last, .. } = &author.crowd;
            assert_eq!(numbers.get(name).map_or(&[][..], Vec::as_slice), sent, "seed {seed}: {}, {name}", self.tenant);
            assert_eq!(object[name].as_u64(), *last, "seed {seed}: {}, {name}", self.tenant);
        }
        assert_eq!(count, self.crowd(authors, |crowd| crowd.alarms), "seed {seed}: {}", self.tenant);
    }

    fn crowd(&self, authors: &[Author], count: impl Fn(&Crowd) -> usize) -> usize {
        authors.iter().filter(|author| author.tenant == self.tenant).map(|author| count(&author.crowd)).sum()
    }

    fn owed(&self, authors: &[Author]) -> usize {
        let own = authors.iter().filter(|author| author.tenant == self.tenant);
        let told = own.flat_map(|author| author.model.told.values().flatten());
        let (alarms, puts) = (self.crowd(authors, |crowd| crowd.alarms), self.crowd(authors, |crowd| crowd.puts));
        let measurements = self.crowd(authors, |crowd| crowd.numbers.len()) - puts;
        let crowd = match self.name {
            "all" => measurements + alarms,
            // With the first alarm the device tells that it has one.
            "own" => measurements + 2 * alarms + puts + alarms.min(1),
            _ => 0,
        };
        crowd + told.map(|told| told.in_topic(self.name).len()).sum::<usize>()
    }
}

/// All of a list, paged through.
async fn listed(author: &Author, api: Api, filter: &str) -> BTreeMap<u64, Value> {
    let mut all = BTreeMap::new();
    for page in 1.. {
        let path = format!("{}?{filter}&pageSize=100&currentPage={page}", api.path());
        let mut list = author.expect(200, Method::GET, &path, "PERSISTENT", None).await;
        let Value::Array(objects) = list[api.many()].take() else { panic!("{path}: {list}") };
        if objects.is_empty() {
            break;
        }
        for object in objects {
            let id = number(&object["id"]);
            assert!(all.insert(id, bare(object)).is_none(), "{path}: {id} is on two pages");
        }
    }
    all
}

/// Holds the lists of a tenant against what its clients have made, as a whole and of some devices.
async fn judge_lists(authors: &[Author], tenant: &str, seed: u64) {
    let own: Vec<_> = authors.iter().filter(|author| author.tenant == tenant).collect();
    let expected = |api: Api, keep: &dyn Fn(&Value) -> bool| -> BTreeMap<u64, Value> {
        let mut all = BTreeMap::new();
        for author in &own {
            let stored = author.model.stored.iter().filter(|((of, _), object)| *of == api && keep(object));
            all.extend(stored.map(|((_, id), object)| (*id, author.model.shown(api, object))));
            if api == Api::Objects {
                all.extend(author.model.devices.iter().map(|(id, device)| (*id, device.object.clone())));
            }
        }
        all
    };
    let common = own[0].common;
    let differ = |api: Api, what: &str, mut came: BTreeMap<u64, Value>, mut expected: BTreeMap<u64, Value>| {
        came.retain(|_, object| device_of(api, object) != common);
        let both = came.len() == expected.len();
        came.retain(|id, object| expected.get(id) != Some(object) || expected.remove(id).is_none());
        assert!(both && came.is_empty(), "seed {seed}: {tenant}, {what}: came {came:#?}\nexpected {expected:#?}");
    };
    for api in [Api::Measurements, Api::Events, Api::Alarms, Api::Operations, Api::Objects] {
        differ(api, api.many(), listed(own[0], api, "").await, expected(api, &|_| true));
    }
    for device in own.iter().filter_map(|author| author.model.devices.keys().next()) {
        for api in [Api::Measurements, Api::Events, Api::Alarms] {
            let of_device = |object: &Value| device_of(api, object) == *device && object["type"] == "t1";
            let filter = format!("source={device}&type=t1");
            differ(api, &filter, listed(own[0], api, &filter).await, expected(api, &of_device));
        }
        let open = |alarm: &Value| device_of(Api::Alarms, alarm) == *device && alarm["status"] != "CLEARED";
        let filter = format!("source={device}&resolved=false");
        differ(Api::Alarms, &filter, listed(own[0], Api::Alarms, &filter).await, expected(Api::Alarms, &open));
    }
}

/// Holds the common device of a tenant against what its clients did to it.
async fn judge_common(authors: &[Author], tenant: &str, seed: u64) {
    let own: Vec<_> = authors.iter().filter(|author| author.tenant == tenant).collect();
    let object = format!("{}/{}", Api::Objects.path(), own[0].common);
    let object = own[0].expect(200, Method::GET, &object, "PERSISTENT", None).await;
    for author in &own {
        assert_eq!(object[&author.crowd.name].as_u64(), author.crowd.last, "seed {seed}: {}", author.crowd.name);
    }
    assert_eq!(object["c8y_ActiveAlarmsStatus"], json!({"major": 1}), "seed {seed}");
    let alarms = listed(own[0], Api::Alarms, &format!("source={}", own[0].common)).await;
    let counts: Vec<_> = alarms.values().map(|alarm| alarm["count"].as_u64().unwrap()).collect();
    assert_eq!(counts, [own.iter().map(|author| author.crowd.alarms as u64).sum::<u64>()], "seed {seed}");
}

/// The tenants, each with its administrator.
const TENANTS: [(&str, &str); 2] = [("edge", "edge/admin"), ("north", "north/keeper")];

/// Subscribes a tenant and connects its consumers: an exclusive one of everything, three that share what passes a filter and is
/// reshaped, and an exclusive one of the devices that are followed.
async fn consume(
    gateway: &Gateway,
    (tenant, user): (&'static str, &str),
    dice: &mut Dice,
    over: &CancellationToken,
    consumers: &mut JoinSet<()>,
) -> Vec<Topic> {
    let apis = ["measurements", "events", "alarms", "operations", "managedobjects"];
    let common = json!({"name": "common", "c8y_IsDevice": {}});
    let common = gateway.post("/inventory/managedObjects", &common).user(user, PASSWORD).await.expect(201).json();
    for subscription in [
        json!({"context": "tenant", "subscription": "all", "subscriptionFilter": {"apis": apis}}),
        json!({
            "context": "tenant",
            "subscription": "typed",
            "subscriptionFilter": {"apis": apis[..3], "typeFilter": format!("'{}' or '{}'", WANTED[0], WANTED[1])},
            "fragmentsToCopy": [KEPT],
        }),
        json!({"context": "mo", "subscription": "own", "source": {"id": common["id"]}}),
    ] {
        gateway.post("/notification2/subscriptions", &subscription).user(user, PASSWORD).await.expect(201);
    }
    let mut topics = Vec::new();
    for (name, members) in
        [("all", &[""][..]), ("typed", &["&consumer=a", "&consumer=b", "&consumer=c"]), ("own", &[""])]
    {
        let request = json!({"subscription": name, "subscriber": "history", "shared": members.len() > 1});
        let token = gateway.post("/notification2/token", &request).user(user, PASSWORD).await.expect(200).json();
        let inbox = Arc::new(Mutex::new(Inbox::default()));
        for member in members {
            let token = token["token"].as_str().unwrap();
            let url = format!("ws://{}/notification2/consumer/?token={token}{member}", gateway.addr);
            // The topic begins to keep messages with the first connection, which is gone again at once.
            Consumer::connect(&url).await.unwrap_or_else(|status| panic!("{status}")).close().await;
            consumers.spawn(receive(url, tenant, inbox.clone(), dice.split(), over.clone()));
        }
        topics.push(Topic { tenant, common: number(&common["id"]), name, inbox });
    }
    topics
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_history_of_many_devices_equals_its_model_in_consumers_and_lists() {
    let requests: usize = std::env::var("TIDEGATE_HISTORY_REQUESTS").map_or(10_000, |number| number.parse().unwrap());
    let mut dice = Dice::new("TIDEGATE_HISTORY_SEED");
    let seed = dice.seed();
    eprintln!("history: {requests} requests, seed {seed}");
    let gateway = Gateway::start().await;
    gateway.tenant("north").await;
    let over = CancellationToken::new();
    let mut consumers = JoinSet::new();
    let mut topics = Vec::new();
    let mut aliens = Vec::new();
    for tenant in TENANTS {
        topics.extend(consume(&gateway, tenant, &mut dice, &over, &mut consumers).await);
        let quiet = gateway.post("/inventory/managedObjects", &json!({})).user(tenant.1, PASSWORD);
        let quiet = quiet.header("X-Cumulocity-Processing-Mode", "QUIESCENT").await.expect(201).json();
        aliens.push(number(&quiet["id"]));
    }
    let each = requests / (2 * CLIENTS_EACH);
    let rush = Arc::new(Barrier::new(2 * CLIENTS_EACH));
    let mut clients = JoinSet::new();
    for (at, (tenant, user)) in TENANTS.into_iter().enumerate() {
        for client in 0..CLIENTS_EACH {
            let mut author = Author {
                tenant,
                user: user.to_owned(),
                http: reqwest::Client::builder().no_proxy().build().unwrap(),
                addr: gateway.addr,
                dice: dice.split(),
                model: Model::default(),
                alien: aliens[1 - at],
                common: topics.iter().find(|topic| topic.tenant == tenant).unwrap().common,
                crowd: Crowd { name: format!("client{client}"), ..Crowd::default() },
                texts: 0,
            };
            let rush = rush.clone();
            clients.spawn(async move {
                for _ in 0..DEVICES_EACH {
                    author.create_device(Some(Api::Objects.modes()[0])).await;
                }
                for _ in 0..each - each / RUSH {
                    author.act().await;
                }
                rush.wait().await;
                for _ in 0..each / RUSH {
                    author.crowd().await;
                }
                author
            });
        }
    }
    let started = std::time::Instant::now();
    let authors = clients.join_all().await;
    let sent_in = started.elapsed();
    for topic in &topics {
        let owed = topic.owed(&authors);
        eventually(&format!("seed {seed}: {}/{} has {owed} messages", topic.tenant, topic.name), async || {
            (topic.inbox.lock().unwrap().ids.len() >= owed).then_some(())
        })
        .await;
    }
    // What should not come has had its time.
    tokio::time::sleep(Duration::from_millis(300)).await;
    over.cancel();
    consumers.join_all().await;
    topics.iter().for_each(|topic| topic.judge(&authors, seed));
    topics.iter().filter(|topic| topic.name == "own").for_each(|topic| topic.judge_crowd(&authors, seed));
    for (at, (tenant, user)) in TENANTS.into_iter().enumerate() {
        let path = format!("/inventory/managedObjects/{}", aliens[at]);
        gateway.delete(&path).user(user, PASSWORD).await.expect(204);
        judge_lists(&authors, tenant, seed).await;
        judge_common(&authors, tenant, seed).await;
    }
    for topic in &topics {
        let inbox = topic.inbox.lock().unwrap();
        let (tenant, name, redelivered) = (topic.tenant, topic.name, inbox.redelivered);
        eprintln!("history: {tenant}/{name}: {} messages, {redelivered} delivered again", inbox.ids.len());
        assert!(inbox.ids.len() > requests / 20, "{tenant}/{name} is no history");
    }
    let stored: usize = authors.iter().map(|author| author.model.stored.len()).sum();
    eprintln!("history: {stored} objects are left; sent in {sent_in:.1?}, done in {:.1?}", started.elapsed());
}
