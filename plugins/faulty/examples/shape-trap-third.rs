//! Passes every body on, but traps at each third message of the instance.

#[cfg(target_arch = "wasm32")]
static MESSAGES: faulty::TrapThird = faulty::TrapThird::new();

faulty::transform!(|body| {
    super::MESSAGES.count();
    body
});
