//! Connections that the gateway makes: a host, a port and who may be reached in, a stream in plain or over TLS out.
//!
//! Names are looked up anew for each connection, and what is judged is the address that is then connected to, so that a name
//! that points elsewhere a moment later is of no use.

use std::error::Error;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};

use hyper_util::client::legacy::connect::{Connected, Connection};
use ipnet::IpNet;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio_rustls::TlsConnector;

/// Names that are looked up at a time. Each lookup holds a thread, perhaps for long, and others need threads, too.
static LOOKUPS: Semaphore = Semaphore::const_new(64);

/// A connection.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

impl Connection for Box<dyn Stream> {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

/// Networks, as `push.allowed_networks` lists them.
#[derive(Clone, Debug, Default)]
pub struct Networks(Vec<IpNet>);

impl Networks {
    /// Reads networks (`10.0.0.0/8`) and addresses, separated by commas; `None` for anything else.
    #[must_use]
    pub fn parse(list: &str) -> Option<Self> {
        let network =
            |text: &str| text.parse().ok().or_else(|| text.parse().map(|address: IpAddr| address.into()).ok());
        list.split(',').map(|text| network(text.trim())).collect::<Option<_>>().map(Self)
    }

    fn holds(&self, address: IpAddr) -> bool {
        self.0.iter().any(|network| network.contains(&address))
    }
}

/// Which addresses may be connected to.
#[derive(Clone, Debug)]
pub enum Reach {
    /// All.
    Anywhere,
    /// Those of the public internet, and these networks.
    Public(Networks),
    /// These networks.
    Within(Networks),
}

/// An address that may not be connected to.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the address {0} may not be reached")]
pub struct Unreachable(pub IpAddr);

impl Reach {
    /// Whether `address` may be connected to.
    ///
    /// # Errors
    /// Names the address that may not.
    pub fn check(&self, address: IpAddr) -> Result<(), Unreachable> {
        // An IPv4 address in the dress of an IPv6 one is what it is.
        let address = address.to_canonical();
        let allowed = match self {
            Self::Anywhere => true,
            Self::Public(networks) => is_public(address) || networks.holds(address),
            Self::Within(networks) => networks.holds(address),
        };
        if allowed { Ok(()) } else { Err(Unreachable(address)) }
    }

    /// Whether nothing at all may be connected to.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        matches!(self, Self::Within(Networks(networks)) if networks.is_empty())
    }
}

/// Whether an address is one of the public internet: IPv4 but for what the IANA registry of special-purpose addresses
/// (RFC 6890) keeps from it, multicast and the reserved rest; of IPv6, global unicast without the parts that lead to IPv4
/// addresses or are for documentation.
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => {
            let [a, b, c, _] = address.octets();
            !matches!(
                (a, b, c),
                (0 | 10 | 127 | 224.., ..)
                    | (100, 64..=127, _)
                    | (169, 254, _)
                    | (172, 16..=31, _)
                    | (192, 0, 0 | 2)
                    | (192, 88, 99)
                    | (192, 168, _)
                    | (198, 18 | 19, _)
                    | (198, 51, 100)
                    | (203, 0, 113)
            )
        }
        IpAddr::V6(address) => {
            let [a, b, ..] = address.segments();
            let special = matches!((a, b), (0x2001, 0..=0x1ff | 0xdb8) | (0x2002, _) | (0x3fff, 0..=0xfff));
            a >> 13 == 1 && !special
        }
    }
}

