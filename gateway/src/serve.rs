//! `tidegate serve`: puts the rooms together, runs them, and takes them apart in order.

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use sqlx::Row as _;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::accounts::Account;
use crate::answers::Unsent;
use crate::api::{self, ADMIN, App};
use crate::auth::{Authenticator, ConsumerTokens, DEFAULT_TENANT, KEYS, KeyKind, Roles, SigningKey, UserRow, Users};
use crate::auth::{generate_password, hash_password};
use crate::backlog::{BacklogLimits, Ledger};
use crate::clock::Clock;
use crate::config::{self, Config, Durability, ListenAddr};
use crate::consumer::GroupLimits;
use crate::dispatch::Epochs;
use crate::http::{ConnectionLimits, Http};
use crate::ids::ObjectIds;
use crate::locks::KeyedLocks;
use crate::message::Tenant;
use crate::pipeline::{Pipeline, PipelineLimits};
use crate::platform::inventory;
use crate::plugin::compiler::Compiler;
use crate::plugin::{PluginLimits, Plugins};
use crate::push::Pushes;
use crate::quarantine;
use crate::registry::{Registry, RegistryLimits};
use crate::removal::Removal;
use crate::retention::Retention;
use crate::retry::Retries;
use crate::store::Store;
use crate::subscription::Index;
use crate::telemetry;
use crate::tls::{self, Certificate};
use crate::writer::{Change, ConsumerLimits, Writer};

/// Bytes of large request bodies that may be in memory at a time, or twice `limits.bulk_bytes` if that is more.
const BODY_BUDGET: usize = 64 << 20;
/// How long the start waits for plugins: longer than it takes where none has to be compiled.
const PLUGINS_WAIT: Duration = Duration::from_secs(1);
/// How long consumers may take to close when the gateway stops.
const CONSUMERS_WAIT: Duration = Duration::from_secs(3);

/// The data directory where none is given.
pub(crate) const DEFAULT_DATA: &str = "tidegate-data";

/// Flags of `tidegate serve`.
#[derive(clap::Args, Clone, Debug)]
pub struct ServeArgs {
    /// Configuration file (TOML); docs/configuration.md lists every key.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Directory of the database, the keys and the compiled plugins; created if absent.
    #[arg(long, value_name = "DIR", default_value = DEFAULT_DATA)]
    pub data: PathBuf,
    /// Address of the HTTP listener (default 127.0.0.1:8080), or off; port 0 picks a free one.
    #[arg(long, value_name = "ADDR")]
    pub http: Option<ListenAddr>,
    /// Address of the HTTPS listener, or off (default); it needs http.tls_cert and http.tls_key.
    #[arg(long, value_name = "ADDR")]
    pub https: Option<ListenAddr>,
    /// Where to write, as JSON, on which addresses the gateway listens, once it does.
    #[arg(long, value_name = "FILE")]
    pub ready_file: Option<PathBuf>,
}

impl Default for ServeArgs {
    fn default() -> Self {
        Self { config: None, data: DEFAULT_DATA.into(), http: None, https: None, ready_file: None }
    }
}

