-- What is set for a topic, whether it exists or not, and for a tenant. NULL: the level above decides.
CREATE TABLE topic_setting(
  tenant         TEXT NOT NULL,
  name           TEXT NOT NULL,
  non_persistent INTEGER NOT NULL,
  quota_bytes    INTEGER,
  ttl_seconds    INTEGER,
  on_full        TEXT,
  gap_messages   INTEGER,
  PRIMARY KEY(tenant, name, non_persistent)
) STRICT, WITHOUT ROWID;

CREATE TABLE tenant_setting(
  tenant       TEXT PRIMARY KEY,
  quota_bytes  INTEGER,
  ttl_seconds  INTEGER,
  on_full      TEXT,
  gap_messages INTEGER
) STRICT, WITHOUT ROWID;

-- When the consumer last acknowledged a message, in ms.
ALTER TABLE cursor ADD COLUMN settled INTEGER;
-- 1: the consumer was left behind, and is owed nothing until it connects.
ALTER TABLE cursor ADD COLUMN parked INTEGER NOT NULL DEFAULT 0;

-- What a consumer missed and has not acknowledged. `id`: of the newest message that it stands for. Times in ms.
CREATE TABLE gap(
  consumer INTEGER NOT NULL,
  id       INTEGER NOT NULL,
  reason   TEXT NOT NULL,             -- expired, evicted or parked
  missed   INTEGER NOT NULL,
  first    INTEGER NOT NULL,
  last     INTEGER NOT NULL,
  PRIMARY KEY(consumer, id)
) STRICT, WITHOUT ROWID;
