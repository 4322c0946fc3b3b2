//! Passes everything, but traps at each third message of the instance.

#[cfg(target_arch = "wasm32")]
static MESSAGES: faulty::TrapThird = faulty::TrapThird::new();

faulty::filter!(|batch: Vec<Message>| { batch.iter().map(|_| super::MESSAGES.count()).map(|()| true).collect() });