/// Serves until SIGTERM or SIGINT.
pub async fn run(args: ServeArgs) -> anyhow::Result<()> {
    let mut config = Config::load(args.config.as_deref(), environment())?;
    config.http.addr = args.http.unwrap_or(config.http.addr);
    config.http.https_addr = args.https.unwrap_or(config.http.https_addr);
    let metrics = telemetry::start(&config.log)?;
    let _lock = lock(&args.data)?.with_context(|| format!("{} is in use by another gateway", directory(&args.data)))?;
    raise_descriptors();
    let mut signals = Signals::new()?;
    let listeners = Listeners::bind(&config.http).await?;
    let limits = ConnectionLimits {
        connections: config.limits.connections,
        head: Duration::from_secs(config.limits.request_seconds),
        answer_bytes_per_second: config.limits.answer_bytes_per_second,
        dead: Duration::from_secs(config.consumer.dead_seconds),
    };
    let unsent = Unsent::new(config.limits.unsent_bytes);
    let url = listeners.url(config.http.public_url.as_deref());
    let base_url = config.http.public_url.as_deref().unwrap_or(&url).trim_end_matches('/').to_owned();
    let ready = listeners.ready();
    let Gateway { app, mut writer, first_admin, waiting } = build(config, &args.data, metrics).await?;
    let loading = tokio::spawn(api::load_plugins(app.clone(), waiting));
    if tokio::time::timeout(PLUGINS_WAIT, loading).await.is_err() {
        tracing::warn!("plugins are still being loaded; messages for them are held until they are");
    }
    // Told before it is stored, so that a password that nobody has seen does not count.
    greet(&url, &args.data, first_admin.as_ref().and_then(|admin| admin.password.as_deref()))
        .context("standard output cannot be written")?;
    if let Some(admin) = first_admin {
        store_admin(&app, admin.account).await?;
    }

    tokio::spawn(api::watch_full_topics(app.clone(), base_url));
    tokio::spawn(api::watch_canaries(app.clone()));
    let stop = CancellationToken::new();
    let serving = tokio::spawn(listeners.serve(api::router(app.clone()), limits, unsent, stop.clone()));
    tracing::info!(addresses = %ready, "serving");
    if let Some(file) = &args.ready_file {
        write_ready_file(file, &ready)?;
    }

    tokio::select! {
        () = signals.wait() => {}
        // It never ends by itself but for this: nobody knows any more what is on the disk.
        ended = &mut writer => return ended?.map_err(Into::into),
    }
    tracing::info!("stopping");
    if let Some(file) = &args.ready_file {
        // Whoever reads it later must not find an address that answers no more.
        let _ = fs::remove_file(file);
    }
    stop.cancel();
    let stopped = tokio::select! {
        stopped = shut_down(&app, serving, writer) => stopped,
        () = signals.wait() => bail!("stopped at once by a second signal"),
    };
    stopped?;
    tracing::info!("stopped");
    Ok(())
}

/// The bound listeners; at least one.
struct Listeners {
    http: Option<Http>,
    https: Option<Http>,
    certificate: Option<Arc<Certificate>>,
}

impl Listeners {
    async fn bind(settings: &config::Http) -> anyhow::Result<Self> {
        let mut listeners = Self { http: None, https: None, certificate: None };
        if let Some(addr) = settings.addr.at() {
            check_plain(addr, settings.allow_plain)?;
            let http = Http::bind(addr, None).await;
            listeners.http =
                Some(http.with_context(|| format!("cannot listen on {addr} (http.addr or serve --http)"))?);
        }
        if let Some(addr) = settings.https_addr.at() {
            let (Some(cert), Some(key)) = (&settings.tls_cert, &settings.tls_key) else {
                let key = if settings.tls_cert.is_none() { "http.tls_cert" } else { "http.tls_key" };
                bail!("{key} must name a PEM file, since http.https_addr is {addr}");
            };
            let certificate = Arc::new(Certificate::load(cert, key)?);
            let https = Http::bind(addr, Some(tls::acceptor(certificate.clone()))).await;
            let failed = || format!("cannot listen on {addr} (http.https_addr or --https)");
            listeners.https = Some(https.with_context(failed)?);
            listeners.certificate = Some(certificate);
        }
        if listeners.http.is_none() && listeners.https.is_none() {
            bail!("http.addr and http.https_addr are both off: there is nothing to serve");
        }
        Ok(listeners)
    }

    /// The URL to show; where there is TLS alone, the public one, whose name the certificate has.
    fn url(&self, public: Option<&str>) -> String {
        match (&self.http, &self.https, public) {
            (Some(http), ..) => format!("http://{}", http.addr),
            (None, _, Some(public)) => public.trim_end_matches('/').to_owned(),
            (None, https, None) => https.as_ref().map_or_else(String::new, |https| format!("https://{}", https.addr)),
        }
    }

