//! The component of the world `filter`.
#![allow(unsafe_code, missing_docs, reason = "generated bindings")]

use std::sync::OnceLock;

use exports::tidegate::plugin::filtering::{BodyForm, Guest, Interest, Message, MetaFields, State};

use crate::TypeFilter;

wit_bindgen::generate!({ path: "../../wit", world: "filter" });

static FILTER: OnceLock<TypeFilter> = OnceLock::new();

struct Component;

impl Guest for Component {
    fn configure(settings: String) -> Result<Interest, String> {
        let filter = TypeFilter::parse(&settings).map_err(|error| error.to_string())?;
        FILTER.set(filter).map_err(|_| "configured twice".to_owned())?;
        arena::keep();
        Ok(Interest { meta: MetaFields::TYPE, body: BodyForm::None, pointers: Vec::new(), state: State::None })
    }

    fn evaluate(batch: Vec<Message>) -> Vec<Result<bool, String>> {
        let filter = FILTER.get().expect("invariant: the host configures before it evaluates");
        batch.iter().map(|message| Ok(message.meta.type_.as_deref().is_some_and(|of| filter.matches(of)))).collect()
    }
}

export!(Component);
