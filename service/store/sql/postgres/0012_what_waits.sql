-- How long whoever looked last meant to look no more, in seconds: time in which nobody had to look is no gap.
ALTER TABLE waits ADD COLUMN pause_s DOUBLE PRECISION NOT NULL DEFAULT 0;

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
);
