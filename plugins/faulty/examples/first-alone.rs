//! Passes the first message of a batch alone, and of one that begins with the type `short` answers no other.

faulty::filter!(|batch: Vec<Message>| {
    let is_short = batch.first().is_some_and(|message| message.meta.type_.as_deref() == Some("short"));
    let answered = if is_short { 1 } else { batch.len() };
    (0..answered).map(|at| at == 0).collect()
});