    /// What the ready file says.
    fn ready(&self) -> serde_json::Value {
        let listeners = [("http", &self.http), ("https", &self.https)];
        let bound = listeners.into_iter().filter_map(|(name, listener)| Some((name, listener.as_ref()?)));
        bound.map(|(name, listener)| (name, listener.addr.to_string())).collect()
    }

    /// Serves on all of them until `stop` ends and the requests at hand are answered.
    async fn serve(self, router: axum::Router, limits: ConnectionLimits, unsent: Unsent, stop: CancellationToken) {
        if let Some(certificate) = self.certificate {
            tokio::spawn(reload_on_hangup(certificate, stop.clone()));
        }
        let serve = async |listener: Option<Http>| {
            if let Some(listener) = listener {
                listener.serve(router.clone(), limits, unsent.clone(), stop.clone()).await;
            }
        };
        tokio::join!(serve(self.http), serve(self.https));
    }
}

/// Off loopback, plain HTTP has to be wanted: it shows passwords to the network.
fn check_plain(addr: SocketAddr, allowed: bool) -> anyhow::Result<()> {
    if addr.ip().to_canonical().is_loopback() {
        return Ok(());
    }
    if !allowed {
        bail!(
            "http.addr {addr} is not on loopback, and plain HTTP shows passwords to the network: serve HTTPS \
             (http.https_addr, http.tls_cert and http.tls_key), or set http.allow_plain = true"
        );
    }
    tracing::warn!(%addr, "plain HTTP off loopback shows passwords and tokens to the network");
    Ok(())
}

/// Takes a renewed certificate when the operator says so.
async fn reload_on_hangup(certificate: Arc<Certificate>, stop: CancellationToken) -> io::Result<()> {
    let mut hangup = signal(SignalKind::hangup())?;
    while let Some(Some(())) = stop.run_until_cancelled(hangup.recv()).await {
        let certificate = certificate.clone();
        match tokio::task::spawn_blocking(move || certificate.reload()).await? {
            Ok(()) => tracing::info!("the certificate was read again"),
            Err(error) => tracing::error!("the certificate stays as it is: {error:#}"),
        }
    }
    Ok(())
}

/// What of the environment is text; nothing else can be a setting.
pub(crate) fn environment() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os().filter_map(|(key, value)| Some((key.into_string().ok()?, value.into_string().ok()?)))
}

struct Gateway {
    app: Arc<App>,
    writer: tokio::task::JoinHandle<Result<(), crate::store::StoreError>>,
    first_admin: Option<FirstAdmin>,
    /// Subscriptions whose plugins are still to be loaded.
    waiting: Vec<(Tenant, u64)>,
}

/// The administrator that the first start makes.
struct FirstAdmin {
    account: Account,
    /// There if it was not given, and so has to be told.
    password: Option<String>,
}

