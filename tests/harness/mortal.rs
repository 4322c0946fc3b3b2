//! A consumer on a machine that may lose its power.

use socket2::{SockFilter, SockRef};
use tokio::net::TcpStream;

use super::{Consumer, Gateway};

/// A consumer whose client's kernel answers nothing any more once it is told to.
pub(crate) struct Mortal {
    pub(crate) consumer: Consumer,
    socket: std::net::TcpStream,
}

impl Mortal {
    /// Connects with this token, and what else is in the query after it.
    pub(crate) async fn connect(gateway: &Gateway, token: &str) -> Self {
        let socket = TcpStream::connect(gateway.addr).await.unwrap().into_std().unwrap();
        let stream = TcpStream::from_std(socket.try_clone().unwrap()).unwrap();
        let url = format!("ws://{}/notification2/consumer/?token={token}", gateway.addr);
        Self { consumer: Consumer::over(Box::new(stream), &url).await.unwrap(), socket }
    }

    /// A filter that takes nothing: to the gateway, the machine is gone.
    pub(crate) fn vanish(&self) {
        const RETURN: u16 = 6;
        SockRef::from(&self.socket).attach_filter(&[SockFilter::new(RETURN, 0, 0, 0)]).unwrap();
    }
}