/// Whom to connect to.
#[derive(Clone)]
pub struct Peer {
    /// A name or an address, without brackets.
    pub host: String,
    /// The port.
    pub port: u16,
    /// For TLS, and the name that the certificate has to have.
    pub tls: Option<(TlsConnector, ServerName<'static>)>,
}

impl Peer {
    /// Connects to the first of the peer's addresses within `reach` that answers.
    ///
    /// # Errors
    /// With [`Unreachable`] inside when there is none within reach, with [`rustls::Error`] when TLS fails.
    pub async fn connect(&self, reach: &Reach) -> io::Result<Box<dyn Stream>> {
        let mut addresses = lookup(&self.host, self.port).await?;
        let mut refused = None;
        addresses.retain(|address| reach.check(address.ip()).map_err(|error| refused = Some(error)).is_ok());
        if let (true, Some(refused)) = (addresses.is_empty(), refused) {
            return Err(io::Error::other(refused));
        }
        let stream = TcpStream::connect(&*addresses).await?;
        stream.set_nodelay(true)?;
        match &self.tls {
            None => Ok(Box::new(stream)),
            Some((connector, name)) => Ok(Box::new(connector.connect(name.clone(), stream).await?)),
        }
    }
}

async fn lookup(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = host.parse() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    // The thread keeps the place, even if nobody waits for it any more.
    let place = LOOKUPS.acquire().await.map_err(io::Error::other)?;
    let host = host.to_owned();
    tokio::task::spawn_blocking(move || {
        let _place = place;
        (host, port).to_socket_addrs().map(Iterator::collect)
    })
    .await?
}

/// Whether `error` is, or holds, an error of this type.
#[must_use]
pub fn is_caused_by<E: Error + 'static>(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        let inside = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        if error.is::<E>() || inside.is_some_and(<dyn Error + Send + Sync>::is::<E>) {
            return true;
        }
        next = error.source();
    }
    false
}

/// The innermost cause, since the outer ones of an HTTP client only say that something failed.
#[must_use]
pub fn root_cause(error: &(dyn Error + 'static)) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    fn reaches(reach: &Reach, address: &str) -> bool {
        reach.check(address.parse().unwrap()).is_ok()
    }

    #[test]
    fn only_public_addresses_are_public() {
        let public = Reach::Public(Networks::default());
        for address in
            ["1.1.1.1", "100.63.255.255", "100.128.0.1", "172.15.0.1", "172.32.0.1", "192.0.1.1", "198.20.0.1"]
        {
            assert!(reaches(&public, address), "{address}");
        }
        for address in ["2606:4700::1111", "2001:4860:4860::8888", "2001:200::1", "::ffff:1.1.1.1"] {
            assert!(reaches(&public, address), "{address}");
        }
        for address in [
            "0.0.0.0",
            "0.1.2.3",
            "10.1.2.3",
            "100.64.0.1",
            "127.0.0.1",
            "127.255.255.255",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.8",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.1.1",
            "198.18.0.1",
            "198.19.255.255",
            "198.51.100.1",
            "203.0.113.1",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::127.0.0.1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b:1::1",
            "100::1",
            "2001::1",
            "2001:db8::1",
            "2002:7f00:1::1",
            "3fff:fff::1",
            "5f00::1",
            "fc00::1",
            "fd12::1",
            "fe80::1",
            "fec0::1",
            "ff02::1",
        ] {
            assert!(!reaches(&public, address), "{address}");
        }
    }

    #[test]
    fn networks_can_be_added_to_what_may_be_reached() {
        let networks = Networks::parse("10.1.0.0/16, fd00::/8,127.0.0.1").unwrap();
        for (address, listed, public) in [
            ("10.1.2.3", true, false),
            ("::ffff:10.1.2.3", true, false),
            ("127.0.0.1", true, false),
            ("fd12::1", true, false),
            ("1.1.1.1", false, true),
            ("10.2.0.1", false, false),
            ("127.0.0.2", false, false),
            ("fc00::1", false, false),
        ] {
            assert_eq!(reaches(&Reach::Within(networks.clone()), address), listed, "{address}");
            assert_eq!(reaches(&Reach::Public(networks.clone()), address), listed || public, "{address}");
            assert!(reaches(&Reach::Anywhere, address));
        }
        for list in ["", "10.0.0.0/33", "localhost", "10.0.0.0/8,", "10.0.0.0/8 fd00::/8"] {
            assert!(Networks::parse(list).is_none(), "{list}");
        }
        assert!(Reach::Within(Networks::default()).is_empty());
        assert!(!Reach::Within(networks).is_empty() && !Reach::Public(Networks::default()).is_empty());
    }

    // What a name leads to counts, however it is written.
    #[tokio::test]
    async fn names_are_judged_by_the_addresses_that_they_lead_to() {
        for host in ["localhost", "127.0.0.1", "::1", "2130706433", "0x7f.1"] {
            let peer = Peer { host: host.to_owned(), port: 1, tls: None };
            let error = peer.connect(&Reach::Public(Networks::default())).await.err().unwrap();
            assert!(is_caused_by::<Unreachable>(&error), "{host}: {error}");
        }
    }
}
