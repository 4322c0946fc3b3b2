//! Answers each message with 64 MiB.

faulty::transform!(|_body| vec![b' '; 64 << 20]);
