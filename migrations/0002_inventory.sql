-- For lists of managed objects.
CREATE INDEX managed_object_tenant ON managed_object(tenant);
CREATE INDEX managed_object_type ON managed_object(tenant, type);

-- The tree of managed objects. It is all in memory, too, so nothing but the start reads it.
CREATE TABLE link(
  parent INTEGER NOT NULL,
  kind   INTEGER NOT NULL,            -- 0: devices, 1: assets, 2: additions
  child  INTEGER NOT NULL,
  PRIMARY KEY(parent, kind, child)
) STRICT, WITHOUT ROWID;
CREATE INDEX link_child ON link(child);

CREATE TABLE external_id(
  tenant TEXT NOT NULL,
  type   TEXT NOT NULL,
  value  TEXT NOT NULL,
  object INTEGER NOT NULL,            -- the managed object that it stands for
  PRIMARY KEY(tenant, type, value)
) STRICT, WITHOUT ROWID;
CREATE INDEX external_id_object ON external_id(object);
