//! The subscription as clients write it (seed 000, "Creating subscriptions"; Notifications 2.0 OpenAPI).

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::canary::{Canary, Place, RolledBack};
use crate::json::{self, Invalid, Limits, Members, each_element};
use crate::message::{Action, Api, Message};
use crate::platform::parse_id;
use crate::plugin::World;

/// Longest `subscription` name, in characters.
const NAME_CHARS: usize = 255;
/// Filters, and transforms, that a subscription may name.
const PLUGINS: usize = 8;

/// `context`: what kind of messages a subscription may forward.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Context {
    /// Messages of one managed object.
    Mo,
    /// Messages of the whole tenant.
    Tenant,
}

/// What becomes of a message that a plugin fails on (`tidegate.onFault`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnFault {
    /// It stays on disk, unjudged, and later ones of the same source wait behind it.
    #[default]
    Hold,
    /// It is not forwarded.
    Drop,
    /// It is forwarded as if the plugin were not there.
    Pass,
}

/// A plugin that a subscription names, with what it is told (a member of `tidegate.filters` or `tidegate.transforms`).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PluginUse {
    /// Its name.
    pub plugin: String,
    /// `None` in a request: the newest one, whose number takes its place. Built-in plugins have none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    /// What it is told.
    pub settings: PluginSettings,
}

/// JSON text that is handed to a plugin's `configure` as it was written, so that numbers keep their digits.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PluginSettings(Box<RawValue>);

/// An empty object.
impl Default for PluginSettings {
    fn default() -> Self {
        Self(RawValue::from_string("{}".to_owned()).expect("invariant: that is JSON"))
    }
}

impl PluginSettings {
    fn new(text: &str) -> Result<Self, Invalid> {
        let raw = RawValue::from_string(text.to_owned());
        raw.map(Self).map_err(|error| Invalid::new("settings", error.to_string()))
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.get()
    }
}

impl PartialEq for PluginSettings {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Eq for PluginSettings {}

/// A subscription: it forwards the messages that it matches to the topic `subscription`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Subscription {
    /// Object id.
    pub id: u64,
    /// See [`Context`].
    pub context: Context,
    /// Id of the managed object; set if and only if the context is `mo`.
    pub source: Option<u64>,
    /// Name of the topic.
    pub subscription: String,
    /// Whether the topic is the non-persistent one of that name.
    #[serde(default)]
    pub non_persistent: bool,
    /// Which APIs' messages; `None` or `["*"]` for all.
    pub apis: Option<Vec<String>>,
    /// The expression over `type`, as written; the plugin `type-filter` understands it.
    pub type_filter: Option<String>,
    /// What is left of a body besides the standard properties; the plugin `fragments-to-copy` cuts it.
    pub fragments_to_copy: Option<Vec<String>>,
    /// Whether consumers of the topic are told what they missed (`tidegate.gapMessages`).
    #[serde(default)]
    pub gap_messages: Option<bool>,
    /// What decides after the type filter, in order (`tidegate.filters`).
    #[serde(default)]
    pub filters: Vec<PluginUse>,
    /// What reshapes before the fragments are copied, in order (`tidegate.transforms`). An entry `fragments-to-copy` has
    /// that done in its place.
    #[serde(default)]
    pub transforms: Vec<PluginUse>,
    /// See [`OnFault`].
    #[serde(default)]
    pub on_fault: Option<OnFault>,
    /// What may take the place of one of its plugins.
    #[serde(default)]
    pub canary: Option<Canary>,
    /// What became of the last canary, if that was no success.
    #[serde(default)]
    pub rolled_back: Option<RolledBack>,
}

