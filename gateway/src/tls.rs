//! TLS: the certificate that the gateway shows, and the certificates that it and its client commands trust.
//!
//! aws-lc-rs is the one crypto provider of the process; it is named here, so that nothing has to be installed for all.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use anyhow::{Context as _, bail};
use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// The largest PEM file that is read, in bytes.
const PEM_BYTES: u64 = 1024 * 1024;

/// The gateway's certificate and its key, which can be replaced while it serves.
#[derive(Debug)]
pub struct Certificate {
    cert: PathBuf,
    key: PathBuf,
    current: RwLock<Arc<CertifiedKey>>,
}

impl Certificate {
    /// Reads `http.tls_cert` and `http.tls_key`.
    ///
    /// # Errors
    /// For the operator: says which file is absent or wrong, or that they do not belong together.
    pub fn load(cert: &Path, key: &Path) -> anyhow::Result<Self> {
        let current = RwLock::new(Arc::new(certified_key(cert, key)?));
        Ok(Self { cert: cert.to_owned(), key: key.to_owned(), current })
    }

    /// Reads both files again; new connections get what they hold now.
    ///
    /// # Errors
    /// Those of [`Certificate::load`]; the present certificate stays then.
    pub fn reload(&self) -> anyhow::Result<()> {
        let new = Arc::new(certified_key(&self.cert, &self.key)?);
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(())
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current.read().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

/// Takes TLS connections (1.2 and 1.3) that speak HTTP/1.1.
#[must_use]
pub fn acceptor(certificate: Arc<Certificate>) -> TlsAcceptor {
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .expect("invariant: the provider knows the default versions")
        .with_no_client_auth()
        .with_cert_resolver(certificate);
    config.alpn_protocols = alpn();
    TlsAcceptor::from(Arc::new(config))
}

/// Makes TLS connections to peers whose certificate leads to one of those in `ca`, a PEM file; without it, to one that the
/// system trusts (`SSL_CERT_FILE` and `SSL_CERT_DIR` are honoured). `option`: how the file is named by whoever configures it.
///
/// # Errors
/// When no certificate could be read.
pub fn connector(option: &str, ca: Option<&Path>) -> anyhow::Result<TlsConnector> {
    let mut roots = RootCertStore::empty();
    match ca {
        Some(file) => {
            let failed = || format!("{option} {}", file.display());
            for certificate in certificates(file).with_context(failed)? {
                roots.add(certificate).with_context(failed)?;
            }
        }
        None => {
            let (read, _) = roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            if read == 0 {
                bail!("this system has no list of trusted certificates; use {option} or set SSL_CERT_FILE");
            }
        }
    }
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .expect("invariant: the provider knows the default versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = alpn();
    Ok(TlsConnector::from(Arc::new(config)))
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(default_provider())
}

fn alpn() -> Vec<Vec<u8>> {
    vec![b"http/1.1".to_vec()]
}

fn certified_key(cert: &Path, key: &Path) -> anyhow::Result<CertifiedKey> {
    let chain = certificates(cert).with_context(|| format!("http.tls_cert {}", cert.display()))?;
    let private = private_key(key).with_context(|| format!("http.tls_key {}", key.display()))?;
    match CertifiedKey::from_der(chain, private, &default_provider()) {
        Ok(certified) => Ok(certified),
        Err(rustls::Error::InconsistentKeys(_)) => {
            bail!(
                "http.tls_key {} is not the key of the certificate in http.tls_cert {}",
                key.display(),
                cert.display()
            )
        }
        Err(error) => Err(error).with_context(|| {
            format!("http.tls_cert {} and http.tls_key {} cannot be used", cert.display(), key.display())
        }),
    }
}

fn certificates(file: &Path) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(&read(file)?).collect::<Result<_, _>>()?;
    if certificates.is_empty() {
        bail!("the file holds no certificate in PEM form");
    }
    Ok(certificates)
}

fn private_key(file: &Path) -> anyhow::Result<PrivateKeyDer<'static>> {
    match PrivateKeyDer::from_pem_slice(&read(file)?) {
        Err(pem::Error::NoItemsFound) => bail!("the file holds no private key in PEM form"),
        key => Ok(key?),
    }
}

fn read(file: &Path) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(file)?.take(PEM_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > PEM_BYTES {
        bail!("the file is longer than 1 MiB");
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use std::fs;

    use rcgen::{CertifiedKey as Generated, generate_simple_self_signed};

    use super::*;

    /// A directory with `cert.pem` and `key.pem`.
    fn pair() -> tempfile::TempDir {
        let place = tempfile::tempdir().unwrap();
        let Generated { cert, signing_key } = generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        fs::write(place.path().join("cert.pem"), cert.pem()).unwrap();
        fs::write(place.path().join("key.pem"), signing_key.serialize_pem()).unwrap();
        place
    }

    fn load(place: &Path) -> anyhow::Result<Certificate> {
        Certificate::load(&place.join("cert.pem"), &place.join("key.pem"))
    }

    fn refusal(place: &Path) -> String {
        format!("{:#}", load(place).unwrap_err())
    }

    #[test]
    fn a_wrong_file_is_named_with_what_is_wrong() {
        let (one, other) = (pair(), pair());
        assert!(load(one.path()).is_ok());
        fs::copy(other.path().join("key.pem"), one.path().join("key.pem")).unwrap();
        let said = refusal(one.path());
        assert!(said.starts_with("http.tls_key ") && said.contains("is not the key of the certificate"), "{said}");

        fs::copy(other.path().join("cert.pem"), one.path().join("key.pem")).unwrap();
        assert!(refusal(one.path()).ends_with("key.pem: the file holds no private key in PEM form"));
        fs::write(one.path().join("key.pem"), vec![b'x'; 1024 * 1024 + 1]).unwrap();
        assert!(refusal(one.path()).ends_with("key.pem: the file is longer than 1 MiB"));
        fs::write(one.path().join("cert.pem"), "hello").unwrap();
        assert!(refusal(one.path()).ends_with("cert.pem: the file holds no certificate in PEM form"));
        fs::write(one.path().join("cert.pem"), "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n").unwrap();
        assert!(refusal(one.path()).starts_with("http.tls_cert "));
        fs::remove_file(one.path().join("cert.pem")).unwrap();
        let said = refusal(one.path());
        assert!(said.starts_with("http.tls_cert ") && said.contains("No such file"), "{said}");
    }

    #[test]
    fn a_reload_takes_new_files_and_keeps_the_old_ones_when_they_are_wrong() {
        let (place, other) = (pair(), pair());
        let certificate = load(place.path()).unwrap();
        let shown = || certificate.current.read().unwrap().cert[0].clone();
        let first = shown();
        fs::copy(other.path().join("cert.pem"), place.path().join("cert.pem")).unwrap();
        assert!(certificate.reload().is_err());
        assert_eq!(shown(), first);
        fs::copy(other.path().join("key.pem"), place.path().join("key.pem")).unwrap();
        certificate.reload().unwrap();
        assert_ne!(shown(), first);
    }

    #[test]
    fn the_private_ca_must_be_one() {
        let place = pair();
        assert!(connector("--ca", Some(&place.path().join("cert.pem"))).is_ok());
        let error = format!("{:#}", connector("--ca", Some(&place.path().join("key.pem"))).err().unwrap());
        assert!(error.starts_with("--ca ") && error.ends_with("the file holds no certificate in PEM form"), "{error}");
    }
}
