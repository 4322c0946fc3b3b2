//! The component of the world `filter`.
#![allow(unsafe_code, missing_docs, reason = "generated bindings")]

use std::cell::RefCell;

use exports::tidegate::plugin::filtering::{BodyForm, Guest, Interest, Message, MetaFields, State, Value};

use crate::Threshold;

wit_bindgen::generate!({ path: "../../wit", world: "filter" });

thread_local! {
    static FILTER: RefCell<Option<Threshold>> = const { RefCell::new(None) };
}

struct Component;

impl Guest for Component {
    fn configure(settings: String) -> Result<Interest, String> {
        let filter = Threshold::parse(&settings)?;
        let interest = Interest {
            meta: MetaFields::SOURCE,
            body: BodyForm::None,
            pointers: vec![filter.pointer().to_owned()],
            state: State::PerSource,
        };
        FILTER.set(Some(filter));
        Ok(interest)
    }

    fn evaluate(batch: Vec<Message>) -> Vec<Result<bool, String>> {
        FILTER.with_borrow_mut(|filter| {
            let filter = filter.as_mut().expect("invariant: the host configures before it evaluates");
            batch.iter().map(|message| Ok(filter.passes(source(message), number(message)))).collect()
        })
    }
}

fn source(message: &Message) -> &str {
    message.meta.source.as_deref().unwrap_or_default()
}

/// The value that the pointer finds, if it is a number.
fn number(message: &Message) -> Option<f64> {
    match message.values.as_deref() {
        Some([Value::Number(number)]) => Some(*number),
        _ => None,
    }
}

export!(Component);
