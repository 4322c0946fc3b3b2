-- Consumers whose messages are pushed over HTTP. One of a persistent topic goes with its consumer, whoever unsubscribes that.
CREATE TABLE push(
  id             INTEGER PRIMARY KEY, -- an object id
  tenant         TEXT NOT NULL,
  topic          TEXT NOT NULL,       -- name of the subscription
  non_persistent INTEGER NOT NULL,    -- 0 or 1
  consumer       TEXT NOT NULL,       -- name of the subscriber
  created        INTEGER NOT NULL,    -- ms
  target         TEXT NOT NULL,       -- {"uri", "headers"}
  UNIQUE(tenant, topic, non_persistent, consumer)
) STRICT;
CREATE TRIGGER consumer_push AFTER DELETE ON consumer BEGIN
  DELETE FROM push WHERE non_persistent = 0 AND consumer = old.name
    AND (tenant, topic) IN (SELECT tenant, name FROM topic WHERE id = old.topic);
END;
