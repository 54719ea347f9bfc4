-- How long whoever looked last meant to look no more, in seconds: time in which nobody had to look is no gap.
ALTER TABLE waits ADD COLUMN pause_s REAL NOT NULL DEFAULT 0;

-- A claim goes by the owner through what somebody can move: what is this node's already is none of it.
DROP INDEX conversations_to_claim;
CREATE INDEX conversations_to_claim ON conversations (owner) WHERE awaits = 0 AND state IN ('queued', 'running');

-- How many turns a conversation has inherited: they count for a key until it has ended.
ALTER TABLE heritages ADD COLUMN turns INTEGER NOT NULL DEFAULT 0;

-- Patterns and schemas that ran out of time too often in a job, and the turn from which on they are not tried.
CREATE TABLE given_up (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    path TEXT NOT NULL,
    pattern TEXT NOT NULL,                   -- '' is a schema
    conversation_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    round INTEGER NOT NULL,
    PRIMARY KEY (job_id, path, pattern)
) STRICT, WITHOUT ROWID;
