//! The component of the world `filter`.
#![allow(unsafe_code, missing_docs, reason = "generated bindings")]

use std::cell::RefCell;

use exports::tidegate::plugin::filtering::{BodyForm, Guest, Interest, Message, MetaFields, State, Value};

use crate::{Geofence, Position};

wit_bindgen::generate!({ path: "../../wit", world: "filter" });

thread_local! {
    static FILTER: RefCell<Option<Geofence>> = const { RefCell::new(None) };
}

struct Component;

impl Guest for Component {
    fn configure(settings: String) -> Result<Interest, String> {
        let filter = Geofence::parse(&settings)?;
        let interest = Interest {
            meta: MetaFields::SOURCE,
            body: BodyForm::None,
            pointers: filter.pointers().into(),
            state: if filter.keeps_state() { State::PerSource } else { State::None },
        };
        FILTER.set(Some(filter));
        Ok(interest)
    }

    fn evaluate(batch: Vec<Message>) -> Vec<Result<bool, String>> {
        FILTER.with_borrow_mut(|filter| {
            let filter = filter.as_mut().expect("invariant: the host configures before it evaluates");
            batch.iter().map(|message| Ok(filter.passes(source(message), position(message)))).collect()
        })
    }
}

fn source(message: &Message) -> &str {
    message.meta.source.as_deref().unwrap_or_default()
}

/// The position, if both of its numbers are there.
fn position(message: &Message) -> Option<Position> {
    match message.values.as_deref() {
        Some(&[Value::Number(lat), Value::Number(lng)]) => Some(Position { lat, lng }),
        _ => None,
    }
}

export!(Component);