impl Subscription {
    /// Reads a create request. The id is left 0.
    ///
    /// JSON null counts as absent; both spellings of the filter are accepted (`subscriptionFilter` with `typeFilter`,
    /// and `filter` with `type` as in the examples of seed 000); members that the server sets are ignored, unknown ones
    /// are refused by name.
    pub fn parse(body: &[u8]) -> Result<Self, Invalid> {
        let value: Value = serde_json::from_slice(body).map_err(|error| Invalid::new("", error.to_string()))?;
        let mut members = object("", value)?;
        for set_by_server in ["id", "self"] {
            members.remove(set_by_server);
        }
        let context = match text(&mut members, "context", "context")?.as_deref() {
            Some("mo") => Context::Mo,
            Some("tenant") => Context::Tenant,
            Some(_) => return Err(Invalid::new("context", "must be 'mo' or 'tenant'")),
            None => return Err(missing("context")),
        };
        let subscription =
            text(&mut members, "subscription", "subscription")?.ok_or_else(|| missing("subscription"))?;
        check_name("subscription", &subscription)?;
        let source = parse_source(&mut members, context)?;
        let non_persistent = boolean(&mut members, "nonPersistent", "nonPersistent")?.unwrap_or(false);
        let (apis, type_filter) = parse_filter(&mut members, context)?;
        let fragments_to_copy = texts(&mut members, "fragmentsToCopy", "fragmentsToCopy")?.filter(|f| !f.is_empty());
        members.remove("tidegate");
        let Extension { gap_messages, filters, transforms, on_fault } = Extension::of(body)?;
        if non_persistent && gap_messages == Some(true) {
            return Err(Invalid::new("tidegate.gapMessages", "is only for persistent subscriptions"));
        }
        if let Some(unknown) = members.keys().next() {
            return Err(Invalid::new(unknown, "is not a known member of a subscription"));
        }
        Ok(Self {
            id: 0,
            context,
            source,
            subscription,
            non_persistent,
            apis,
            type_filter,
            fragments_to_copy,
            gap_messages,
            filters,
            transforms,
            on_fault,
            canary: None,
            rolled_back: None,
        })
    }