/// Opens the store and starts the rooms, from the disk outwards.
async fn build(config: Config, data: &Path, metrics: telemetry::Metrics) -> anyhow::Result<Gateway> {
    let clock = Clock::system();
    // What there is, before anything is written, since it may be refused. A first start makes it after the database: a key
    // without one says that the database is lost.
    let open_key = || SigningKey::open(data, KeyKind::Consumer);
    let key = data.join(KEYS).exists().then(open_key).transpose()?;
    if config.store.durability == Durability::Second {
        tracing::warn!("store.durability is second: a power cut takes what was stored in the second before it");
    }
    let unusable = || format!("the database in {} cannot be used", data.display());
    let Store { writer: mut writing, readers, long_reads } =
        Store::open(data, &config.store).await.with_context(unusable)?;
    let key = key.map_or_else(open_key, Ok)?;
    let plugins = start_plugins(&config, data);
    let crate::config::Backlog { quota_bytes, ttl_seconds, tail_bytes, volatile_bytes } = config.backlog;
    let backlog_limits = BacklogLimits { quota_bytes, ttl_seconds, tail_bytes, volatile_bytes };
    let ledger =
        Ledger::load(&mut writing, readers.clone(), backlog_limits, clock.clone()).await.with_context(unusable)?;
    let (topics, bodies) = (ledger.topics(), ledger.bodies());
    let consumer_limits = ConsumerLimits {
        topics: config.limits.topics_per_tenant,
        consumers: config.limits.consumers_per_topic,
        group: GroupLimits { window: config.consumer.window, members: config.limits.clients_per_consumer },
    };
    let (writer, writing) = Writer::spawn(writing, ledger, clock.clone(), consumer_limits);
    let sources = Arc::new(inventory::load(&readers).await?);
    let ids = ObjectIds::load(&readers).await?;
    let plugins = plugins.await??;
    quarantine::load(&readers, &plugins).await?;
    let index = Arc::new(Index::default());
    let subscriptions = index.clone();
    topics.listen_to(move |topic| subscriptions.asks_for_gaps(topic));
    let registry_limits =
        RegistryLimits { versions: config.plugins.versions_per_tenant, bytes: config.plugins.tenant_bytes };
    let registry = Registry::new(readers.clone(), writer.clone(), plugins.clone(), registry_limits);
    let waiting = api::load_subscriptions(&readers, &registry, &index).await?;
    registry.tidy().await?;
    let users = load_users(&readers).await?;
    let first_admin = if users.is_empty() { Some(first_admin().await?) } else { None };
    let pipeline_limits = PipelineLimits {
        admission: config.limits.admission,
        frame_bytes: config.limits.frame_bytes,
        fan_out_messages: config.limits.fan_out_messages,
        fan_out_bytes: config.limits.fan_out_bytes,
        ancestors: config.limits.ancestors,
    };
    let stopping = CancellationToken::new();
    let retention = Retention::new(&config.retention, readers.clone(), writer.clone(), clock.clone());
    tokio::spawn(retention.run(stopping.clone()));
    tokio::spawn(quarantine::keep(plugins.clone(), writer.clone(), stopping.clone()));
    let removal = Removal {
        store: readers.clone(),
        writer: writer.clone(),
        topics: topics.clone(),
        sources: sources.clone(),
        clock: clock.clone(),
    };
    tokio::spawn(removal.run(stopping.clone()));
    let consumers = TaskTracker::new();
    let pushes =
        Pushes::new(&config, writer.clone(), bodies.clone(), clock.clone(), stopping.clone(), consumers.clone())?;
    pushes.resume(&readers).await?;
    let pipeline = Pipeline::new(
        index.clone(),
        sources.clone(),
        topics.clone(),
        bodies.clone(),
        plugins.clone(),
        writer.clone(),
        pipeline_limits,
    );
    let retries = Retries {
        index: index.clone(),
        topics: topics.clone(),
        pipeline: pipeline.clone(),
        writer: writer.clone(),
        longest_pause: Duration::from_secs(config.plugins.retry_seconds),
    };
    tokio::spawn(retries.run(stopping.clone()));
    let body_budget = BODY_BUDGET.max(2 * config.limits.bulk_bytes);
    let app = App {
        clock,
        auth: Authenticator::new(users),
        tokens: ConsumerTokens::new(&key),
        store: readers,
        pipeline,
        sources,
        topics,
        ids,
        objects: KeyedLocks::new(),
        external_ids: KeyedLocks::new(),
        accounts: KeyedLocks::new(),
        index,
        subscribing: tokio::sync::Mutex::default(),
        plugins,
        registry,
        trials: api::places_for_trials(),
        writer,
        bodies,
        epochs: Epochs::new(),
        pushes,
        metrics,
        refused_logins: api::RefusedLogins::default(),
        stopping,
        consumers,
        long_reads,
        body_budget: tokio::sync::Semaphore::new(body_budget / api::SMALL_BODY),
        config,
    };
    Ok(Gateway { app: Arc::new(app), writer: writing, first_admin, waiting })
}

