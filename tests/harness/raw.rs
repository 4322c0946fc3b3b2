//! Bytes on a socket, for what HTTP clients do not let through.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{Stream, in_time};

/// Credentials of the administrator, as a header line.
pub(crate) const BASIC: &str = "Authorization: Basic ZWRnZS9hZG1pbjpjb3JyZWN0IGhvcnNlIGJhdHRlcnkgc3RhcGxl\r\n";

/// Sends `request` and returns all that comes back until the gateway closes.
pub(crate) async fn raw(addr: SocketAddr, request: &[u8]) -> String {
    let socket = in_time("connecting to the gateway", TcpStream::connect(addr)).await.unwrap();
    exchange(socket, request).await
}

/// [`raw`] over a connection that is there.
pub(crate) async fn exchange(mut socket: impl Stream, request: &[u8]) -> String {
    in_time("a raw request", async {
        // A gateway that refuses early may stop reading.
        let _ = socket.write_all(request).await;
        let mut answer = Vec::new();
        let _ = socket.read_to_end(&mut answer).await;
        String::from_utf8_lossy(&answer).into_owned()
    })
    .await
}

/// The first line of the answer to a WebSocket handshake on `path`.
pub(crate) async fn upgrade(addr: SocketAddr, path: &str) -> String {
    upgraded(addr, path).await.0
}

/// [`upgrade`], and the connection, of which that line was read.
pub(crate) async fn upgraded(addr: SocketAddr, path: &str) -> (String, TcpStream) {
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {addr}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    );
    in_time("a handshake", async {
        let mut socket = TcpStream::connect(addr).await.unwrap();
        socket.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        while !answer.windows(2).any(|end| end == b"\r\n") {
            let mut byte = [0];
            assert_eq!(socket.read(&mut byte).await.unwrap(), 1, "no status line in {answer:?}");
            answer.push(byte[0]);
        }
        (String::from_utf8(answer).unwrap().trim_end().to_owned(), socket)
    })
    .await
}
