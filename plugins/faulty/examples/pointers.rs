//! Asks for the value at the JSON pointer that its settings are.

faulty::filter!(
    |settings: String| Interest {
        meta: MetaFields::empty(),
        body: BodyForm::None,
        pointers: vec![settings.trim_matches('"').to_owned()],
        state: State::None,
    },
    |batch: Vec<Message>| vec![true; batch.len()]
);
