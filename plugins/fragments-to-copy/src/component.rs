//! The component of the world `transform`.
#![allow(unsafe_code, missing_docs, reason = "generated bindings")]

use std::sync::OnceLock;

use exports::tidegate::plugin::transforming::{Body, BodyForm, Guest, Interest, Message, MetaFields, NewBody, State};

use crate::Projection;

wit_bindgen::generate!({ path: "../../wit", world: "transform" });

static PROJECTION: OnceLock<Projection> = OnceLock::new();

struct Component;

impl Guest for Component {
    fn configure(settings: String) -> Result<Interest, String> {
        let projection = Projection::parse(&settings).map_err(|error| error.to_string())?;
        PROJECTION.set(projection).map_err(|_| "configured twice".to_owned())?;
        arena::keep();
        Ok(Interest { meta: MetaFields::API, body: BodyForm::Bytes, state: State::None })
    }

    fn apply(batch: Vec<Message>) -> Vec<Result<NewBody, String>> {
        let projection = PROJECTION.get().expect("invariant: the host configures before it applies");
        let project = |message: Message| {
            let (Some(api), Body::Bytes(mut body)) = (message.meta.api, message.body) else {
                unreachable!("invariant: the host passes what the interest names");
            };
            match projection.project(&api, &mut body) {
                Ok(()) => Ok(NewBody::Bytes(body)),
                Err(error) => Err(error.to_string()),
            }
        };
        batch.into_iter().map(project).collect()
    }
}

export!(Component);
