-- Events, alarms and operations. As for measurements, `body` holds what clients set, as JSON members on one line without the
-- outer braces; what queries need of it stands in columns, too. Times in ms.
CREATE TABLE event(
  id      INTEGER PRIMARY KEY,
  tenant  TEXT NOT NULL,
  source  INTEGER NOT NULL,
  type    TEXT NOT NULL,
  time    INTEGER NOT NULL,
  created INTEGER NOT NULL,
  updated INTEGER NOT NULL,
  body    BLOB NOT NULL
) STRICT;
CREATE INDEX event_source_time ON event(source, time);
CREATE INDEX event_tenant_time ON event(tenant, time);

CREATE TABLE alarm(
  id       INTEGER PRIMARY KEY,
  tenant   TEXT NOT NULL,
  source   INTEGER NOT NULL,
  type     TEXT NOT NULL,
  time     INTEGER NOT NULL,          -- of the last occurrence
  first    INTEGER NOT NULL,          -- time of the first one
  count    INTEGER NOT NULL,          -- occurrences
  created  INTEGER NOT NULL,
  updated  INTEGER NOT NULL,
  status   TEXT NOT NULL,
  severity TEXT NOT NULL,
  body     BLOB NOT NULL
) STRICT;
CREATE INDEX alarm_source_time ON alarm(source, time);
CREATE INDEX alarm_tenant_time ON alarm(tenant, time);
-- Every new alarm asks whether there is an open one of its type, and how many of each severity its device has.
CREATE INDEX alarm_open_type ON alarm(source, type) WHERE status <> 'CLEARED';
CREATE INDEX alarm_open_severity ON alarm(source, severity) WHERE status <> 'CLEARED';

CREATE TABLE operation(
  id     INTEGER PRIMARY KEY,
  tenant TEXT NOT NULL,
  source INTEGER NOT NULL,            -- the device
  type   TEXT,
  time   INTEGER NOT NULL,            -- of its creation
  status TEXT NOT NULL,
  body   BLOB NOT NULL
) STRICT;
CREATE INDEX operation_source ON operation(source);
CREATE INDEX operation_tenant_time ON operation(tenant, time);

-- For ranges of time over all devices, and for the retention.
CREATE INDEX measurement_tenant_time ON measurement(tenant, time);

-- Managed objects that are gone, while rows are left whose source they were. Nobody sees such rows any more: a device may have
-- millions of them, which are deleted a few at a time. `since` in seconds.
CREATE TABLE gone(
  source INTEGER PRIMARY KEY,
  since  INTEGER NOT NULL
) STRICT;
CREATE TRIGGER managed_object_gone AFTER DELETE ON managed_object BEGIN
  INSERT OR IGNORE INTO gone(source, since) VALUES (old.id, unixepoch());
END;
