//! Programs that use other people's clients, and tell what happens as JSON, one object a line.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::Value;

use crate::harness::{Authority, Gateway, PASSWORD, Program, eventually};

/// How clients find a gateway.
pub(crate) struct Site {
    url: String,
    ca: Option<PathBuf>,
    /// Where they may leave files.
    place: PathBuf,
}

impl Site {
    pub(crate) fn plain(gateway: &Gateway) -> Self {
        Self { url: format!("http://{}", gateway.addr), ca: None, place: gateway.path(".") }
    }

    pub(crate) fn secure(gateway: &Gateway, authority: &Authority) -> Self {
        let url = format!("https://{}", gateway.listener("https"));
        Self { url, ca: Some(authority.file("ca.pem")), place: gateway.path(".") }
    }

    /// By way of somebody in between.
    pub(crate) fn by_way_of(gateway: &Gateway, addr: std::net::SocketAddr) -> Self {
        Self { url: format!("http://{addr}"), ..Self::plain(gateway) }
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }
}

/// A script that runs.
pub(crate) struct Peer {
    program: Program,
    name: String,
}

impl Peer {
    /// Runs `script` with the site's URL, the administrator's password and more arguments; `before` come before them.
    pub(crate) fn run(site: &Site, script: &str, before: &[&str], more: &[&str]) -> Self {
        let variable = |name: &str| std::env::var_os(name).unwrap_or_else(|| panic!("{name} is not set"));
        let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/peers").canonicalize().unwrap();
        let mut command = if script.ends_with(".py") {
            Command::new(variable("TIDEGATE_PYTHON"))
        } else {
            let mut node = Command::new("node");
            node.env("NODE_PATH", variable("TIDEGATE_NODE_MODULES"));
            node
        };
        command.arg(scripts.join(script)).args(before).args([&*site.url, PASSWORD]).args(more);
        command.env("NO_PROXY", "*").env("PYTHONDONTWRITEBYTECODE", "1");
        if let Some(ca) = &site.ca {
            for name in ["REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS"] {
                command.env(name, ca);
            }
        }
        // A script may run several times.
        static RUNS: AtomicUsize = AtomicUsize::new(0);
        let name = format!("{}-{}", before.first().unwrap_or(&script), RUNS.fetch_add(1, Ordering::Relaxed));
        Self { program: Program::spawn_command(command, &[], &site.place, &name), name }
    }

    /// The listener of `client`, when it is connected.
    pub(crate) async fn listener(site: &Site, client: &str, topic: &str, subscriber: &str, kind: &str) -> Self {
        let mut listener = Self::run(site, "listen.py", &[client], &[topic, subscriber, kind]);
        listener.until("connected", 1).await;
        listener
    }

    /// What it has told under this name.
    pub(crate) fn events(&self, name: &str) -> Vec<Value> {
        let out = self.program.stdout();
        let complete = out.rfind('\n').map_or("", |end| &out[..end]);
        let all = complete.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        all.filter(|event| event["event"] == name).collect()
    }

    /// The events of this name, when there are so many.
    pub(crate) async fn until(&mut self, name: &str, count: usize) -> Vec<Value> {
        eventually(&format!("{count} events '{name}' of {}", self.name), async || {
            assert!(self.program.exited().is_none(), "{} ended:\n{}", self.name, self.program.stdout());
            let events = self.events(name);
            (events.len() >= count).then_some(events)
        })
        .await
    }

    pub(crate) fn signal(&self, signal: &str) {
        self.program.signal(signal);
    }

    /// Waits for the end, which has to be a success.
    pub(crate) async fn ended(&mut self) {
        let status = self.program.wait().await;
        assert!(status.success(), "{} ended with {status}", self.name);
    }

    /// Stops a listener, which has nothing to complain of.
    pub(crate) async fn stop(&mut self) {
        self.signal("TERM");
        self.ended().await;
        let complaints = self.program.stderr();
        assert!(!complaints.contains("could not be unsubscribed"), "{}: {complaints}", self.name);
    }

    /// Waits for the end, whatever it is.
    pub(crate) async fn gone(&mut self) {
        self.program.wait().await;
    }
}
