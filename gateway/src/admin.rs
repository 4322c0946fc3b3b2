//! `tidegate user` and `tidegate tenant`: change who there is.
//!
//! Without a URL they open the data directory, of which the gateway must not be running then; with one they ask the running
//! gateway over REST. Both ways obey the rules of [`crate::accounts`].

use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::{Args, Subcommand};
use serde_json::{Value, json};

use crate::accounts::{Account, Tenants, UserFields, Users, check_tenant_name};
use crate::api::{ADMIN, path_segment};
use crate::auth::{DEFAULT_TENANT, Roles, generate_password, hash_password};
use crate::client::{Client, ClientArgs};
use crate::clock::Clock;
use crate::config::{Config, Limits};
use crate::json;
use crate::message::Tenant;
use crate::serve::{DEFAULT_DATA, environment, lock};
use crate::store::{FILE_NAME, Statement, Store, Transaction};

/// Where the accounts are.
#[derive(Args, Debug)]
pub struct Place {
    /// Base URL of a running gateway, which is asked in place of the data directory
    #[arg(long, global = true, env = "TIDEGATE_URL")]
    pub url: Option<String>,
    /// With a URL, who asks: `tenant/user`; the password is read from TIDEGATE_PASSWORD
    #[arg(long, global = true, env = "TIDEGATE_USER", value_name = "TENANT/USER")]
    pub user: Option<String>,
    /// For https: trust the certificates in this PEM file, in place of those that the system trusts
    #[arg(long, global = true, env = "TIDEGATE_CA", value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// Data directory of a gateway that is not running (default tidegate-data); a URL in the environment does not count then
    #[arg(long, global = true, value_name = "DIR")]
    pub data: Option<PathBuf>,
    /// With a data directory: the gateway's configuration file, for its limits
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// `tidegate user`
#[derive(Args, Debug)]
pub struct UserArgs {
    #[command(flatten)]
    place: Place,
    /// The tenant (default: with a URL that of the user who asks, else edge)
    #[arg(long, global = true, value_name = "NAME")]
    tenant: Option<String>,
    #[command(subcommand)]
    command: UserCommand,
}

#[derive(Subcommand, Debug)]
enum UserCommand {
    /// Adds a user; the password is taken from TIDEGATE_NEW_PASSWORD, or made up and shown
    Add {
        /// The user
        name: String,
        /// What the user may do, such as ROLE_MEASUREMENT_READ,ROLE_INVENTORY_READ; `all` for everything that the tenant can give
        #[arg(long, value_name = "ROLE", value_delimiter = ',')]
        roles: Vec<String>,
    },
    /// Removes a user
    Remove {
        /// The user
        name: String,
    },
    /// Sets a user's password, taken from TIDEGATE_NEW_PASSWORD, or made up and shown
    Password {
        /// The user
        name: String,
    },
    /// Lists the users with their roles
    List,
}

/// `tidegate tenant`
#[derive(Args, Debug)]
pub struct TenantArgs {
    #[command(flatten)]
    place: Place,
    #[command(subcommand)]
    command: TenantCommand,
}

#[derive(Subcommand, Debug)]
enum TenantCommand {
    /// Adds a tenant with its first administrator, whose password is taken from TIDEGATE_NEW_PASSWORD, or made up and shown
    Add {
        /// The tenant
        name: String,
        /// The administrator
        #[arg(long, value_name = "NAME", default_value = ADMIN)]
        admin: String,
    },
    /// Removes a tenant with its users and subscriptions; its name is not given again
    Remove {
        /// The tenant
        name: String,
        /// Deletes its topics, with what waits there, and its objects, too; also of a tenant that was removed before
        #[arg(long)]
        purge: bool,
    },
    /// Lists the tenants
    List,
}

/// Runs `tidegate user`.
///
/// # Errors
/// Refusals, with the reason; and when the gateway or the data directory cannot be reached.
pub async fn users(args: UserArgs) -> anyhow::Result<()> {
    match args.place.open().await? {
        Opened::Gateway(client, asking) => {
            let tenant = args.tenant.unwrap_or(asking);
            let path = format!("/user/{}/users", path_segment(&tenant));
            users_by_rest(&client, &path, &args.command).await
        }
        Opened::Directory(directory) => {
            let tenant = Tenant::from(args.tenant.as_deref().unwrap_or(DEFAULT_TENANT));
            let done = users_on_disk(&directory, &tenant, &args.command).await;
            directory.close(done).await
        }
    }
}

/// Runs `tidegate tenant`.
///
/// # Errors
/// As [`users`].
pub async fn tenants(args: TenantArgs) -> anyhow::Result<()> {
    match args.place.open().await? {
        Opened::Gateway(client, _) => tenants_by_rest(&client, &args.command).await,
        Opened::Directory(directory) => {
            let done = tenants_on_disk(&directory, &args.command).await;
            directory.close(done).await
        }
    }
}

async fn users_by_rest(client: &Client, path: &str, command: &UserCommand) -> anyhow::Result<()> {
    let one = |name: &str| format!("{path}/{}", path_segment(name));
    match command {
        UserCommand::Add { name, roles } => {
            let password = Password::new();
            let roles = if roles == &["all"] { all_roles(client).await? } else { roles.clone() };
            let body = json!({"userName": name, "password": password.text, "roles": roles});
            client.post(path, &body).await?;
            password.show(name)
        }
        UserCommand::Remove { name } => Ok(client.delete(&one(name)).await?),
        UserCommand::Password { name } => {
            let password = Password::new();
            client.put(&one(name), &json!({"password": password.text})).await?;
            password.show(name)
        }
        UserCommand::List => {
            let users = client.pages(path, "users").await?;
            let line = |user: &Value| {
                let roles = user["roles"]["references"].as_array().into_iter().flatten();
                let roles: Vec<_> = roles.filter_map(|reference| reference["role"]["id"].as_str()).collect();
                format!("{}\t{}", user["userName"].as_str().unwrap_or_default(), roles.join(","))
            };
            print(&users.iter().map(line).collect::<Vec<_>>())
        }
    }
}

async fn tenants_by_rest(client: &Client, command: &TenantCommand) -> anyhow::Result<()> {
    const PATH: &str = "/tidegate/v1/tenants";
    match command {
        TenantCommand::Add { name, admin } => {
            let password = Password::new();
            let body = json!({"id": name, "adminName": admin, "adminPassword": password.text});
            client.post(PATH, &body).await?;
            password.show(&format!("{name}/{admin}"))
        }
        TenantCommand::Remove { name, purge } => {
            let purge = if *purge { "?purge=true" } else { "" };
            Ok(client.delete(&format!("{PATH}/{}{purge}", path_segment(name))).await?)
        }
        TenantCommand::List => {
            let tenants = client.pages(PATH, "tenants").await?;
            print(&tenants.iter().map(|tenant| tenant["id"].as_str().unwrap_or_default()).collect::<Vec<_>>())
        }
    }
}

/// The roles that the tenant of whoever asks can give.
async fn all_roles(client: &Client) -> anyhow::Result<Vec<String>> {
    let roles = client.get("/user/roles").await?;
    let names = roles["roles"].as_array().into_iter().flatten().filter_map(|role| role["id"].as_str());
    Ok(names.map(str::to_owned).collect())
}

async fn users_on_disk(directory: &Directory, tenant: &Tenant, command: &UserCommand) -> anyhow::Result<Done> {
    let users = directory.users(tenant);
    match command {
        UserCommand::Add { name, roles } => {
            let password = Password::new();
            let account = Account::new(tenant, name.clone(), password.hash().await?, Roles::all_of(tenant))?;
            let account = if roles == &["all"] {
                account
            } else {
                let body = json!({"roles": roles}).to_string();
                account.with(UserFields::parse(body.as_bytes(), tenant, &json::Limits::default())?)
            };
            Ok(Done::shown(users.add(&account).await?, password, name.clone()))
        }
        UserCommand::Remove { name } => Ok(Done::silent(users.remove(name).await?)),
        UserCommand::Password { name } => {
            let password = Password::new();
            let mut account = users.get(name).await?;
            account.row.hash = password.hash().await?;
            Ok(Done::shown(users.change(&account).await?, password, name.clone()))
        }
        UserCommand::List => {
            let users = users.list(0, u64::MAX).await?;
            print(&users.iter().map(|user| format!("{}\t{}", user.row.name, user.row.roles)).collect::<Vec<_>>())?;
            Ok(Done::silent(Vec::new()))
        }
    }
}

async fn tenants_on_disk(directory: &Directory, command: &TenantCommand) -> anyhow::Result<Done> {
    let tenants = Tenants { store: &directory.store.readers, limit: directory.limits.tenants };
    let now_ms = Clock::system().now_ms();
    match command {
        TenantCommand::Add { name, admin } => {
            check_tenant_name(name)?;
            let password = Password::new();
            let tenant = Tenant::from(name.as_str());
            let account = Account::new(&tenant, admin.clone(), password.hash().await?, Roles::all_of(&tenant))?;
            let statements = tenants.add(&tenant, &account, now_ms).await?;
            Ok(Done::shown(statements, password, format!("{name}/{admin}")))
        }
        TenantCommand::Remove { name, purge } => {
            Ok(Done::silent(tenants.remove(&name.as_str().into(), *purge, now_ms).await?))
        }
        TenantCommand::List => {
            let rows = tenants.list(0, u64::MAX).await?;
            print(&rows.iter().map(|row| row.name.as_str()).collect::<Vec<_>>())?;
            Ok(Done::silent(Vec::new()))
        }
    }
}

/// Where a [`Place`] is.
pub(crate) enum Reached {
    /// A running gateway, and the tenant of whoever asks it.
    Gateway(Client, String),
    /// The data directory of one that must not run.
    Directory(PathBuf),
}

enum Opened {
    /// A running gateway, and the tenant of whoever asks it.
    Gateway(Client, String),
    Directory(Box<Directory>),
}

impl Place {
    pub(crate) fn reach(&self) -> anyhow::Result<Reached> {
        let Some(url) = self.url.as_ref().filter(|_| self.data.is_none()) else {
            return Ok(Reached::Directory(self.data.clone().unwrap_or(DEFAULT_DATA.into())));
        };
        let gateway = ClientArgs { url: url.clone(), user: self.user.clone(), ca: self.ca.clone() };
        Ok(Reached::Gateway(gateway.client()?, gateway.tenant().to_owned()))
    }