/// Loads the plugins, and compiles them at a first start, beside everything else.
fn start_plugins(config: &Config, data: &Path) -> tokio::task::JoinHandle<anyhow::Result<Plugins>> {
    let (limits, builtin_dir) = (plugin_limits(config), config.plugins.builtin_dir.clone());
    let cache = data.join("plugin-cache");
    tokio::task::spawn_blocking(move || {
        if let Some(dir) = builtin_dir.as_deref().filter(|dir| !dir.is_dir()) {
            bail!("plugins.builtin_dir: {} is not a directory", dir.display());
        }
        let compiler = Compiler::Child(own_program().context("the gateway's own program was not found")?);
        Ok(Plugins::start(&limits, &compiler, &cache, builtin_dir.as_deref())?)
    })
}

/// What the configuration allows plugins.
pub(crate) fn plugin_limits(config: &Config) -> PluginLimits {
    let settings = &config.plugins;
    PluginLimits {
        engine: settings.engine,
        memory_bytes: settings.memory_bytes,
        script_memory_bytes: settings.script_memory_bytes,
        stack_bytes: settings.stack_bytes,
        call_ms: settings.call_ms,
        configure_ms: settings.configure_ms,
        output_bytes: settings.output_bytes,
        frame_bytes: config.limits.frame_bytes,
        copy_bytes: settings.copy_bytes,
        instances: settings.instances,
        idle_seconds: settings.idle_seconds,
        core_instances: settings.max_instances,
        component_bytes: settings.max_bytes,
        compile_seconds: settings.compile_seconds,
        compile_bytes: settings.compile_bytes,
        quarantine_faults: settings.quarantine_faults,
        quarantine_seconds: settings.quarantine_seconds,
        ..PluginLimits::default()
    }
}

/// The program that this process runs, even if its file has been replaced by a newer one.
pub(crate) fn own_program() -> io::Result<PathBuf> {
    let running = PathBuf::from("/proc/self/exe");
    if running.exists() { Ok(running) } else { std::env::current_exe() }
}

/// Takes the data directory, which is created if absent, for this process; `None` when another has it.
pub(crate) fn lock(data: &Path) -> anyhow::Result<Option<File>> {
    // Messages and password hashes are nobody else's business.
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(data)
        .with_context(|| format!("{} could not be created", directory(data)))?;
    let file = File::create(data.join("lock")).with_context(|| format!("{} cannot be written", directory(data)))?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error).with_context(|| format!("{} cannot be locked", directory(data))),
    }
}

fn directory(data: &Path) -> String {
    format!("the data directory {}", data.display())
}

async fn load_users(store: &sqlx::SqlitePool) -> anyhow::Result<Users> {
    let rows = sqlx::query("SELECT tenant, name, hash, roles FROM user").fetch_all(store).await?;
    let mut users = Vec::with_capacity(rows.len());
    for row in rows {
        users.push(UserRow {
            tenant: row.try_get::<&str, _>(0)?.into(),
            name: row.try_get(1)?,
            hash: row.try_get(2)?,
            roles: row.try_get::<&str, _>(3)?.parse()?,
        });
    }
    Ok(Users::load(users)?)
}

async fn first_admin() -> anyhow::Result<FirstAdmin> {
    let given = std::env::var("TIDEGATE_ADMIN_PASSWORD").ok().filter(|password| !password.is_empty());
    let made = if given.is_none() { Some(generate_password()) } else { None };
    let password = given.or_else(|| made.clone()).unwrap_or_default();
    let hash =
        tokio::task::spawn_blocking(move || hash_password(&password)).await?.context("TIDEGATE_ADMIN_PASSWORD")?;
    let tenant = DEFAULT_TENANT.into();
    Ok(FirstAdmin { account: Account::new(&tenant, ADMIN.into(), hash, Roles::all_of(&tenant))?, password: made })
}

async fn store_admin(app: &App, admin: Account) -> anyhow::Result<()> {
    app.writer.commit(Change { statements: vec![admin.insert()], ..Change::default() }).await?;
    Ok(app.auth.put(admin.row)?)
}

