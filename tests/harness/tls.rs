//! A private certificate authority, and connections that trust nobody else.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::in_time;

/// The authority, with the files of a gateway on 127.0.0.1.
pub(crate) struct Authority {
    place: TempDir,
    issuer: Issuer<'static, KeyPair>,
    roots: Arc<RootCertStore>,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // OpenSSL takes a certificate for self-signed whose subject is that of its issuer, and rcgen calls all by one name.
        params.distinguished_name.push(DnType::CommonName, "A private authority");
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(certificate.der().clone()).unwrap();
        let authority =
            Self { place: tempfile::tempdir().unwrap(), issuer: Issuer::new(params, key), roots: Arc::new(roots) };
        fs::write(authority.file("ca.pem"), certificate.pem()).unwrap();
        authority.issue();
        authority
    }

    /// Writes a new certificate and its key into the gateway's files.
    pub(crate) fn issue(&self) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(["127.0.0.1".to_owned()]).unwrap();
        // Python from 3.13 on demands it.
        params.use_authority_key_identifier_extension = true;
        fs::write(self.file("cert.pem"), params.signed_by(&key, &self.issuer).unwrap().pem()).unwrap();
        fs::write(self.file("key.pem"), key.serialize_pem()).unwrap();
    }

    /// `ca.pem`, `cert.pem` or `key.pem`.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    /// The part `http` of a configuration that serves HTTPS with the files.
    pub(crate) fn config(&self) -> String {
        format!(
            "[http]\nhttps_addr = '127.0.0.1:0'\ntls_cert = '{}'\ntls_key = '{}'\n",
            self.file("cert.pem").display(),
            self.file("key.pem").display()
        )
    }

    /// What an endpoint of its own shows the certificate with.
    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        let chain = vec![CertificateDer::from_pem_file(self.file("cert.pem")).unwrap()];
        let key = PrivateKeyDer::from_pem_file(self.file("key.pem")).unwrap();
        let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .unwrap();
        TlsAcceptor::from(Arc::new(config))
    }

    /// A TLS connection to the gateway that offers `protocols`, or why there is none.
    pub(crate) async fn connect(&self, addr: SocketAddr, protocols: &[&[u8]]) -> std::io::Result<TlsStream<TcpStream>> {
        let mut config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(self.roots.clone())
            .with_no_client_auth();
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        let name = ServerName::try_from("127.0.0.1").unwrap();
        in_time("a TLS handshake", async {
            let socket = TcpStream::connect(addr).await?;
            TlsConnector::from(Arc::new(config)).connect(name, socket).await
        })
        .await
    }
}
