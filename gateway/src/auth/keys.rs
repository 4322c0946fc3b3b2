//! The keys that sign tokens, one per kind, each in a file of its own.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use super::random;

/// Length of a key: that of the hash of HS256 (RFC 7518, section 3.2).
const KEY_BYTES: usize = 32;

/// What a key signs. A token is verified with the key of its kind, so that no kind passes for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyKind {
    /// Tokens of notification consumers.
    Consumer,
}

impl KeyKind {
    /// The name of the key's file without `.key`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Consumer => "consumer",
        }
    }
}

/// Why a key cannot be used. The text is for the operator and names the file.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The file system refused.
    #[error("the key file {} cannot be read or created: {source}", path.display())]
    Io {
        /// The key's file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file does not hold a key.
    #[error(
        "the key file {} is damaged: it does not hold exactly {KEY_BYTES} bytes; restore it, or delete it, which voids \
         every token that it signed",
        path.display()
    )]
    Damaged {
        /// The key's file.
        path: PathBuf,
    },
    /// Others than the owner may read or write the file.
    #[error("the key file {} is open to other users (mode {mode:03o}); run: chmod 600 {}", path.display(), path.display())]
    Open {
        /// The key's file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
}

/// A secret of 32 bytes for HS256.
pub struct SigningKey([u8; KEY_BYTES]);

/// Where the keys lie in the data directory.
pub const KEYS: &str = "keys";

impl SigningKey {
    /// Reads `<data>/keys/<kind>.key`, and creates it with mode 0600 if it is absent. The caller holds the lock of the data
    /// directory. A crash leaves either no key or a whole one.
    ///
    /// # Errors
    /// [`KeyError`].
    pub fn open(data: &Path, kind: KeyKind) -> Result<Self, KeyError> {
        let path = data.join(KEYS).join(kind.as_str()).with_extension("key");
        match read(&path) {
            Err(KeyError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                create(&path).map_err(|source| KeyError::Io { path: path.clone(), source })?;
                read(&path)
            }
            result => result,
        }
    }

    /// A key that lives as long as the process; for tests and for tools without a data directory.
    #[must_use]
    pub fn ephemeral() -> Self {
        Self(random())
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

fn read(path: &Path) -> Result<SigningKey, KeyError> {
    let io = |source| KeyError::Io { path: path.to_owned(), source };
    let file = File::open(path).map_err(io)?;
    let mode = file.metadata().map_err(io)?.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(KeyError::Open { path: path.to_owned(), mode });
    }
    let mut bytes = Vec::with_capacity(KEY_BYTES + 1);
    file.take(KEY_BYTES as u64 + 1).read_to_end(&mut bytes).map_err(io)?;
    let bytes = bytes.try_into().map_err(|_| KeyError::Damaged { path: path.to_owned() })?;
    Ok(SigningKey(bytes))
}

fn create(path: &Path) -> io::Result<()> {
    let directory = path.parent().expect("invariant: a key lies in its directory");
    DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    let unfinished = path.with_extension("key.new");
    // One that a crash left behind may have any mode.
    match fs::remove_file(&unfinished) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished)?;
    file.write_all(&random::<KEY_BYTES>())?;
    file.sync_all()?;
    fs::rename(&unfinished, path)?;
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    fn open(data: &Path) -> Result<SigningKey, KeyError> {
        SigningKey::open(data, KeyKind::Consumer)
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_key_is_created_once_and_only_for_its_owner() {
        let data = tempfile::tempdir().unwrap();
        let key = open(data.path()).unwrap();
        let path = data.path().join("keys/consumer.key");
        assert_eq!(mode(&path), 0o600);
        assert_eq!(mode(&data.path().join("keys")), 0o700);
        assert_eq!(fs::read(&path).unwrap(), key.as_bytes());
        assert_eq!(open(data.path()).unwrap().as_bytes(), key.as_bytes());
        assert_eq!(fs::read_dir(data.path().join("keys")).unwrap().count(), 1, "nothing unfinished stays");
    }

    #[test]
    fn two_data_directories_have_two_keys() {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        assert_ne!(open(one.path()).unwrap().as_bytes(), open(two.path()).unwrap().as_bytes());
    }

    #[test]
    fn a_key_of_another_length_is_damaged() {
        for length in [0, 31, 33, 4_096] {
            let data = tempfile::tempdir().unwrap();
            open(data.path()).unwrap();
            let path = data.path().join("keys/consumer.key");
            fs::write(&path, vec![7; length]).unwrap();
            let error = open(data.path()).err().unwrap();
            assert!(matches!(error, KeyError::Damaged { .. }), "{length}");
            assert!(error.to_string().contains("exactly 32 bytes"), "{error}");
            assert_eq!(fs::read(&path).unwrap().len(), length, "it is left as it is");
        }
    }

    #[test]
    fn a_key_that_others_may_read_is_refused() {
        let data = tempfile::tempdir().unwrap();
        open(data.path()).unwrap();
        let path = data.path().join("keys/consumer.key");
        for mode in [0o640, 0o604, 0o620, 0o644] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let error = open(data.path()).err().unwrap();
            assert!(error.to_string().contains(&format!("mode {mode:03o}")), "{error}");
            assert!(error.to_string().contains("chmod 600"), "{error}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).unwrap();
        assert!(open(data.path()).is_ok());
    }

    #[test]
    fn what_a_crash_left_unfinished_does_not_matter() {
        let data = tempfile::tempdir().unwrap();
        fs::create_dir(data.path().join("keys")).unwrap();
        fs::write(data.path().join("keys/consumer.key.new"), b"half").unwrap();
        assert!(open(data.path()).is_ok());
        assert!(!data.path().join("keys/consumer.key.new").exists());
    }

    #[test]
    fn a_place_that_cannot_be_written_is_named() {
        let data = tempfile::tempdir().unwrap();
        fs::write(data.path().join("keys"), b"a file").unwrap();
        let error = open(data.path()).err().unwrap();
        assert!(error.to_string().contains("consumer.key cannot be read or created"), "{error}");
    }
}
