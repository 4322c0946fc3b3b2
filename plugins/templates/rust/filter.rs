//! Passes the messages whose temperature is above a limit. Settings: `{"limit": 20}`.

use std::panic;
use std::sync::OnceLock;

use exports::tidegate::plugin::filtering::{BodyForm, Guest, Interest, Message, MetaFields, State, Value};
use serde::Deserialize;
use tidegate::plugin::log::{self, Level};

wit_bindgen::generate!({ path: "wit", world: "filter" });

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    limit: f64,
}

static SETTINGS: OnceLock<Settings> = OnceLock::new();

struct Plugin;

impl Guest for Plugin {
    fn configure(settings: String) -> Result<Interest, String> {
        // What a panic says goes into the gateway's log, and to who tries the plugin.
        panic::set_hook(Box::new(|panic| log::write(Level::Error, &panic.to_string())));
        let settings = serde_json::from_str(&settings).map_err(|error| error.to_string())?;
        SETTINGS.set(settings).map_err(|_| "configured twice".to_owned())?;
        Ok(Interest {
            // Say what you read, and no more: what isn't handed over costs nothing.
            meta: MetaFields::empty(),
            body: BodyForm::None,
            pointers: vec!["/c8y_Temperature/T/value".to_owned()],
            state: State::None,
        })
    }

    fn evaluate(batch: Vec<Message>) -> Vec<Result<bool, String>> {
        let settings = SETTINGS.get().expect("configured first");
        batch.iter().map(|message| Ok(passes(message, settings))).collect()
    }
}

fn passes(message: &Message, settings: &Settings) -> bool {
    // There is one value for each of the pointers.
    matches!(message.values.as_deref(), Some([Value::Number(temperature)]) if *temperature > settings.limit)
}

export!(Plugin);
