//! Guests that misbehave, for the tests of the host: each example is one.

/// Makes the example a filter that evaluates by the given `fn(batch: Vec<Message>) -> Vec<bool>`, and is interested in what the
/// given `fn(settings: String) -> Interest` says.
#[macro_export]
macro_rules! filter {
    ($evaluate:expr) => {
        $crate::filter!(
            |_settings| Interest {
                meta: MetaFields::TYPE,
                body: BodyForm::None,
                pointers: Vec::new(),
                state: State::None,
            },
            $evaluate
        );
    };
    ($configure:expr, $evaluate:expr) => {
        #[cfg(target_arch = "wasm32")]
        mod component {
            #![allow(unsafe_code, missing_docs, reason = "generated bindings")]
            use exports::tidegate::plugin::filtering::{BodyForm, Guest, Interest, Message, MetaFields, State};

            wit_bindgen::generate!({ path: "../../wit", world: "filter" });

            struct Component;

            impl Guest for Component {
                fn configure(settings: String) -> Result<Interest, String> {
                    Ok($configure(settings))
                }

                fn evaluate(batch: Vec<Message>) -> Vec<Result<bool, String>> {
                    let verdicts: Vec<bool> = $evaluate(batch);
                    verdicts.into_iter().map(Ok).collect()
                }
            }

            export!(Component);
        }
    };
}

/// Makes the example a transform that makes each body by the given `fn(body: Vec<u8>) -> Vec<u8>`.
#[macro_export]
macro_rules! transform {
    ($reshape:expr) => {
        #[cfg(target_arch = "wasm32")]
        mod component {
            #![allow(unsafe_code, missing_docs, reason = "generated bindings")]
            use exports::tidegate::plugin::transforming::{
                Body, BodyForm, Guest, Interest, Message, MetaFields, NewBody, State,
            };

            wit_bindgen::generate!({ path: "../../wit", world: "transform" });

            struct Component;

            impl Guest for Component {
                fn configure(_settings: String) -> Result<Interest, String> {
                    Ok(Interest { meta: MetaFields::empty(), body: BodyForm::Bytes, state: State::None })
                }

                fn apply(batch: Vec<Message>) -> Vec<Result<NewBody, String>> {
                    let reshape = |message: Message| match message.body {
                        Body::Bytes(body) => Ok(NewBody::Bytes($reshape(body))),
                        other => unreachable!("invariant: the host passes what the interest names, not {other:?}"),
                    };
                    batch.into_iter().map(reshape).collect()
                }
            }

            export!(Component);
        }
    };
}

/// A counter that traps at each third message of the instance.
#[derive(Debug, Default)]
pub struct TrapThird(std::sync::atomic::AtomicU32);

impl TrapThird {
    /// Starts before the first message.
    #[must_use]
    pub const fn new() -> Self {
        Self(std::sync::atomic::AtomicU32::new(0))
    }

    /// Counts one message.
    ///
    /// # Panics
    ///
    /// At each third.
    pub fn count(&self) {
        let counted = self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1;
        assert!(!counted.is_multiple_of(3), "each third message traps");
    }
}