    /// The types (line 2 of a frame) under which this subscription forwards `message`: none, one or, where `*` takes both
    /// `events` and `eventsWithChildren`, two. `own`: the message is of the subscription's source, not of a child below it.
    ///
    /// In `mo` context an object's own creation can never be forwarded, in `tenant` context nothing but creations of
    /// managed objects; tenant-wide measurements have to be named, `*` does not include them.
    pub fn types(&self, message: &Message, own: bool) -> impl Iterator<Item = &'static str> {
        let wildcard = self.takes_all();
        let Message { api, action, .. } = *message;
        let possible = match (self.context, api, action) {
            (Context::Mo, Api::ManagedObjects, Action::Create) => false,
            (Context::Tenant, Api::ManagedObjects, action) => action == Action::Create,
            (Context::Tenant, Api::Measurements, _) => !wildcard,
            _ => true,
        };
        let plain = Some(api.as_str()).filter(|_| possible && own);
        let with_children = api.with_children().filter(|_| self.context == Context::Mo);
        let wanted = |name: &&str| self.takes(name);
        [plain.filter(wanted), with_children.filter(wanted)].into_iter().flatten()
    }

    /// Whether it may forward messages of this type (line 2 of a frame).
    #[must_use]
    pub fn takes(&self, kind: &str) -> bool {
        self.takes_all() || self.apis.iter().flatten().any(|name| name == kind)
    }

    fn takes_all(&self) -> bool {
        self.apis.as_ref().is_none_or(|apis| apis.iter().any(|name| name == "*"))
    }

    /// Whether messages of what is below the source may concern this, too (seed 000, "Subscription filters").
    #[must_use]
    pub fn follows_children(&self) -> bool {
        let follows = |name: &String| name == "*" || name.ends_with("WithChildren");
        self.context == Context::Mo && self.apis.as_ref().is_none_or(|apis| apis.iter().any(follows))
    }

    /// Whether a second one like this would be a duplicate. Filters do not count.
    #[must_use]
    pub fn duplicates(&self, other: &Self) -> bool {
        let key = |one: &Self| (one.context, one.source, one.non_persistent);
        key(self) == key(other) && self.subscription == other.subscription
    }

    /// The plugins that it names, a canary included.
    pub fn plugins(&self) -> impl Iterator<Item = &PluginUse> {
        let canary = self.canary.as_ref().map(|canary| &canary.named);
        self.filters.iter().chain(&self.transforms).chain(canary)
    }

    /// The plugin that it names at a place.
    #[must_use]
    pub fn at(&self, place: Place) -> Option<&PluginUse> {
        match place.world {
            World::Filter => &self.filters,
            World::Transform => &self.transforms,
        }
        .get(place.at)
    }

    /// The one place where it names this plugin.
    pub(super) fn place_of(&self, plugin: &str) -> Result<Place, Invalid> {
        let places = |world, list: &[PluginUse]| {
            let named = list.iter().enumerate().filter(|(_, named)| named.plugin == plugin);
            named.map(|(at, _)| Place { world, at }).collect::<Vec<_>>()
        };
        match [places(World::Filter, &self.filters), places(World::Transform, &self.transforms)].concat()[..] {
            [place] => Ok(place),
            [] => {
                let text = format!(
                    "'{plugin}' is not among those that the subscription names; 'place' says whose place it may take"
                );
                Err(Invalid::new("plugin", text))
            }
            [..] => {
                let text = format!("must say which, since the subscription names '{plugin}' more than once");
                Err(Invalid::new("place", text))
            }
        }
    }

    /// With the canary where it has its place, if there is one.
    pub(super) fn promote(&mut self) {
        let Some(Canary { place, named, .. }) = self.canary.take() else { return };
        let list = match place.world {
            World::Filter => &mut self.filters,
            World::Transform => &mut self.transforms,
        };
        if let Some(place) = list.get_mut(place.at) {
            *place = named;
        }
    }

    /// The subscription as clients see it, as JSON text; `source_name` is that of its source.
    #[must_use]
    pub fn render(&self, base_url: &str, source_name: Option<&str>) -> String {
        let mut out = Map::new();
        let mut set = |name: &str, value: Value| out.insert(name.to_owned(), value);
        set("id", self.id.to_string().into());
        set("self", format!("{base_url}/notification2/subscriptions/{}", self.id).into());
        if let Some(source) = self.source {
            let url = format!("{base_url}/inventory/managedObjects/{source}");
            let mut rendered =
                Map::from_iter([("id".to_owned(), source.to_string().into()), ("self".to_owned(), url.into())]);
            rendered.extend(source_name.map(|name| ("name".to_owned(), name.into())));
            set("source", rendered.into());
        }
        set("context", if self.context == Context::Mo { "mo" } else { "tenant" }.into());
        set("subscription", self.subscription.clone().into());
        if self.apis.is_some() || self.type_filter.is_some() {
            let mut filter = Map::new();
            if let Some(apis) = &self.apis {
                filter.insert("apis".to_owned(), apis.clone().into());
            }
            if let Some(type_filter) = &self.type_filter {
                filter.insert("typeFilter".to_owned(), type_filter.clone().into());
            }
            set("subscriptionFilter", filter.into());
        }
        if let Some(fragments) = &self.fragments_to_copy {
            set("fragmentsToCopy", fragments.clone().into());
        }
        set("nonPersistent", self.non_persistent.into());
        let extension = RenderedExtension {
            filters: &self.filters,
            transforms: &self.transforms,
            on_fault: self.on_fault,
            gap_messages: self.gap_messages,
        };
        let tidegate = Some(extension).filter(RenderedExtension::says_something);
        serde_json::to_string(&Rendered { members: out, tidegate }).expect("invariant: texts and JSON serialize")
    }
}

/// A subscription as it is shown.
#[derive(Serialize)]
struct Rendered<'a> {
    #[serde(flatten)]
    members: Map<String, Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tidegate: Option<RenderedExtension<'a>>,
}

/// What was set in the extension.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct RenderedExtension<'a> {
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    filters: &'a [PluginUse],
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    transforms: &'a [PluginUse],
    #[serde(skip_serializing_if = "Option::is_none")]
    on_fault: Option<OnFault>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gap_messages: Option<bool>,
}

