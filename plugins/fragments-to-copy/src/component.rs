//! The component of the world `transform`.
#![allow(unsafe_code, missing_docs, reason = "generated bindings")]

use std::sync::OnceLock;

use exports::tidegate::plugin::transforming::{Guest, Interest, Message, MetaFields, State};

use crate::Projection;

wit_bindgen::generate!({ path: "../../wit", world: "transform" });

static PROJECTION: OnceLock<Projection> = OnceLock::new();

struct Component;

impl Guest for Component {
    fn configure(settings: String) -> Result<Interest, String> {
        let projection = Projection::parse(&settings).map_err(|error| error.to_string())?;
        PROJECTION.set(projection).map_err(|_| "configured twice".to_owned())?;
        arena::keep();
        Ok(Interest { meta: MetaFields::API, state: State::None })
    }

    fn apply(batch: Vec<Message>) -> Vec<Result<Vec<u8>, String>> {
        let projection = PROJECTION.get().expect("invariant: the host configures before it applies");
        let project = |mut message: Message| {
            let api = message.meta.api.as_deref().expect("invariant: the host passes what the interest names");
            match projection.project(api, &mut message.body) {
                Ok(()) => Ok(message.body),
                Err(error) => Err(error.to_string()),
            }
        };
        batch.into_iter().map(project).collect()
    }
}

export!(Component);