    async fn open(&self) -> anyhow::Result<Opened> {
        Ok(match self.reach()? {
            Reached::Gateway(client, tenant) => Opened::Gateway(client, tenant),
            Reached::Directory(data) => {
                Opened::Directory(Box::new(Directory::open(&data, self.config.as_deref()).await?))
            }
        })
    }
}

/// The data directory of a gateway that does not run, held until the command ends.
struct Directory {
    store: Store,
    limits: Limits,
    _lock: File,
}

impl Directory {
    async fn open(data: &Path, config: Option<&Path>) -> anyhow::Result<Self> {
        if !data.join(FILE_NAME).is_file() {
            bail!(
                "{} holds no database: name another directory with --data, or start the gateway once",
                data.display()
            );
        }
        let Config { limits, store, .. } = Config::load(config, environment())?;
        let lock = lock(data)?.context("the gateway is running, use --url")?;
        let store = Store::open(data, &store).await.context("the database cannot be used")?;
        Ok(Self { store, limits, _lock: lock })
    }

    fn users<'a>(&'a self, tenant: &'a Tenant) -> Users<'a> {
        Users { store: &self.store.readers, tenant, limit: self.limits.users_per_tenant }
    }

    /// Carries out what was decided.
    async fn close(mut self, done: anyhow::Result<Done>) -> anyhow::Result<()> {
        let Done { statements, password } = done?;
        self.store.writer.commit(&Transaction { statements, ..Transaction::default() }).await?;
        self.store.close().await?;
        match password {
            Some((password, user)) => password.show(&user),
            None => Ok(()),
        }
    }
}

/// What is left to do on the disk.
struct Done {
    statements: Vec<Statement>,
    /// To be shown after the commit, with its user.
    password: Option<(Password, String)>,
}

impl Done {
    fn silent(statements: Vec<Statement>) -> Self {
        Self { statements, password: None }
    }

