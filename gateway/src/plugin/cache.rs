//! Compiled code on disk, so that a start compiles nothing.
//!
//! Compiled code is machine code: whoever writes it owns the process. So the directory belongs to the gateway alone, a file
//! carries a digest of its name and content, and one that doesn't fit is compiled anew, never trusted.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::hash::{Hash, Hasher};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use aws_lc_rs::digest::{Context, SHA256, SHA256_OUTPUT_LEN};
use wasmtime::Engine;
use wasmtime::component::Component;

/// The newest files that are kept: old releases and replaced builds leave theirs behind.
const KEEP: usize = 32;

type Digest = [u8; SHA256_OUTPUT_LEN];

/// A directory of compiled components.
pub(super) struct Cache {
    dir: PathBuf,
    compiled: usize,
}

impl Cache {
    /// A directory that can't be made is no error: then every start compiles.
    pub(super) fn open(dir: &Path) -> Self {
        if let Err(error) = DirBuilder::new().recursive(true).mode(0o700).create(dir) {
            tracing::warn!(%error, "no directory for compiled plugins; they are compiled at every start");
        }
        Self { dir: dir.to_owned(), compiled: 0 }
    }

    /// The component of these wasm bytes, from the cache or from `compile`; the error says what is wrong with the bytes.
    pub(super) fn load(
        &mut self,
        engine: &Engine,
        plugin: &str,
        wasm: &[u8],
        compile: impl FnOnce() -> Result<Vec<u8>, String>,
    ) -> Result<Component, String> {
        let name = name(engine, wasm);
        let path = self.dir.join(&name);
        if let Some(component) = read(engine, &name, &path) {
            tracing::debug!(plugin, "compiled code taken from the cache");
            return Ok(component);
        }
        let code = compile()?;
        self.compiled += 1;
        if let Err(error) = self.write(&name, &path, &code) {
            tracing::warn!(plugin, %error, "the compiled plugin could not be kept for the next start");
        }
        deserialize(engine, &code).map_err(|error| format!("{error:#}"))
    }

    /// How many components had to be compiled.
    pub(super) fn compiled(&self) -> usize {
        self.compiled
    }

    fn write(&self, name: &str, path: &Path, code: &[u8]) -> io::Result<()> {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let unfinished = self.dir.join(format!("{name}.{}-{serial}.tmp", process::id()));
        let written = create_private(&unfinished)
            .and_then(|mut file| {
                file.write_all(&digest(name, code))?;
                file.write_all(code)?;
                file.sync_all()
            })
            .and_then(|()| fs::rename(&unfinished, path));
        if written.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        self.prune()?;
        written
    }

    fn prune(&self) -> io::Result<()> {
        let mut files: Vec<(SystemTime, PathBuf)> = fs::read_dir(&self.dir)?
            .filter_map(|entry| {
                let entry = entry.ok()?;
                Some((entry.metadata().ok()?.modified().ok()?, entry.path()))
            })
            .collect();
        files.sort_unstable_by(|a, b| b.cmp(a));
        for (_, old) in files.into_iter().skip(KEEP) {
            let _ = fs::remove_file(old);
        }
        Ok(())
    }
}

/// What decides over the compiled code: the wasm, the compiler and its settings.
fn name(engine: &Engine, wasm: &[u8]) -> String {
    let mut settings = Sha256(Context::new(&SHA256));
    engine.precompile_compatibility_hash().hash(&mut settings);
    let settings = settings.0.finish();
    let wasm = aws_lc_rs::digest::digest(&SHA256, wasm);
    format!("{}-{}.cwasm", hex(wasm.as_ref()), hex(&settings.as_ref()[..8]))
}

/// The name is part of it, so that no file passes for another.
fn digest(name: &str, code: &[u8]) -> Digest {
    let mut context = Context::new(&SHA256);
    context.update(name.as_bytes());
    context.update(code);
    let mut digest = [0; SHA256_OUTPUT_LEN];
    digest.copy_from_slice(context.finish().as_ref());
    digest
}

fn read(engine: &Engine, name: &str, path: &Path) -> Option<Component> {
    let writable_by_others = fs::symlink_metadata(path).ok()?.permissions().mode() & 0o022 != 0;
    let content = fs::read(path).ok()?;
    let (stored, code) = content.split_first_chunk::<SHA256_OUTPUT_LEN>()?;
    if writable_by_others || *stored != digest(name, code) {
        tracing::warn!("a file of compiled plugin code is damaged or foreign; compiling again");
        return None;
    }
    deserialize(engine, code)
        .inspect_err(|error| tracing::warn!(%error, "compiled plugin code does not fit; compiling again"))
        .ok()
}

/// `code` must come from this gateway's compiler.
fn deserialize(engine: &Engine, code: &[u8]) -> wasmtime::Result<Component> {
    #[allow(unsafe_code, reason = "wasmtime's only way to load compiled code")]
    // SAFETY: the bytes come from wasmtime's own compiler: either straight from a child process of this program, or through
    // the private directory, which nobody else may write, with a digest that binds them to this wasm, this compiler and
    // these settings.
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

/// Digests what a type hashes, the same in every process.
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
