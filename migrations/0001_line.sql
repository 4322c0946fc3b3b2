-- Counters. object_id: the next id that no block has reserved; message_id: no message below it will ever be made again.
CREATE TABLE meta(k TEXT PRIMARY KEY, v INTEGER NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO meta(k, v) VALUES ('object_id', 1000), ('message_id', 1);

CREATE TABLE user(
  tenant TEXT NOT NULL,
  name   TEXT NOT NULL,
  hash   TEXT NOT NULL,               -- argon2id, PHC string
  roles  TEXT NOT NULL,               -- role names, separated by commas
  PRIMARY KEY(tenant, name)
) STRICT, WITHOUT ROWID;

-- The operational store. `body`: what clients set, as JSON members on one line without the outer braces. Times in ms.
CREATE TABLE managed_object(
  id      INTEGER PRIMARY KEY,
  tenant  TEXT NOT NULL,
  type    TEXT,
  created INTEGER NOT NULL,
  updated INTEGER NOT NULL,
  body    BLOB NOT NULL
) STRICT;

CREATE TABLE measurement(
  id     INTEGER PRIMARY KEY,
  tenant TEXT NOT NULL,
  source INTEGER NOT NULL,
  type   TEXT NOT NULL,
  time   INTEGER NOT NULL,
  body   BLOB NOT NULL
) STRICT;
CREATE INDEX measurement_source_time ON measurement(source, time);

CREATE TABLE subscription(
  id     INTEGER PRIMARY KEY,
  tenant TEXT NOT NULL,
  source INTEGER,                     -- of a subscription in mo context
  body   TEXT NOT NULL                -- the subscription as JSON
) STRICT;

-- The backlog. A topic's messages are listed in memory, so one global sequence needs no index and one right edge.
CREATE TABLE topic(
  id     INTEGER PRIMARY KEY AUTOINCREMENT,
  tenant TEXT NOT NULL,
  name   TEXT NOT NULL,
  UNIQUE(tenant, name)
) STRICT;

CREATE TABLE consumer(
  id      INTEGER PRIMARY KEY AUTOINCREMENT,
  topic   INTEGER NOT NULL,
  name    TEXT NOT NULL,
  created INTEGER NOT NULL,           -- ms
  UNIQUE(topic, name)
) STRICT;

-- Every message of the topic below `hi` is acknowledged, except the holes (ascending ids as a JSON array).
CREATE TABLE cursor(
  consumer INTEGER PRIMARY KEY,
  hi       INTEGER NOT NULL,
  holes    TEXT NOT NULL
) STRICT;

CREATE TABLE msg(
  id    INTEGER PRIMARY KEY,
  topic INTEGER NOT NULL,
  ts    INTEGER NOT NULL,             -- ms
  body  BLOB NOT NULL                 -- description line, action line, blank line, JSON
) STRICT;
