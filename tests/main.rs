//! The gateway as its users meet it: the real process, real sockets, one gateway and one data directory for each test.
//!
//! `harness` starts gateways and speaks to them; every other module holds the scenes of one subject.
#![allow(clippy::unwrap_used, reason = "tests")]

mod access;
mod backlog;
mod backup;
mod children;
mod consumers;
mod crash;
mod demo;
mod discovery;
mod explain;
mod harness;
mod history;
mod hold;
#[cfg(target_os = "linux")]
mod hostile;
mod identity;
mod inventory;
mod limits;
mod listen;
mod measurements;
mod notifications;
mod objects;
mod openapi;
mod operator;
mod plugins;
mod push;
mod quarantine;
mod quota;
mod registry;
mod rollout;
mod scaffold;
mod scripts;
mod shaping;
mod shared;
mod slow;
mod startup;
mod storage;
mod subscriptions;
mod tenants;
mod terminal;
mod tls;
mod tokens;
mod topics;
mod trial;
mod users;
mod volatile;
mod workbench;
