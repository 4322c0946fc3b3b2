//! Tidegate: what devices say goes through sandboxed filters to disk, and from there to every consumer until it has
//! acknowledged.
//!
//! The rooms, in the order in which a message meets them:
//!
//! - [`http`], [`socket`] and [`tls`], [`api`]: sockets and routes; who asks ([`auth`]), what it means ([`platform`], [`json`], [`time`]).
//! - [`pipeline`]: the upper half of the line. [`subscription`] says who wants a message, [`plugin`] judges and shapes it.
//! - [`registry`] keeps the plugins that are uploaded.
//! - [`writer`]: the one commit that holds it, in the [`backlog`] and the [`store`]; [`ids`] and [`locks`] serve requests.
//! - [`dispatch`]: the lower half. [`consumer`] says what comes next, [`deliver`] carries it out; [`push`] keeps the consumers that
//!   are called rather than call, over [`outbound`] connections.
//! - [`retention`] deletes what is too old, or whose managed object is gone.
//! - [`quarantine`] writes down which plugins are asked no more.
//! - [`removal`] deletes what is left of tenants that were removed.
//! - [`message`] is the vocabulary, [`config`] holds every limit, [`clock`] the time, [`telemetry`] logs and metrics.
//! - [`accounts`] says who there is: tenants and users as rows.
//! - [`serve`] puts it all together; [`listen`] is a consumer for the terminal and [`admin`] changes accounts,
//!   [`manage`] looks after topics and [`authoring`] after plugins, with [`client`]; [`workbench`] tries plugins without a gateway,
//!   on [`samples`];
//!   [`upkeep`] checks a database, [`demo`] shows it all.
//!
//! `ARCHITECTURE.md` beside this crate tells why it is cut this way.

pub mod accounts;
pub mod admin;
pub mod answers;
pub mod api;
pub mod auth;
pub mod authoring;
pub mod backlog;
pub mod client;
pub mod clock;
pub mod config;
pub mod consumer;
pub mod deliver;
pub mod demo;
pub mod dispatch;
mod faults;
pub mod http;
pub mod ids;
pub mod json;
pub mod listen;
pub mod locks;
pub mod manage;
pub mod message;
pub mod outbound;
pub mod pipeline;
pub mod platform;
pub mod plugin;
mod probe;
pub mod push;
pub mod quarantine;
pub mod registry;
pub mod removal;
pub mod retention;
pub mod retry;
mod rollout;
pub mod samples;
pub mod scaffold;
pub mod serve;
pub mod socket;
pub mod store;
pub mod subscription;
pub mod telemetry;
pub mod time;
pub mod tls;
pub mod upkeep;
pub mod workbench;
pub mod writer;
