//! Writes down which plugins are in quarantine, so that a restart lets none out.

use sqlx::{Row as _, SqlitePool};
use tokio_util::sync::CancellationToken;

use crate::message::Tenant;
use crate::plugin::{PluginId, Plugins, QuarantineChange, Quarantined};
use crate::store::{Statement, Value};
use crate::writer::{Change, Writer};

/// Puts back those that are written down.
///
/// # Errors
/// Those of the database.
pub async fn load(store: &SqlitePool, plugins: &Plugins) -> Result<(), sqlx::Error> {
    let rows = sqlx::query("SELECT tenant, owner, plugin, version, since, reason FROM plugin_quarantine");
    for row in rows.fetch_all(store).await? {
        let owner = Some(row.try_get::<&str, _>(1)?).filter(|owner| !owner.is_empty()).map(Tenant::from);
        let plugin = PluginId { tenant: owner, name: row.try_get::<&str, _>(2)?.into(), version: row.try_get(3)? };
        let why = Quarantined { since_ms: row.try_get(4)?, reason: row.try_get::<&str, _>(5)?.into() };
        plugins.quarantine().restore(row.try_get::<&str, _>(0)?.into(), plugin, why);
    }
    Ok(())
}

/// Follows the changes until the gateway stops.
pub async fn keep(plugins: Plugins, writer: Writer, stopping: CancellationToken) {
    let Some(mut changes) = plugins.quarantine().follow() else { return };
    while let Some(Some(change)) = stopping.run_until_cancelled(changes.recv()).await {
        if let Err(error) = writer.commit(Change { statements: vec![statement(change)], ..Change::default() }).await {
            tracing::warn!(%error, "a change of a plugin's quarantine was not written down; a restart will not know it");
        }
    }
}

fn statement((tenant, plugin, why): QuarantineChange) -> Statement {
    let owner = plugin.tenant.as_ref().map(ToString::to_string).unwrap_or_default();
    let key = [
        Value::Text(tenant.to_string()),
        Value::Text(owner),
        Value::Text(plugin.name.to_string()),
        Value::Int(plugin.version.into()),
    ];
    match why {
        Some(Quarantined { since_ms, reason }) => Statement {
            sql: "REPLACE INTO plugin_quarantine(tenant, owner, plugin, version, since, reason) VALUES (?, ?, ?, ?, ?, ?)",
            values: key.into_iter().chain([Value::Int(since_ms), Value::Text(reason.into())]).collect(),
        },
        None => Statement {
            sql: "DELETE FROM plugin_quarantine WHERE tenant = ? AND owner = ? AND plugin = ? AND version = ?",
            values: key.into(),
        },
    }
}
