//! The uploaded plugins: components and scripts in, rows and loaded plugins out.
//!
//! What is uploaded is compiled, linked and configured before it becomes a row, so that nothing unusable is kept. Each upload is a
//! version of its name, which never changes and, once deleted, never comes again. A version is loaded when somebody asks for
//! it, once for all who do, and stays in memory as long as one of them holds it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use serde::de::IgnoredAny;
use sqlx::SqlitePool;

use crate::json::Invalid;
use crate::locks::{KeyedLocks, Places};
use crate::message::Tenant;
use crate::plugin::{self, Fault, Plugin, PluginError, PluginId, Plugins, Source, WeakPlugin, World};
use crate::store::{Statement, StoreError, Value};
use crate::writer::{Change, Refused, Writer};

/// Longest name of a plugin, in characters.
const NAME_CHARS: usize = 64;
/// Names that a tenant may ever use: their numbers are kept when their versions are gone.
const NAMES: i64 = 10_000;
/// Uploads that are at work or wait in the process, and those of one tenant: each holds its body in memory.
const UPLOADS: usize = 8;
const UPLOADS_OF_TENANT: usize = 4;
/// What a plugin is configured with if its author names nothing.
pub const NO_SETTINGS: &str = "{}";

/// How much a tenant may upload.
#[derive(Clone, Copy, Debug)]
pub struct RegistryLimits {
    /// Versions of all plugins together.
    pub versions: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// What a plugin is written in, as the gateway takes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Language {
    /// A WebAssembly component.
    Wasm,
    /// The text of a function.
    JavaScript,
}

impl Language {
    const ALL: [Self; 2] = [Self::Wasm, Self::JavaScript];

    /// Its name in rows and answers.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Wasm => "wasm",
            Self::JavaScript => "javascript",
        }
    }

    /// What a body in it is.
    #[must_use]
    pub fn media_type(self) -> &'static str {
        match self {
            Self::Wasm => "application/wasm",
            Self::JavaScript => "text/javascript",
        }
    }

    /// The one whose bodies are of this type, without its parameters.
    #[must_use]
    pub fn of_media_type(media_type: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|language| language.media_type().eq_ignore_ascii_case(media_type))
    }
}

/// What somebody uploads.
#[derive(Clone, Debug)]
pub struct Upload {
    /// The plugin that it becomes a version of.
    pub name: String,
    /// What the body is.
    pub language: Language,
    /// What it is for; a component says so itself.
    pub world: Option<World>,
    /// JSON text that its `configure` has to accept; without it, it is shown an empty object, and may refuse that.
    pub settings: Option<String>,
    /// The user.
    pub author: String,
    /// The component or the script.
    pub body: Bytes,
}

/// A version, without its body.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Version {
    /// The plugin's name.
    pub name: String,
    /// From 1 on.
    pub version: u32,
    /// What it is for.
    pub world: World,
    /// What it is written in.
    pub language: Language,
    /// SHA-256 of the body, hex.
    pub digest: String,
    /// Bytes of the body.
    pub size: u64,
    /// The user who uploaded it.
    pub author: String,
    /// When, ms since the epoch.
    pub created_ms: i64,
}

impl Version {
    /// What it is once it is loaded.
    #[must_use]
    pub fn id(&self, tenant: &Tenant) -> PluginId {
        PluginId { tenant: Some(tenant.clone()), name: self.name.as_str().into(), version: self.version }
    }
}

/// What became of an upload.
#[derive(Clone, Debug)]
pub struct Uploaded {
    /// The new version.
    pub version: Version,
    /// Why it does not accept an empty object as settings, if that was tried.
    pub refusal: Option<Box<str>>,
}

