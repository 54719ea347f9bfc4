-- The turns that callers are to speak, until their words are taken over by whoever runs the conversation.
-- A conversation that only callers can move wants no model.

CREATE TABLE awaited_turns (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    round INTEGER NOT NULL,
    since DOUBLE PRECISION NOT NULL,                        -- seconds since the epoch, in this server's time
    until DOUBLE PRECISION,                                 -- NULL: for ever
    demand TEXT NOT NULL,                                   -- a digest
    is_said INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (job_id, conversation_id, agent, round)
);
-- What judges the words of a turn: once for all turns of a job that have the same, since a schema may be large.
CREATE TABLE demands (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    digest TEXT NOT NULL,
    demand TEXT NOT NULL,                                   -- JSON
    PRIMARY KEY (job_id, digest)
);

CREATE INDEX awaited_turns_since ON awaited_turns (since) WHERE is_said = 0;
CREATE INDEX awaited_turns_until ON awaited_turns (until) WHERE is_said = 0 AND until IS NOT NULL;
CREATE INDEX awaited_turns_said ON awaited_turns (job_id, conversation_id) WHERE is_said = 1;

-- When somebody last looked which waits are over.
CREATE TABLE waits (seen DOUBLE PRECISION NOT NULL);
INSERT INTO waits (seen) VALUES (0);
