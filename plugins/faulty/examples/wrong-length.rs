//! Answers one verdict too few.

faulty::filter!(|batch: Vec<Message>| vec![true; batch.len().saturating_sub(1)]);
