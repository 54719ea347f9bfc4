-- The turns that callers are to speak, until their words are taken over by whoever runs the conversation.

CREATE TABLE awaited_turns (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    round INTEGER NOT NULL,
    since REAL NOT NULL,                                    -- seconds since the epoch
    until REAL,                                             -- NULL: for ever
    demand TEXT NOT NULL,                                   -- a digest
    is_said INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (job_id, conversation_id, agent, round)
) STRICT, WITHOUT ROWID;
-- What judges the words of a turn: once for all turns of a job that have the same, since a schema may be large.
CREATE TABLE demands (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    digest TEXT NOT NULL,
    demand TEXT NOT NULL,                                   -- JSON
    PRIMARY KEY (job_id, digest)
) STRICT, WITHOUT ROWID;

CREATE INDEX awaited_turns_since ON awaited_turns (since) WHERE is_said = 0;
CREATE INDEX awaited_turns_until ON awaited_turns (until) WHERE is_said = 0 AND until IS NOT NULL;
CREATE INDEX awaited_turns_said ON awaited_turns (job_id, conversation_id) WHERE is_said = 1;

ALTER TABLE conversations ADD COLUMN awaits INTEGER NOT NULL DEFAULT 0; -- only callers can move it: nobody runs it

-- A claim goes through what somebody can move, and not through ten thousand conversations that wait for their callers.
CREATE INDEX conversations_to_claim ON conversations (job_id) WHERE awaits = 0 AND state IN ('queued', 'running');
CREATE INDEX conversations_by_owner ON conversations (owner) WHERE owner IS NOT NULL;

-- When somebody last looked which waits are over.
CREATE TABLE waits (seen REAL NOT NULL) STRICT;
INSERT INTO waits (seen) VALUES (0);
