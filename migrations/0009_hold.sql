-- NULL: the message was judged, and its consumers get it. Else JSON: what is needed to judge it, see `backlog::Held`. Such a message
-- has its original body, and waits for no consumer yet.
ALTER TABLE msg ADD COLUMN held TEXT;
CREATE INDEX msg_held ON msg(id) WHERE held IS NOT NULL;
