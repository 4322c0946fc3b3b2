//! Sockets of consumers: they carry out what dispatch and the consumer's rules decide.

pub mod endpoint;
pub mod http;
pub mod websocket;