/// Why a plugin could not be had, kept or deleted.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// The tenant has none of that name, or not in that version.
    #[error("There is no plugin '{name}'{}.", version.map(|version| format!(" in version {version}")).unwrap_or_default())]
    Missing {
        /// Its name.
        name: String,
        /// `None`: any.
        version: Option<u32>,
    },
    /// What was sent cannot be used, or there is too much already.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// It cannot be loaded.
    #[error(transparent)]
    Plugin(#[from] PluginError),
    /// Others have to be finished first.
    #[error("Too many plugins are being uploaded.")]
    Busy,
    /// It could not be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// It could not be written.
    #[error(transparent)]
    Refused(#[from] Refused),
}

impl From<sqlx::Error> for RegistryError {
    fn from(error: sqlx::Error) -> Self {
        Self::Store(error.into())
    }
}

/// The uploaded plugins.
pub struct Registry {
    store: SqlitePool,
    writer: Writer,
    plugins: Plugins,
    limits: RegistryLimits,
    /// Of uploads at work.
    uploads: Places<Tenant>,
    /// One upload of a tenant at a time: they count versions and bytes.
    uploading: KeyedLocks<Tenant>,
    loading: KeyedLocks<PluginId>,
    loaded: Mutex<HashMap<PluginId, WeakPlugin>>,
}

impl Registry {
    /// The registry of what `store` holds.
    #[must_use]
    pub fn new(store: SqlitePool, writer: Writer, plugins: Plugins, limits: RegistryLimits) -> Self {
        Self {
            store,
            writer,
            plugins,
            limits,
            uploads: Places::new(UPLOADS, UPLOADS_OF_TENANT),
            uploading: KeyedLocks::new(),
            loading: KeyedLocks::new(),
            loaded: Mutex::default(),
        }
    }

    /// The sandbox that the plugins are loaded into.
    #[must_use]
    pub fn plugins(&self) -> &Plugins {
        &self.plugins
    }

    /// Keeps an upload as the next version of its name. `now_ms` is since the epoch.
    ///
    /// # Errors
    /// What its author has to change; at the limits; and when it cannot be written. Nothing is kept then.
    pub async fn upload(&self, tenant: &Tenant, upload: Upload, now_ms: i64) -> Result<Uploaded, RegistryError> {
        check_name(&upload.name)?;
        if let Some(Err(error)) = upload.settings.as_deref().map(serde_json::from_str::<IgnoredAny>) {
            return Err(Invalid::new("settings", format!("must be JSON text: {error}")).into());
        }
        let source = source(upload.language, upload.world, &upload.body)?;
        let _place = self.uploads.take(tenant).ok_or(RegistryError::Busy)?;
        let _uploading = self.uploading.lock(tenant.clone()).await;
        let version = self.next_version(tenant, &upload).await?;
        let id = PluginId { tenant: Some(tenant.clone()), name: upload.name.as_str().into(), version };
        let plugin = self.plugins.load(id, source).await.map_err(|error| match error {
            PluginError::Component { reason, .. } => unusable(reason),
            // A script is run once to see that it is one.
            PluginError::Fault { fault, .. } if fault != Fault::Stopped => unusable(fault),
            error => error.into(),
        })?;
        let digest = plugin::digest(&upload.body);
        let kept = self.keep(tenant, &plugin, upload, digest.clone(), now_ms).await;
        match kept {
            Ok(_) => self.remember(&plugin),
            Err(_) => self.forget(&digest).await?,
        }
        kept
    }

    async fn keep(
        &self,
        tenant: &Tenant,
        plugin: &Plugin,
        upload: Upload,
        digest: String,
        now_ms: i64,
    ) -> Result<Uploaded, RegistryError> {
        let refusal = self.accept(tenant, plugin, &upload).await?;
        let Upload { name, language, author, body, .. } = upload;
        let (world, version, size) = (plugin.world(), plugin.id().version, body.len() as u64);
        let version = Version { name, version, world, language, digest, size, author, created_ms: now_ms };
        self.writer.commit(Change { statements: version.insert(tenant, body), ..Change::default() }).await?;
        Ok(Uploaded { version, refusal })
    }

    /// The number of the next version, if there is room for it.
    async fn next_version(&self, tenant: &Tenant, upload: &Upload) -> Result<u32, RegistryError> {
        let RegistryLimits { versions, bytes } = self.limits;
        let (count, sum): (i64, i64) =
            sqlx::query_as("SELECT count(*), ifnull(sum(size), 0) FROM plugin WHERE tenant = ?")
                .bind(tenant.as_str())
                .fetch_one(&self.store)
                .await?;
        let way_out = "delete some that are not used";
        if count.cast_unsigned() >= versions {
            let text = format!(
                "A tenant may have at most {versions} versions of plugins (plugins.versions_per_tenant); {way_out}."
            );
            return Err(Invalid::new("", text).into());
        }
        if sum.cast_unsigned() + upload.body.len() as u64 > bytes {
            let text =
                format!("The plugins of a tenant may have at most {bytes} bytes (plugins.tenant_bytes); {way_out}.");
            return Err(Invalid::new("", text).into());
        }
        let last: Option<u32> = sqlx::query_scalar("SELECT version FROM plugin_name WHERE tenant = ? AND name = ?")
            .bind(tenant.as_str())
            .bind(&upload.name)
            .fetch_optional(&self.store)
            .await?;
        if last.is_none() {
            let names: i64 = sqlx::query_scalar("SELECT count(*) FROM plugin_name WHERE tenant = ?")
                .bind(tenant.as_str())
                .fetch_one(&self.store)
                .await?;
            if names >= NAMES {
                let text = format!("must be one that was used before: a tenant may use at most {NAMES} names");
                return Err(Invalid::new("name", text).into());
            }
        }
        Ok(last.unwrap_or_default() + 1)
    }

    /// Whether it is what it is said to be and takes settings; the text is its refusal of settings that nobody has named.
    async fn accept(
        &self,
        tenant: &Tenant,
        plugin: &Plugin,
        upload: &Upload,
    ) -> Result<Option<Box<str>>, RegistryError> {
        let world = plugin.world();
        if let Some(wanted) = upload.world.filter(|wanted| *wanted != world) {
            let text = format!("is '{}', and the component is for the world '{}'", wanted.name(), world.name());
            return Err(Invalid::new("world", text).into());
        }
        let other = self.of_name(tenant, &upload.name).await?.into_iter().find(|other| other.world != world);
        if let Some(Version { version, world: other, .. }) = other {
            let text = format!(
                "is that of a {}, in version {version}; this is a {} and needs another one",
                other.name(),
                world.name()
            );
            return Err(Invalid::new("name", text).into());
        }
        let settings = upload.settings.as_deref();
        match (self.plugins.trial(tenant, plugin, settings.unwrap_or(NO_SETTINGS), Vec::new()).await, settings) {
            (Ok(_), _) => Ok(None),
            (Err(PluginError::Settings(text)), None) => Ok(Some(text)),
            (Err(PluginError::Settings(text)), Some(_)) => Err(Invalid::new("settings", text).into()),
            (Err(PluginError::Fault { fault, .. }), _) if fault != Fault::Stopped => {
                let text = match settings {
                    None => format!(
                        "configure failed on the settings {NO_SETTINGS}: {fault}. It must return an error text for \
                         settings that it cannot use; the parameter 'settings' names others to try"
                    ),
                    Some(_) => format!("configure failed on these settings: {fault}"),
                };
                Err(Invalid::new("", text).into())
            }
            (Err(error), _) => Err(error.into()),
        }
    }

    /// A version of a plugin; the newest one that is there unless a number says which.
    ///
    /// # Errors
    /// [`RegistryError::Missing`], and when it cannot be loaded any more.
    pub async fn get(&self, tenant: &Tenant, name: &str, version: Option<u32>) -> Result<Plugin, RegistryError> {
        let id = |version| PluginId { tenant: Some(tenant.clone()), name: name.into(), version };
        if let Some(plugin) = version.and_then(|version| self.in_memory(&id(version))) {
            return Ok(plugin);
        }
        let row = self.version(tenant, name, version).await?;
        let id = id(row.version);
        let _loading = self.loading.lock(id.clone()).await;
        if let Some(plugin) = self.in_memory(&id) {
            return Ok(plugin);
        }
        let body = self.body(tenant, &row).await?;
        let plugin = self.plugins.load_again(id, source(row.language, Some(row.world), &body)?).await?;
        self.remember(&plugin);
        Ok(plugin)
    }

    /// A version as it was uploaded; the newest one unless a number says which.
    ///
    /// # Errors
    /// [`RegistryError::Missing`].
    pub async fn version(&self, tenant: &Tenant, name: &str, version: Option<u32>) -> Result<Version, RegistryError> {
        let mut versions = self.of_name(tenant, name).await?;
        versions.retain(|row| version.is_none_or(|wanted| row.version == wanted));
        versions.pop().ok_or_else(|| RegistryError::Missing { name: name.to_owned(), version })
    }

    /// The body of a version.
    ///
    /// # Errors
    /// [`RegistryError::Missing`] if it was deleted meanwhile.
    pub async fn body(&self, tenant: &Tenant, Version { name, version, .. }: &Version) -> Result<Bytes, RegistryError> {
        let body: Option<Vec<u8>> =
            sqlx::query_scalar("SELECT body FROM plugin WHERE tenant = ? AND name = ? AND version = ?")
                .bind(tenant.as_str())
                .bind(name)
                .bind(version)
                .fetch_optional(&self.store)
                .await?;
        body.map(Bytes::from).ok_or_else(|| RegistryError::Missing { name: name.clone(), version: Some(*version) })
    }

    /// The versions of all plugins of a tenant by name, oldest first.
    ///
    /// # Errors
    /// When they cannot be read.
    pub async fn list(&self, tenant: &Tenant) -> Result<BTreeMap<String, Vec<Version>>, RegistryError> {
        let mut plugins: BTreeMap<String, Vec<Version>> = BTreeMap::new();
        for version in self.rows(tenant, None).await? {
            plugins.entry(version.name.clone()).or_default().push(version);
        }
        Ok(plugins)
    }

    /// The versions of one plugin, oldest first; none if there is no such plugin.
    ///
    /// # Errors
    /// When they cannot be read.
    pub async fn of_name(&self, tenant: &Tenant, name: &str) -> Result<Vec<Version>, RegistryError> {
        self.rows(tenant, Some(name)).await
    }

    async fn rows(&self, tenant: &Tenant, name: Option<&str>) -> Result<Vec<Version>, RegistryError> {
        let rows: Vec<Row> = sqlx::query_as(
            "SELECT name, version, world, language, digest, size, author, created FROM plugin
             WHERE tenant = ? AND name = ifnull(?, name) ORDER BY name, version",
        )
        .bind(tenant.as_str())
        .bind(name)
        .fetch_all(&self.store)
        .await?;
        rows.into_iter().map(Version::read).collect()
    }

    /// Deletes versions of one plugin. The caller sees to it that nobody uses them.
    ///
    /// # Errors
    /// When it cannot be written.
    pub async fn delete(&self, tenant: &Tenant, versions: &[Version]) -> Result<(), RegistryError> {
        let delete = |row: &Version| Statement {
            sql: "DELETE FROM plugin WHERE tenant = ? AND name = ? AND version = ?",
            values: vec![
                Value::Text(tenant.to_string()),
                Value::Text(row.name.clone()),
                Value::Int(row.version.into()),
            ],
        };
        let statements = versions.iter().map(delete).collect();
        self.writer.commit(Change { statements, ..Change::default() }).await?;
        self.let_go(tenant, versions).await
    }

    /// Lets go of what is kept for versions whose rows are deleted.
    ///
    /// # Errors
    /// When the other rows cannot be read.
    pub async fn let_go(
        &self,
        tenant: &Tenant,
        versions: impl IntoIterator<Item = &Version>,
    ) -> Result<(), RegistryError> {
        for row in versions {
            let id = row.id(tenant);
            self.memory().remove(&id);
            self.plugins.quarantine().lift(tenant, &id);
            self.forget(&row.digest).await?;
        }
        Ok(())
    }

    /// Deletes compiled code that no plugin needs: what a crash or a restored backup has left.
    ///
    /// # Errors
    /// When the rows cannot be read.
    pub async fn tidy(&self) -> Result<(), RegistryError> {
        let digests: Vec<String> =
            sqlx::query_scalar("SELECT DISTINCT digest FROM plugin").fetch_all(&self.store).await?;
        self.plugins.tidy(digests.into_iter().collect::<HashSet<_>>()).await;
        Ok(())
    }

    /// Deletes the compiled code of a component that is no plugin's any more.
    async fn forget(&self, digest: &str) -> Result<(), RegistryError> {
        let used: bool = sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM plugin WHERE digest = ?)")
            .bind(digest)
            .fetch_one(&self.store)
            .await?;
        if !used {
            self.plugins.forget(digest).await;
        }
        Ok(())
    }

    fn in_memory(&self, id: &PluginId) -> Option<Plugin> {
        self.memory().get(id).and_then(WeakPlugin::upgrade)
    }

    fn remember(&self, plugin: &Plugin) {
        let mut loaded = self.memory();
        loaded.retain(|_, plugin| plugin.upgrade().is_some());
        loaded.insert(plugin.id().clone(), plugin.downgrade());
    }

    fn memory(&self) -> MutexGuard<'_, HashMap<PluginId, WeakPlugin>> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

type Row = (String, u32, String, String, String, i64, String, i64);

impl Version {
    fn read((name, version, world, language, digest, size, author, created_ms): Row) -> Result<Self, RegistryError> {
        let unknown = |what: &str| StoreError::Damaged(format!("plugin '{name}' has the unknown {what}"));
        let of_name = |language: &Language| language.name();
        Ok(Self {
            world: World::named(&world).ok_or_else(|| unknown("world"))?,
            language: Language::ALL
                .into_iter()
                .find(|known| of_name(known) == language)
                .ok_or_else(|| unknown("language"))?,
            version,
            digest,
            size: size.cast_unsigned(),
            author,
            created_ms,
            name,
        })
    }

    /// A tenant that is removed meanwhile gets no rows.
    fn insert(&self, tenant: &Tenant, body: Bytes) -> Vec<Statement> {
        let tenant = || Value::Text(tenant.to_string());
        let (name, version) = (|| Value::Text(self.name.clone()), || Value::Int(self.version.into()));
        vec![
            Statement {
                sql: "INSERT INTO plugin(tenant, name, version, world, language, digest, size, author, created, body)
                      SELECT name, ?, ?, ?, ?, ?, ?, ?, ?, ? FROM tenant WHERE name = ? AND removed IS NULL",
                values: vec![
                    name(),
                    version(),
                    Value::Text(self.world.name().to_owned()),
                    Value::Text(self.language.name().to_owned()),
                    Value::Text(self.digest.clone()),
                    Value::Int(self.size.cast_signed()),
                    Value::Text(self.author.clone()),
                    Value::Int(self.created_ms),
                    Value::Blob(body),
                    tenant(),
                ],
            },
            Statement {
                sql: "INSERT OR REPLACE INTO plugin_name(tenant, name, version)
                      SELECT name, ?, ? FROM tenant WHERE name = ? AND removed IS NULL",
                values: vec![name(), version(), tenant()],
            },
        ]
    }
}

fn unusable(reason: impl std::fmt::Display) -> RegistryError {
    Invalid::new("", format!("The plugin cannot be used: {reason}")).into()
}

/// What a body is made into a plugin from.
pub(crate) fn source(language: Language, world: Option<World>, body: &[u8]) -> Result<Source<'_>, Invalid> {
    match (language, world) {
        (Language::Wasm, _) => Ok(Source::Component(body)),
        (Language::JavaScript, Some(world)) => match std::str::from_utf8(body) {
            Ok(text) => Ok(Source::Script { world, text }),
            Err(error) => Err(Invalid::new("", format!("the script is no UTF-8 after byte {}", error.valid_up_to()))),
        },
        (Language::JavaScript, None) => {
            Err(Invalid::new("world", "must say whether the script is a 'filter' or a 'transform'"))
        }
    }
}

/// A small letter, then small letters, digits and hyphens; nothing that is built in.
fn check_name(name: &str) -> Result<(), Invalid> {
    let sound = name.len() <= NAME_CHARS
        && name.starts_with(|first: char| first.is_ascii_lowercase())
        && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    if !sound {
        let text = format!("must have 1 to {NAME_CHARS} small letters, digits and hyphens, a letter first");
        return Err(Invalid::new("name", text));
    }
    if plugin::built_ins().any(|(built_in, _)| built_in == name) {
        return Err(Invalid::new("name", format!("must be another one: '{name}' is built in")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn names_are_small_and_not_those_of_built_in_plugins() {
        for good in ["a", "hot-pumps", "v2", "a-", &"a".repeat(64)] {
            assert_eq!(check_name(good), Ok(()), "{good}");
        }
        for bad in ["", "1a", "-a", "A", "a_b", "a.b", "a/b", "ä", "type-filter", &"a".repeat(65)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn media_types_are_those_of_the_languages_alone() {
        assert_eq!(Language::of_media_type("Application/WASM"), Some(Language::Wasm));
        assert_eq!(Language::of_media_type("text/javascript"), Some(Language::JavaScript));
        assert_eq!(Language::of_media_type("application/octet-stream"), None);
    }
}
