//! The projects that `tidegate plugin new` writes, built by the commands in their READMEs, uploaded and used.

use std::env;
use std::fs;
use std::iter;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;
use tempfile::TempDir;

use crate::harness::{Gateway, Program, TIME, forwarded};

const WASM: &str = "application/wasm";

/// Debian's compiler, where it is the one that knows the target: std has to be built with it, and it brings no linker.
const DEBIAN: [(&str, &str); 4] = [
    ("RUSTC", "/usr/bin/rustc"),
    ("RUSTC_BOOTSTRAP", "1"),
    ("CARGO_UNSTABLE_BUILD_STD", "std,panic_abort"),
    ("CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_RUSTFLAGS", "-Clink-arg=--wasm-ld-path=/usr/bin/wasm-ld-22"),
];
const DEBIANS_STD: &str = "/usr/lib/rustlib/src/rust";

/// A project in a directory of its own.
struct Project {
    name: String,
    directory: TempDir,
}

impl Project {
    async fn new(language: &str, world: &str) -> Self {
        let (directory, name) = (tempfile::tempdir().unwrap(), format!("my-{world}"));
        let arguments = ["plugin", "new", "--lang", language, "--world", world, &name];
        let mut program = Program::spawn(&arguments, &[], directory.path(), "new");
        assert!(program.wait().await.success(), "{}", program.stderr());
        Self { name, directory }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join(&self.name)
    }

    /// Runs what stands indented below a line of its README.
    fn run(&self, heading: &str, env: &[(&str, &str)]) {
        let readme = fs::read_to_string(self.path().join("README.md")).unwrap();
        let below = readme.lines().skip_while(|line| !line.starts_with(heading)).skip(2);
        let commands: Vec<_> = below.map_while(|line| line.strip_prefix("    ")).collect();
        assert!(!commands.is_empty(), "{readme}");
        let python = PathBuf::from(env::var_os("TIDEGATE_PYTHON").expect("TIDEGATE_PYTHON names a Python"));
        let path = env::var_os("PATH").unwrap();
        let tools = iter::once(python.parent().unwrap().to_owned());
        let path = env::join_paths(tools.chain(env::split_paths(&path))).unwrap();
        let mut command = Command::new("sh");
        command.args(["-ec", &commands.join("\n")]).current_dir(self.path());
        command.env("PATH", path).envs(env.iter().copied());
        let ended = command.output().unwrap();
        let printed = [ended.stdout, ended.stderr].concat();
        assert!(ended.status.success(), "{commands:?}: {}", String::from_utf8_lossy(&printed));
    }

    /// The component at a path in the project.
    fn component(&self, path: &str) -> Vec<u8> {
        let component = fs::read(self.path().join(path)).unwrap();
        // A component says so in the version of its format, where a core module has 1.
        assert_eq!(component[..8], *b"\0asm\x0d\0\x01\0", "{path} is no component");
        component
    }
}

/// Uploads a filter and a transform, has a subscription use both, and sees what comes through them.
async fn work(media_type: &str, filter: Vec<u8>, transform: Vec<u8>) {
    // As the README for Python says, and time for a compiler that is not optimised.
    let limits = "[plugins]\nmax_bytes = 33554432\nmax_instances = 100\ncompile_seconds = 600\n";
    let gateway = Gateway::with(limits).await;
    let device = gateway.device("boiler").await;
    for (world, body) in [("filter", filter), ("transform", transform)] {
        let world = if media_type == WASM { format!("my-{world}") } else { format!("my-{world}&world={world}") };
        let upload = gateway.call("POST", &format!("/tidegate/v1/plugins?name={world}")).body(media_type, body);
        // Not awaited with the patience of other requests: to compile an interpreter takes longer.
        upload.send().await.unwrap().expect(201);
    }
    let mut subscription = forwarded("Templates", &device);
    subscription["tidegate"] = json!({
        "filters": [{"plugin": "my-filter", "settings": {"limit": 20}}],
        "transforms": [{"plugin": "my-transform", "settings": {"site": "Lyon"}}],
    });
    gateway.subscribe(&subscription).await;
    let mut consumer = gateway.consumer("Templates", "me").await;
    for degrees in [20.5, 19.5, 21.0] {
        let series = json!({"T": {"value": degrees, "unit": "C"}});
        let measurement = json!({"source": {"id": device}, "type": "t", "time": TIME, "c8y_Temperature": series});
        gateway.post_measurement(&measurement).await.expect(201);
    }
    for degrees in [20.5, 21.0] {
        let body = consumer.receive().await.json();
        // JavaScript writes 21.0 as 21.
        assert_eq!(body["c8y_Temperature"]["T"]["value"].as_f64(), Some(degrees));
        assert_eq!(body["site"], "Lyon");
    }
}

#[tokio::test]
async fn a_project_in_rust_works() {
    // Of both projects, so that the compiler's std is built once.
    let target = concat!(env!("CARGO_TARGET_TMPDIR"), "/rust-template");
    let mut env = vec![("CARGO_TARGET_DIR", target)];
    if Path::new(DEBIANS_STD).exists() {
        env.extend(DEBIAN);
    }
    let build = async |world| {
        let project = Project::new("rust", world).await;
        project.run("Build:", &env);
        project.component(&format!("{target}/wasm32-unknown-unknown/release/plugin.wasm"))
    };
    work(WASM, build("filter").await, build("transform").await).await;
}

#[tokio::test]
async fn a_project_in_c_works() {
    work(WASM, built("c", "filter").await, built("c", "transform").await).await;
}

#[tokio::test]
async fn a_project_in_python_works() {
    work(WASM, built("python", "filter").await, built("python", "transform").await).await;
}

#[tokio::test]
async fn a_project_in_javascript_works() {
    let text = async |world| {
        let project = Project::new("js", world).await;
        fs::read(project.path().join(format!("{}.js", project.name))).unwrap()
    };
    work("text/javascript", text("filter").await, text("transform").await).await;
}

/// The component of a project whose README puts it into the project.
async fn built(language: &str, world: &str) -> Vec<u8> {
    let project = Project::new(language, world).await;
    project.run("Build:", &[]);
    project.component(&format!("{}.wasm", project.name))
}