impl RenderedExtension<'_> {
    fn says_something(&self) -> bool {
        !self.filters.is_empty()
            || !self.transforms.is_empty()
            || self.on_fault.is_some()
            || self.gap_messages.is_some()
    }
}

impl PluginUse {
    fn parse(raw: &str) -> Result<Self, Invalid> {
        let members = Members::of(raw, &Limits::default())?;
        members.only(&["plugin", "version", "settings"])?;
        let (plugin, version, settings) = Self::parts(&members)?;
        Ok(Self { plugin, version, settings: settings.unwrap_or_default() })
    }

    /// Its name, version and settings, among other members.
    pub(super) fn parts(members: &Members<'_>) -> Result<(String, Option<u32>, Option<PluginSettings>), Invalid> {
        let plugin = members.get("plugin").ok_or_else(|| Invalid::new("plugin", "must name a plugin"))?;
        let version = match members.get("version") {
            None | Some("\"latest\"") => None,
            Some(number) => match number.parse() {
                Ok(version) if version > 0 => Some(version),
                _ => return Err(Invalid::new("version", "must be a number from 1 on, or \"latest\"")),
            },
        };
        let settings = members.get("settings").map(PluginSettings::new).transpose()?;
        Ok((json::string(plugin, "plugin")?.into_owned(), version, settings))
    }
}

/// Names of topics and consumers are ASCII letters and digits, so that tokens survive every base64 decoder.
pub fn check_name(field: &str, name: &str) -> Result<(), Invalid> {
    if name.is_empty() {
        Err(Invalid::new(field, "must not be empty"))
    } else if name.len() > NAME_CHARS {
        Err(Invalid::new(field, format!("must have at most {NAME_CHARS} characters")))
    } else if !name.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        Err(Invalid::new(field, "must consist of the letters a-z and A-Z and digits"))
    } else {
        Ok(())
    }
}

fn parse_source(members: &mut Map<String, Value>, context: Context) -> Result<Option<u64>, Invalid> {
    let source = match (take(members, "source"), context) {
        (None, Context::Tenant) => return Ok(None),
        (None, Context::Mo) => return Err(missing("source.id")),
        (Some(_), Context::Tenant) => return Err(Invalid::new("source", "is only for the context 'mo'")),
        (Some(source), Context::Mo) => source,
    };
    let mut source = object("source", source)?;
    source.remove("name");
    source.remove("self");
    let id = match take(&mut source, "id") {
        None => return Err(missing("source.id")),
        Some(Value::String(text)) => parse_id(&text),
        Some(Value::Number(number)) => parse_id(&number.to_string()),
        Some(_) => None,
    };
    if let Some(unknown) = source.keys().next() {
        return Err(Invalid::new(&format!("source.{unknown}"), "is not a known member of a source"));
    }
    id.map(Some).ok_or_else(|| Invalid::new("source.id", "must be the id of a managed object"))
}

/// What is ours and not the platform's.
#[derive(Default)]
struct Extension {
    gap_messages: Option<bool>,
    filters: Vec<PluginUse>,
    transforms: Vec<PluginUse>,
    on_fault: Option<OnFault>,
}