/// Stops in the order of the line: producers, turns, consumers, disk.
async fn shut_down(
    app: &App,
    serving: tokio::task::JoinHandle<()>,
    writer: tokio::task::JoinHandle<Result<(), crate::store::StoreError>>,
) -> anyhow::Result<()> {
    // Some requests wait for one.
    app.pipeline.stop_releases();
    serving.await?;
    app.pipeline.drain().await;
    app.stopping.cancel();
    app.consumers.close();
    if tokio::time::timeout(CONSUMERS_WAIT, app.consumers.wait()).await.is_err() {
        tracing::warn!("some consumers did not close in time");
    }
    app.writer.stop().await;
    app.store.close().await;
    app.long_reads.close().await;
    writer.await?.context("the database could not be closed")?;
    app.plugins.stop();
    Ok(())
}

/// Writes the addresses in one step, so that nobody reads half a file.
fn write_ready_file(file: &Path, ready: &serde_json::Value) -> anyhow::Result<()> {
    let mut name = file.as_os_str().to_owned();
    name.push(".tmp");
    let unfinished = PathBuf::from(name);
    fs::write(&unfinished, format!("{ready}\n"))
        .and_then(|()| fs::rename(&unfinished, file))
        .with_context(|| format!("the ready file {} could not be written", file.display()))
}

/// Every connection takes a file descriptor, and most systems give a process few of them until it asks.
fn raise_descriptors() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};

    let raised =
        getrlimit(Resource::RLIMIT_NOFILE).and_then(|(_, most)| setrlimit(Resource::RLIMIT_NOFILE, most, most));
    if let Err(error) = raised {
        tracing::warn!(%error, "the limit of open files could not be raised");
    }
}

/// Tells where the gateway listens; at the first start, what to paste to see it work.
fn greet(url: &str, data: &Path, first_password: Option<&str>) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let version = env!("CARGO_PKG_VERSION");
    writeln!(out, "Tidegate {version} serves {url} with its data in {}", data.display())?;
    if let Some(password) = first_password {
        let program = std::env::args().next().unwrap_or_else(|| "tidegate".to_owned());
        writeln!(out, "{}", first_lines(url, password, &program))?;
    }
    out.flush()
}

fn first_lines(url: &str, password: &str, program: &str) -> String {
    // A private authority has to be named to both programs.
    let (trust, ca) = if url.starts_with("https://") {
        (
            "\n  # For a certificate of a private authority: export TIDEGATE_CA=FILE",
            r#" ${TIDEGATE_CA:+--cacert "$TIDEGATE_CA"}"#,
        )
    } else {
        ("", "")
    };
    format!(
        r#"
This is the first start. User {DEFAULT_TENANT}/{ADMIN} has the password {password} (it is not shown again).
To see a message pass, paste this into a second terminal, in the same directory:

  export TIDEGATE_URL={url} TIDEGATE_USER={DEFAULT_TENANT}/{ADMIN} TIDEGATE_PASSWORD={password}{trust}
  export DEVICE=$(curl -s{ca} -u "$TIDEGATE_USER:$TIDEGATE_PASSWORD" -H 'Accept: application/json' \
    -d '{{"name":"pump 1","c8y_IsDevice":{{}}}}' "$TIDEGATE_URL/inventory/managedObjects" | sed 's/^{{"id":"\([0-9]*\)".*/\1/')
  {program} listen --subscription pumps --subscriber me --subscribe --source "$DEVICE" --apis measurements --count 0
  curl -s{ca} -u "$TIDEGATE_USER:$TIDEGATE_PASSWORD" -H 'Content-Type: application/json' \
    -d '{{"source":{{"id":"'"$DEVICE"'"}},"type":"temperature","time":"'"$(date -u +%FT%TZ)"'","c8y_Temperature":{{"T":{{"value":21.5,"unit":"C"}}}}}}' \
    "$TIDEGATE_URL/measurement/measurements" && echo
  {program} listen --subscription pumps --subscriber me

The measurement waited on disk until the consumer 'me' came back and acknowledged it. Stop the listener with Ctrl-C.
"#
    )
}

/// SIGTERM and SIGINT.
struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn wait(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
