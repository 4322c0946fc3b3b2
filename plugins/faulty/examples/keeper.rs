//! Passes the first message of each source, and traps at each of the type `trap`. It never accepts the settings `"loop"` and `"deep"`.

#[cfg(target_arch = "wasm32")]
static SEEN: std::sync::Mutex<std::collections::BTreeSet<String>> =
    std::sync::Mutex::new(std::collections::BTreeSet::new());

#[cfg(target_arch = "wasm32")]
#[allow(unconditional_recursion, reason = "what it is for")]
fn deep(depth: u64) -> u64 {
    std::hint::black_box(deep(std::hint::black_box(depth + 1))) + depth
}

faulty::filter!(
    |settings: String| {
        match &*settings {
            r#""loop""# => loop {
                std::hint::black_box(());
            },
            r#""deep""# => assert_eq!(super::deep(0), 1),
            _ => {}
        }
        Interest {
            meta: MetaFields::SOURCE | MetaFields::TYPE,
            body: BodyForm::None,
            pointers: Vec::new(),
            state: State::PerSource,
        }
    },
    |batch: Vec<Message>| {
        let is_first = |message: Message| {
            assert_ne!(message.meta.type_.as_deref(), Some("trap"));
            super::SEEN.lock().unwrap().insert(message.meta.source.unwrap_or_default())
        };
        batch.into_iter().map(is_first).collect()
    }
);
