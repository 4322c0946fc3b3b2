-- What of a message's source its share depends on. Messages that wait from before have none and stay together, in order.
ALTER TABLE msg ADD COLUMN slot INTEGER NOT NULL DEFAULT 0;