impl Extension {
    /// Reads it from a whole request, whose syntax has been checked: what is within has to stay as it is written.
    fn of(body: &[u8]) -> Result<Self, Invalid> {
        #[derive(Deserialize)]
        struct Body<'a> {
            #[serde(borrow)]
            tidegate: Option<&'a RawValue>,
        }
        let Body { tidegate } = serde_json::from_slice(body).map_err(|error| Invalid::new("", error.to_string()))?;
        tidegate
            .map_or_else(|| Ok(Self::default()), |raw| Self::parse(raw.get()).map_err(|error| error.within("tidegate")))
    }

    fn parse(raw: &str) -> Result<Self, Invalid> {
        let members = Members::of(raw, &Limits::default())?;
        members.only(&["filters", "transforms", "onFault", "gapMessages"])?;
        Ok(Self {
            gap_messages: members.get("gapMessages").map(|raw| json::boolean(raw, "gapMessages")).transpose()?,
            filters: plugins(&members, "filters")?,
            transforms: plugins(&members, "transforms")?,
            on_fault: match members.get("onFault").map(|raw| json::string(raw, "onFault")).transpose()?.as_deref() {
                None => None,
                Some("hold") => Some(OnFault::Hold),
                Some("drop") => Some(OnFault::Drop),
                Some("pass") => Some(OnFault::Pass),
                Some(_) => return Err(Invalid::new("onFault", "must be 'hold', 'drop' or 'pass'")),
            },
        })
    }
}

fn plugins(extension: &Members<'_>, name: &str) -> Result<Vec<PluginUse>, Invalid> {
    let Some(list) = extension.get(name) else { return Ok(Vec::new()) };
    let mut plugins = Vec::new();
    each_element(list, |raw| {
        if plugins.len() == PLUGINS {
            return Err(Invalid::new(name, format!("must have at most {PLUGINS} members")));
        }
        let parsed = PluginUse::parse(raw).map_err(|error| error.within(&format!("{name}[{}]", plugins.len())))?;
        plugins.push(parsed);
        Ok(())
    })
    .map_err(|error| if error.field.is_empty() { error.within(name) } else { error })?;
    Ok(plugins)
}

type Filter = (Option<Vec<String>>, Option<String>);

fn parse_filter(members: &mut Map<String, Value>, context: Context) -> Result<Filter, Invalid> {
    let (name, filter) = match (take(members, "subscriptionFilter"), take(members, "filter")) {
        (None, None) => return Ok((None, None)),
        (Some(filter), None) => ("subscriptionFilter", filter),
        (None, Some(filter)) => ("filter", filter),
        (Some(_), Some(_)) => return Err(Invalid::new("filter", "must not stand beside 'subscriptionFilter'")),
    };
    let mut filter = object(name, filter)?;
    let mut apis = texts(&mut filter, "apis", &format!("{name}.apis"))?;
    if let Some(apis) = &mut apis {
        // Each name counts once, so that the list is short.
        let mut seen = HashSet::new();
        apis.retain(|api| seen.insert(api.clone()));
        check_apis(apis, context).map_err(|reason| Invalid::new(&format!("{name}.apis"), reason))?;
    }
    let long = text(&mut filter, "typeFilter", &format!("{name}.typeFilter"))?;
    let short = text(&mut filter, "type", &format!("{name}.type"))?;
    if long.is_some() && short.is_some() {
        return Err(Invalid::new(&format!("{name}.type"), "must not stand beside 'typeFilter'"));
    }
    if let Some(unknown) = filter.keys().next() {
        return Err(Invalid::new(&format!("{name}.{unknown}"), "is not a known member of a filter"));
    }
    Ok((apis, long.or(short)))
}

fn check_apis(apis: &[String], context: Context) -> Result<(), String> {
    if apis.is_empty() {
        return Err("must name at least one API".to_owned());
    }
    for api in apis {
        match api.as_str() {
            "*" if apis.len() > 1 => return Err("'*' must stand alone".to_owned()),
            "*" | "measurements" | "managedobjects" | "alarms" | "events" | "operations" => {}
            "alarmsWithChildren" | "eventsWithChildren" if context == Context::Mo => {}
            "alarmsWithChildren" | "eventsWithChildren" => return Err(format!("'{api}' is only for the context 'mo'")),
            _ => return Err(format!("'{api}' is not a known API")),
        }
    }
    Ok(())
}

fn missing(field: &str) -> Invalid {
    Invalid::new("", format!("Following mandatory fields should be included: {field}"))
}

/// JSON null is absent.
fn take(members: &mut Map<String, Value>, name: &str) -> Option<Value> {
    members.remove(name).filter(|value| !value.is_null())
}

