//! The component of the world `filter`.
#![allow(unsafe_code, missing_docs, reason = "generated bindings")]

use std::cell::RefCell;

use exports::tidegate::plugin::filtering::{BodyForm, Guest, Interest, Message, MetaFields, State};

use crate::Sampling;

wit_bindgen::generate!({ path: "../../wit", world: "filter" });

thread_local! {
    static FILTER: RefCell<Option<Sampling>> = const { RefCell::new(None) };
}

struct Component;

impl Guest for Component {
    fn configure(settings: String) -> Result<Interest, String> {
        let filter = Sampling::parse(&settings)?;
        let interest = Interest {
            meta: MetaFields::SOURCE,
            body: BodyForm::None,
            pointers: Vec::new(),
            state: if filter.keeps_state() { State::PerSource } else { State::None },
        };
        FILTER.set(Some(filter));
        Ok(interest)
    }

    fn evaluate(batch: Vec<Message>) -> Vec<Result<bool, String>> {
        FILTER.with_borrow_mut(|filter| {
            let filter = filter.as_mut().expect("invariant: the host configures before it evaluates");
            batch.iter().map(|message| Ok(filter.passes(source(message)))).collect()
        })
    }
}

fn source(message: &Message) -> &str {
    message.meta.source.as_deref().unwrap_or_default()
}

export!(Component);
