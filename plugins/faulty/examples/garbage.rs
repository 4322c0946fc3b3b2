//! Answers with bytes that are neither UTF-8 nor JSON, newlines among them.

faulty::transform!(|_body| b"\xff\xfe\n\n{\"not\": JSON\r\n\0".to_vec());
