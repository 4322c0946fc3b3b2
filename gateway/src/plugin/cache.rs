//! Compiled code on disk, so that a start compiles nothing, and mapped from there, so that many plugins take little memory.
//!
//! Compiled code is machine code: whoever writes it owns the process. So the directory belongs to the gateway alone, a file
//! ends with a digest of its name and content, and one that doesn't fit is compiled anew, never trusted.

use std::collections::HashSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::hash::{Hash, Hasher};
use std::io::{self, Read as _, Write};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use aws_lc_rs::digest::{Context, SHA256, SHA256_OUTPUT_LEN};
use wasmtime::Engine;
use wasmtime::component::Component;

type Digest = [u8; SHA256_OUTPUT_LEN];

/// A directory of compiled components.
pub(super) struct Cache {
    dir: PathBuf,
}

impl Cache {
    /// A directory that can't be made is no error: then every start compiles.
    pub(super) fn open(dir: &Path) -> Self {
        if let Err(error) = DirBuilder::new().recursive(true).mode(0o700).create(dir) {
            tracing::warn!(%error, "no directory for compiled plugins; they are compiled at every start");
        }
        Self { dir: dir.to_owned() }
    }

    /// The component of these wasm bytes, if it is here.
    pub(super) fn find(&self, engine: &Engine, wasm: &[u8]) -> Option<Component> {
        let name = name(engine, wasm);
        let path = self.dir.join(&name);
        let metadata = fs::symlink_metadata(&path).ok()?;
        let writable_by_others = metadata.permissions().mode() & 0o022 != 0;
        if writable_by_others || !is_whole(&name, &path, metadata.len()).unwrap_or(false) {
            tracing::warn!("a file of compiled plugin code is damaged or foreign; compiling again");
            return None;
        }
        map(engine, &path)
            .inspect_err(|error| tracing::warn!(%error, "compiled plugin code does not fit; compiling again"))
            .ok()
    }

    /// Keeps what the compiler has made of these wasm bytes. If it can't be kept, it is still loaded.
    pub(super) fn keep(&self, engine: &Engine, wasm: &[u8], code: &[u8]) -> wasmtime::Result<Component> {
        let name = name(engine, wasm);
        let path = self.dir.join(&name);
        match self.write(&name, &path, code) {
            // Somebody else may have deleted it meanwhile.
            Ok(()) => map(engine, &path).or_else(|_| deserialize(engine, code)),
            Err(error) => {
                tracing::warn!(%error, "a compiled plugin could not be kept for the next start");
                deserialize(engine, code)
            }
        }
    }

    /// Deletes the code of the component with this digest. Whoever has it loaded keeps it.
    pub(super) fn forget(&self, component: &str) {
        self.delete(|digest| digest == component);
    }

    /// Deletes all but the code of the components with these digests: old releases and replaced builds leave theirs behind.
    pub(super) fn tidy(&self, components: &HashSet<String>) {
        self.delete(|digest| !components.contains(digest));
    }

    fn delete(&self, unwanted: impl Fn(&str) -> bool) {
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let digest = name.to_str().and_then(|name| name.split('-').next());
            if digest.is_none_or(&unwanted) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    fn write(&self, name: &str, path: &Path, code: &[u8]) -> io::Result<()> {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let unfinished = self.dir.join(format!("{name}.{}-{serial}.tmp", process::id()));
        let written = create_private(&unfinished)
            .and_then(|mut file| {
                file.write_all(code)?;
                file.write_all(&seal(name, code)?)?;
                file.sync_all()
            })
            .and_then(|()| fs::rename(&unfinished, path));
        if written.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        written
    }
}

/// The lower-case hexadecimal SHA-256 of a component: its name here.
#[must_use]
pub fn digest(component: &[u8]) -> String {
    hex(aws_lc_rs::digest::digest(&SHA256, component).as_ref())
}

/// What decides over the compiled code: the wasm, the compiler and its settings.
fn name(engine: &Engine, wasm: &[u8]) -> String {
    let mut settings = Sha256(Context::new(&SHA256));
    engine.precompile_compatibility_hash().hash(&mut settings);
    let settings = settings.0.finish();
    format!("{}-{}.cwasm", digest(wasm), hex(&settings.as_ref()[..8]))
}

/// The name is part of it, so that no file passes for another.
fn seal(name: &str, code: impl io::Read) -> io::Result<Digest> {
    let mut context = Sha256(Context::new(&SHA256));
    context.0.update(name.as_bytes());
    io::copy(&mut { code }, &mut context)?;
    let mut digest = [0; SHA256_OUTPUT_LEN];
    digest.copy_from_slice(context.0.finish().as_ref());
    Ok(digest)
}

fn is_whole(name: &str, path: &Path, length: u64) -> io::Result<bool> {
    let mut file = File::open(path)?;
    let expected = seal(name, (&mut file).take(length.saturating_sub(SHA256_OUTPUT_LEN as u64)))?;
    let mut stored = Digest::default();
    file.read_exact(&mut stored)?;
    Ok(stored == expected)
}

/// The file must have been found whole, or be just written.
fn map(engine: &Engine, path: &Path) -> wasmtime::Result<Component> {
    #[allow(unsafe_code, reason = "wasmtime's only way to map compiled code")]
    // SAFETY: the bytes come from wasmtime's own compiler through the private directory, which nobody else may write, with a
    // digest that binds them to this wasm, this compiler and these settings. The gateway never writes into a file that has its
    // name, and a deleted one stays mapped.
    unsafe {
        Component::deserialize_file(engine, path)
    }
}

/// `code` must come from this gateway's compiler.
fn deserialize(engine: &Engine, code: &[u8]) -> wasmtime::Result<Component> {
    #[allow(unsafe_code, reason = "wasmtime's only way to load compiled code")]
    // SAFETY: the bytes come from wasmtime's own compiler, straight from a child process of this program.
    unsafe {
        Component::deserialize(engine, code)
    }
}

fn create_private(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Digests what a type hashes, the same in every process, or what is written to it.
struct Sha256(Context);

impl Hasher for Sha256 {
    fn write(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    fn finish(&self) -> u64 {
        let digest = self.0.clone().finish();
        let first = digest.as_ref().first_chunk().expect("invariant: a digest is longer than 8 bytes");
        u64::from_be_bytes(*first)
    }
}

impl Write for Sha256 {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
