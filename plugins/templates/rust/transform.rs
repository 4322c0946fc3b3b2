//! Adds a member `site` to the bodies. Settings: `{"site": "Lyon"}`.

use std::panic;
use std::sync::OnceLock;

use exports::tidegate::plugin::transforming::{Body, BodyForm, Guest, Interest, Message, MetaFields, NewBody, State};
use serde::Deserialize;
use serde_json::{Map, Value};
use tidegate::plugin::log::{self, Level};

wit_bindgen::generate!({ path: "wit", world: "transform" });

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    site: String,
}

static SETTINGS: OnceLock<Settings> = OnceLock::new();

struct Plugin;

impl Guest for Plugin {
    fn configure(settings: String) -> Result<Interest, String> {
        // What a panic says goes into the gateway's log, and to who tries the plugin.
        panic::set_hook(Box::new(|panic| log::write(Level::Error, &panic.to_string())));
        let settings = serde_json::from_str(&settings).map_err(|error| error.to_string())?;
        SETTINGS.set(settings).map_err(|_| "configured twice".to_owned())?;
        // Say what you read, and no more: what isn't handed over costs nothing.
        Ok(Interest { meta: MetaFields::empty(), body: BodyForm::Bytes, state: State::None })
    }

    fn apply(batch: Vec<Message>) -> Vec<Result<NewBody, String>> {
        let settings = SETTINGS.get().expect("configured first");
        batch.iter().map(|message| new_body(message, settings)).collect()
    }
}

fn new_body(message: &Message, settings: &Settings) -> Result<NewBody, String> {
    let Body::Bytes(text) = &message.body else {
        return Ok(NewBody::Unchanged);
    };
    // An error is a fault of this message alone.
    let mut body: Map<String, Value> = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    body.insert("site".to_owned(), settings.site.as_str().into());
    serde_json::to_vec(&body).map(NewBody::Bytes).map_err(|error| error.to_string())
}

export!(Plugin);
