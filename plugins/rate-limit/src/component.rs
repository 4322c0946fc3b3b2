//! The component of the world `filter`.
#![allow(unsafe_code, missing_docs, reason = "generated bindings")]

use std::cell::RefCell;

use exports::tidegate::plugin::filtering::{BodyForm, Guest, Interest, Message, MetaFields, State};

use crate::RateLimit;

wit_bindgen::generate!({ path: "../../wit", world: "filter" });

thread_local! {
    static FILTER: RefCell<Option<RateLimit>> = const { RefCell::new(None) };
}

struct Component;

impl Guest for Component {
    fn configure(settings: String) -> Result<Interest, String> {
        let filter = RateLimit::parse(&settings)?;
        let interest = Interest {
            meta: MetaFields::SOURCE | MetaFields::TIME,
            body: BodyForm::None,
            pointers: Vec::new(),
            state: State::PerSource,
        };
        FILTER.set(Some(filter));
        Ok(interest)
    }

    fn evaluate(batch: Vec<Message>) -> Vec<Result<bool, String>> {
        FILTER.with_borrow_mut(|filter| {
            let filter = filter.as_mut().expect("invariant: the host configures before it evaluates");
            batch.iter().map(|message| Ok(filter.passes(source(message), message.meta.time.as_deref()))).collect()
        })
    }
}

fn source(message: &Message) -> &str {
    message.meta.source.as_deref().unwrap_or_default()
}

export!(Component);
