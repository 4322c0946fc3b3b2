//! The component of the world `transform`.
#![allow(unsafe_code, missing_docs, reason = "generated bindings")]

use std::sync::OnceLock;

use exports::tidegate::plugin::transforming::{Body, BodyForm, Guest, Interest, Message, MetaFields, NewBody, State};

use crate::UnitConversion;

wit_bindgen::generate!({ path: "../../wit", world: "transform" });

static CONVERSION: OnceLock<UnitConversion> = OnceLock::new();

struct Component;

impl Guest for Component {
    fn configure(settings: String) -> Result<Interest, String> {
        CONVERSION.set(UnitConversion::parse(&settings)?).map_err(|_| "configured twice".to_owned())?;
        Ok(Interest { meta: MetaFields::empty(), body: BodyForm::Text, state: State::None })
    }

    fn apply(batch: Vec<Message>) -> Vec<Result<NewBody, String>> {
        let conversion = CONVERSION.get().expect("invariant: the host configures before it applies");
        let convert = |message: &Message| match &message.body {
            Body::Text(text) => Ok(conversion.apply(text)?.map_or(NewBody::Unchanged, NewBody::Text)),
            _ => Ok(NewBody::Unchanged),
        };
        batch.iter().map(convert).collect()
    }
}

export!(Component);
