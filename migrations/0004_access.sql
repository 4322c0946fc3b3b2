-- Tenants. One that was removed keeps its row: its name is not given again, since tokens for its topics may still be about.
CREATE TABLE tenant(
  name    TEXT PRIMARY KEY,
  created INTEGER NOT NULL,           -- ms
  removed INTEGER                     -- ms
) STRICT, WITHOUT ROWID;
INSERT INTO tenant(name, created)
SELECT name, unixepoch() * 1000 FROM (SELECT 'edge' AS name UNION SELECT tenant FROM user);

-- What a user's record tells of the person: a JSON object of strings.
ALTER TABLE user ADD COLUMN profile TEXT NOT NULL DEFAULT '{}';