    fn shown(statements: Vec<Statement>, password: Password, user: String) -> Self {
        Self { statements, password: Some((password, user)) }
    }
}

/// A new password.
struct Password {
    text: String,
    made: bool,
}

impl Password {
    /// The one in the environment, or a new one.
    fn new() -> Self {
        match std::env::var("TIDEGATE_NEW_PASSWORD") {
            Ok(text) if !text.is_empty() => Self { text, made: false },
            _ => Self { text: generate_password(), made: true },
        }
    }

    async fn hash(&self) -> anyhow::Result<String> {
        let text = self.text.clone();
        Ok(tokio::task::spawn_blocking(move || hash_password(&text)).await??)
    }

    fn show(&self, user: &str) -> anyhow::Result<()> {
        if self.made {
            print(&[format!("The password of {user} is {} (it is not shown again).", self.text)])
        } else {
            Ok(())
        }
    }
}

/// Whoever read standard output has seen enough, as in `… | head -1`: no reason to say anything.
#[derive(Debug, thiserror::Error)]
#[error("nobody reads standard output any more")]
pub struct NobodyReads;

/// Writes lines to standard output.
///
/// # Errors
/// [`NobodyReads`], and what else keeps it from being written.
pub(crate) fn print(lines: &[impl std::fmt::Display]) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match lines.iter().try_for_each(|line| writeln!(out, "{line}")) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(NobodyReads.into()),
        written => written.context("standard output cannot be written"),
    }
}
