-- Recorded tokens of turns, packed (service/conversations/record/token_arrays.py).
CREATE TABLE turn_tokens (
    number INTEGER PRIMARY KEY REFERENCES turns (number) ON DELETE CASCADE,
    tokens BLOB NOT NULL
) STRICT;

-- Conversations whose rollouts can be read, in the order in which that began.
CREATE TABLE rollouts (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,                 -- from 1, without gaps within the job
    conversation_id TEXT NOT NULL,
    PRIMARY KEY (job_id, number),
    UNIQUE (job_id, conversation_id)
) STRICT, WITHOUT ROWID;

-- Rewards of conversations, or of one agent's part in them.
CREATE TABLE rewards (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    agent TEXT NOT NULL,                     -- '': all agents
    reward REAL,                             -- NULL: its source has failed
    error TEXT,                              -- why
    metrics TEXT NOT NULL,                   -- JSON
    PRIMARY KEY (job_id, conversation_id, agent)
) STRICT, WITHOUT ROWID;
