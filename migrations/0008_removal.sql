-- What is still to be deleted of a removed tenant: 0 nothing, 1 topics as they drain, 2 topics and objects at once.
ALTER TABLE tenant ADD COLUMN rest INTEGER NOT NULL DEFAULT 1;
