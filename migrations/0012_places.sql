-- Where measurements stand among those of their source. As an index it would have one new entry in a page of its own for each device
-- that a commit stores something of, and cost more than everything else that is written. So the newest wait in the order in which they
-- came, and take their places some hundred at a time (store/recent.rs).
CREATE TABLE measurement_by_source(
  source INTEGER NOT NULL,
  time   INTEGER NOT NULL,
  id     INTEGER NOT NULL,
  PRIMARY KEY(source, time, id)
) STRICT, WITHOUT ROWID;
INSERT INTO measurement_by_source SELECT source, time, id FROM measurement ORDER BY source, time, id;
DROP INDEX measurement_source_time;

CREATE TABLE measurement_recent(
  id     INTEGER PRIMARY KEY,
  source INTEGER NOT NULL,
  time   INTEGER NOT NULL
) STRICT;

CREATE VIEW measurement_place AS
  SELECT source, time, id FROM measurement_by_source UNION ALL SELECT source, time, id FROM measurement_recent;

CREATE TRIGGER measurement_added AFTER INSERT ON measurement BEGIN
  INSERT INTO measurement_recent(id, source, time) VALUES (new.id, new.source, new.time);
END;
CREATE TRIGGER measurement_deleted AFTER DELETE ON measurement BEGIN
  DELETE FROM measurement_recent WHERE id = old.id;
  DELETE FROM measurement_by_source WHERE source = old.source AND time = old.time AND id = old.id;
END;