fn object(field: &str, value: Value) -> Result<Map<String, Value>, Invalid> {
    match value {
        Value::Object(members) => Ok(members),
        _ => Err(Invalid::new(field, "must be an object")),
    }
}

fn text(members: &mut Map<String, Value>, name: &str, field: &str) -> Result<Option<String>, Invalid> {
    match take(members, name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(Invalid::new(field, "must be a string")),
    }
}

fn texts(members: &mut Map<String, Value>, name: &str, field: &str) -> Result<Option<Vec<String>>, Invalid> {
    let Some(value) = take(members, name) else { return Ok(None) };
    serde_json::from_value(value).map(Some).map_err(|_| Invalid::new(field, "must be an array of strings"))
}

fn boolean(members: &mut Map<String, Value>, name: &str, field: &str) -> Result<Option<bool>, Invalid> {
    match take(members, name) {
        None => Ok(None),
        Some(Value::Bool(value)) => Ok(Some(value)),
        Some(_) => Err(Invalid::new(field, "must be true or false")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    fn refused(body: &str) -> String {
        Subscription::parse(body.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn both_spellings_of_the_filter_mean_the_same() {
        let platform = r#"{"context":"mo","subscription":"s","source":{"id":"2468"},
            "subscriptionFilter":{"apis":["measurements"],"typeFilter":"'a'"}}"#;
        let seed = r#"{"context":"mo","subscription":"s","source":{"id":2468,"name":"x","self":"y"},
            "filter":{"apis":["measurements"],"type":"'a'"},"id":"1","self":"z","fragmentsToCopy":null}"#;
        assert_eq!(Subscription::parse(platform.as_bytes()).unwrap(), Subscription::parse(seed.as_bytes()).unwrap());
    }

    #[test]
    fn plugins_are_named_in_the_extension() {
        let body = r#"{"context":"tenant","subscription":"s","tidegate":{"onFault":"pass","filters":[
            {"plugin":"threshold","version":2,"settings":{"limit": 1.50}},{"plugin":"sampling","version":"latest"}],
            "transforms":[{"plugin":"fragments-to-copy","settings":null}]}}"#;
        let parsed = Subscription::parse(body.as_bytes()).unwrap();
        assert_eq!(parsed.on_fault, Some(OnFault::Pass));
        assert_eq!((parsed.filters[0].version, parsed.filters[1].version), (Some(2), None));
        assert_eq!(parsed.filters[0].settings.as_str(), r#"{"limit": 1.50}"#);
        let extension = r#""tidegate":{"filters":[{"plugin":"threshold","version":2,"settings":{"limit": 1.50}},{"plugin":"sampling","settings":{}}],"transforms":[{"plugin":"fragments-to-copy","settings":{}}],"onFault":"pass"}}"#;
        let rendered = parsed.render("", None);
        assert!(rendered.ends_with(extension), "{rendered}");
        let stored = serde_json::to_string(&parsed).unwrap();
        assert_eq!(serde_json::from_str::<Subscription>(&stored).unwrap(), parsed);
        let extension =
            |text: &str| refused(&format!(r#"{{"context":"tenant","subscription":"s","tidegate":{text}}}"#));
        for (text, expected) in [
            (r#"{"filters":{}}"#, "tidegate.filters: must be a JSON array"),
            (r#"{"filters":[{}]}"#, "tidegate.filters[0].plugin: must name a plugin"),
            (
                r#"{"transforms":[{"plugin":"a","version":0}]}"#,
                "tidegate.transforms[0].version: must be a number from 1 on",
            ),
            (r#"{"filters":[{"plugin":"a"},{"plugin":"b","x":1}]}"#, "tidegate.filters[1].x: is not a known member"),
            (r#"{"filters":[1]}"#, "tidegate.filters[0]: must be a JSON object"),
            (r#"{"filters":[{"plugin":1}]}"#, "tidegate.filters[0].plugin: must be a string"),
            (r#"{"filters":[{"plugin":"a","plugin":"b"}]}"#, "tidegate.filters[0].plugin: occurs twice"),
            (r#"{"onFault":"drop","onFault":"pass"}"#, "tidegate.onFault: occurs twice"),
            (r#"{"onFault":"retry"}"#, "tidegate.onFault: must be 'hold', 'drop' or 'pass'"),
        ] {
            let text = extension(text);
            assert!(text.starts_with(expected), "{text}");
        }
        let many = format!(r#"{{"filters":[{}]}}"#, [r#"{"plugin":"a"}"#; PLUGINS + 1].join(","));
        assert_eq!(extension(&many), "tidegate.filters: must have at most 8 members");
    }

    #[test]
    fn a_canary_is_kept_and_takes_its_place_when_it_is_promoted() {
        let body = r#"{"context":"tenant","subscription":"s","tidegate":{"filters":[
            {"plugin":"a","version":1},{"plugin":"a","version":2}]}}"#;
        let mut subscription = Subscription::parse(body.as_bytes()).unwrap();
        let before = serde_json::to_string(&subscription).unwrap();
        let place = Place { world: World::Filter, at: 1 };
        let settings = PluginSettings::new("1.50").unwrap();
        let named = PluginUse { plugin: "b".into(), version: Some(3), settings };
        subscription.canary = Some(Canary { place, named: named.clone(), share: 0.1, since_ms: 7 });
        assert!(subscription.plugins().any(|plugin| *plugin == named));
        let stored = serde_json::to_string(&subscription).unwrap();
        assert_eq!(serde_json::from_str::<Subscription>(&stored).unwrap(), subscription);
        subscription.promote();
        assert_eq!((subscription.filters.len(), subscription.at(place)), (2, Some(&named)));
        assert!(subscription.canary.is_none() && subscription.at(Place { at: 2, ..place }).is_none());
        // As earlier releases have written it.
        let without = before.replace(r#","canary":null,"rolled_back":null"#, "");
        assert_ne!(without, before);
        assert_eq!(serde_json::from_str::<Subscription>(&without).unwrap().canary, None);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (body, expected) in [
            ("[]", "must be an object"),
            (r#"{"subscription":"s"}"#, "mandatory fields should be included: context"),
            (r#"{"context":"x","subscription":"s"}"#, "context: must be 'mo' or 'tenant'"),
            (r#"{"context":"tenant"}"#, "mandatory fields should be included: subscription"),
            (r#"{"context":"tenant","subscription":"a b"}"#, "subscription: must consist of"),
            (r#"{"context":"mo","subscription":"s"}"#, "mandatory fields should be included: source.id"),
            (r#"{"context":"mo","subscription":"s","source":{"id":"x"}}"#, "source.id: must be the id"),
            (r#"{"context":"mo","subscription":"s","source":{"id":"+1"}}"#, "source.id: must be the id"),
            (r#"{"context":"mo","subscription":"s","source":{"id":9223372036854775808}}"#, "source.id: must be the id"),
            (r#"{"context":"tenant","subscription":"s","source":{"id":"1"}}"#, "source: is only for"),
            (r#"{"context":"tenant","subscription":"s","colour":1}"#, "colour: is not a known member"),
            (
                r#"{"context":"tenant","subscription":"s","filter":{},"subscriptionFilter":{}}"#,
                "filter: must not stand",
            ),
            (
                r#"{"context":"tenant","subscription":"s","filter":{"type":"a","typeFilter":"a"}}"#,
                "filter.type: must not",
            ),
            (
                r#"{"context":"tenant","subscription":"s","filter":{"apis":["*","measurements"]}}"#,
                "'*' must stand alone",
            ),
            (
                r#"{"context":"tenant","subscription":"s","filter":{"apis":["eventsWithChildren"]}}"#,
                "only for the context",
            ),
            (r#"{"context":"tenant","subscription":"s","filter":{"apis":["audits"]}}"#, "'audits' is not a known API"),
            (r#"{"context":"tenant","subscription":"s","filter":{"apis":"*"}}"#, "filter.apis: must be an array"),
            (r#"{"context":"tenant","subscription":"s","fragmentsToCopy":[1]}"#, "fragmentsToCopy: must be an array"),
            (r#"{"context":"tenant","subscription":"s","nonPersistent":1}"#, "nonPersistent: must be true or false"),
            (r#"{"context":"tenant","subscription":"s","tidegate":1}"#, "tidegate: must be a JSON object"),
            (r#"{"context":"tenant","subscription":"s","tidegate":{"x":1}}"#, "tidegate.x: is not a known member"),
            (
                r#"{"context":"tenant","subscription":"s","tidegate":{"gapMessages":1}}"#,
                "tidegate.gapMessages: must be true or false",
            ),
            (
                r#"{"context":"tenant","subscription":"s","nonPersistent":true,"tidegate":{"gapMessages":true}}"#,
                "tidegate.gapMessages: is only for persistent subscriptions",
            ),
        ] {
            let text = refused(body);
            assert!(text.contains(expected), "{body}: {text}");
        }
        let long = format!(r#"{{"context":"tenant","subscription":"{}"}}"#, "a".repeat(NAME_CHARS + 1));
        assert!(refused(&long).contains("at most 255 characters"));
    }

    #[test]
    fn the_table_of_contexts_and_apis() {
        let message = |api, action| Message {
            tenant: "t".into(),
            api,
            action,
            source: "1".into(),
            kind: None,
            time: "".into(),
            body: bytes::Bytes::new(),
        };
        let all = [
            (Api::ManagedObjects, Action::Create),
            (Api::ManagedObjects, Action::Update),
            (Api::ManagedObjects, Action::Delete),
            (Api::Measurements, Action::Create),
            (Api::Events, Action::Create),
            (Api::Alarms, Action::Update),
            (Api::Operations, Action::Create),
        ];
        let everything = "- managedobjects managedobjects measurements events+eventsWithChildren alarms+alarmsWithChildren operations";
        for (context, apis, own, expected) in [
            ("mo", r#"["*"]"#, true, everything),
            ("mo", "null", true, everything),
            ("mo", r#"["*"]"#, false, "- - - - eventsWithChildren alarmsWithChildren -"),
            ("mo", r#"["measurements"]"#, true, "- - - measurements - - -"),
            ("mo", r#"["managedobjects"]"#, true, "- managedobjects managedobjects - - - -"),
            ("mo", r#"["events","operations"]"#, true, "- - - - events - operations"),
            ("mo", r#"["events","operations"]"#, false, "- - - - - - -"),
            ("mo", r#"["alarmsWithChildren"]"#, true, "- - - - - alarmsWithChildren -"),
            ("mo", r#"["alarmsWithChildren","alarms"]"#, true, "- - - - - alarms+alarmsWithChildren -"),
            ("mo", r#"["alarmsWithChildren","alarms"]"#, false, "- - - - - alarmsWithChildren -"),
            ("tenant", r#"["*"]"#, true, "managedobjects - - - events alarms operations"),
            ("tenant", "null", true, "managedobjects - - - events alarms operations"),
            ("tenant", r#"["measurements"]"#, true, "- - - measurements - - -"),
            ("tenant", r#"["measurements","managedobjects"]"#, true, "managedobjects - - measurements - - -"),
            ("tenant", r#"["events"]"#, true, "- - - - events - -"),
        ] {
            let source = if context == "mo" { r#","source":{"id":"1"}"# } else { "" };
            let body = format!(
                r#"{{"context":"{context}","subscription":"s"{source},"subscriptionFilter":{{"apis":{apis}}}}}"#
            );
            let subscription = Subscription::parse(body.as_bytes()).unwrap();
            let types = all.map(|(api, action)| {
                let types: Vec<_> = subscription.types(&message(api, action), own).collect();
                if types.is_empty() { "-".to_owned() } else { types.join("+") }
            });
            assert_eq!(types.join(" "), expected, "{context} {apis} {own}");
        }
    }
}
