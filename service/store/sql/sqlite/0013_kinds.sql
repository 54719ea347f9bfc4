-- A turn may be a summary: beside an agent's turn of a round, of what was said before it.

CREATE TABLE turns_of_kinds (
    number INTEGER PRIMARY KEY,              -- the order in which turns became visible
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    round INTEGER NOT NULL,
    kind TEXT NOT NULL DEFAULT 'turn',       -- turn, summary
    state TEXT NOT NULL,
    reason TEXT,
    record TEXT NOT NULL,                    -- everything else of the turn, JSON
    UNIQUE (job_id, conversation_id, agent, round, kind)
) STRICT;
INSERT INTO turns_of_kinds (number, job_id, conversation_id, agent, round, state, reason, record)
    SELECT number, job_id, conversation_id, agent, round, state, reason, record FROM turns;
DROP TABLE turns;
ALTER TABLE turns_of_kinds RENAME TO turns;
