-- Uploaded plugins, each version as it came. The body stands last, so that who reads the rest passes it by.
CREATE TABLE plugin(
  tenant   TEXT NOT NULL,
  name     TEXT NOT NULL,
  version  INTEGER NOT NULL,
  world    TEXT NOT NULL,             -- 'filter' or 'transform'
  language TEXT NOT NULL,             -- 'wasm' or 'javascript'
  digest   TEXT NOT NULL,             -- SHA-256 of the body, hex
  size     INTEGER NOT NULL,          -- bytes of the body
  author   TEXT NOT NULL,             -- the user
  created  INTEGER NOT NULL,          -- ms
  body     BLOB NOT NULL,
  UNIQUE(tenant, name, version)
) STRICT;
CREATE INDEX plugin_digest ON plugin(digest);

-- The highest version that a name was ever given: one that was deleted does not come again.
CREATE TABLE plugin_name(
  tenant  TEXT NOT NULL,
  name    TEXT NOT NULL,
  version INTEGER NOT NULL,
  PRIMARY KEY(tenant, name)
) STRICT, WITHOUT ROWID;
