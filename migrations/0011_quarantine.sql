-- Plugins that have failed too often in a tenant, and are asked no more until somebody lets them out.
CREATE TABLE plugin_quarantine(
  tenant  TEXT NOT NULL,
  owner   TEXT NOT NULL,              -- whose the plugin is; '' if it is built in
  plugin  TEXT NOT NULL,
  version INTEGER NOT NULL,
  since   INTEGER NOT NULL,           -- ms
  reason  TEXT NOT NULL,
  PRIMARY KEY(tenant, owner, plugin, version)
) STRICT, WITHOUT ROWID;
