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

-- Sessions: requests of one agent at the front door, recorded as one rollout.
CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    owner TEXT,                              -- name of its key
    settings TEXT NOT NULL,                  -- JSON: model, records, max_staleness, ttl_s
    created_at TEXT NOT NULL,
    expires_at TEXT NOT NULL,                -- later with each use
    reward REAL,
    metrics TEXT                             -- JSON, NULL without a reward
) STRICT, WITHOUT ROWID;
CREATE INDEX sessions_by_expiry ON sessions (expires_at);

-- Requests of sessions with their answers (service/conversations/record/session.py).
CREATE TABLE exchanges (
    session_id TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,                 -- from 1
    at TEXT NOT NULL,
    is_certain INTEGER NOT NULL,             -- 1: its client has the answer
    mark TEXT NOT NULL,                      -- names the answer
    head TEXT NOT NULL,                      -- JSON
    tokens BLOB,                             -- packed
    messages BLOB,                           -- packed JSON
    PRIMARY KEY (session_id, number)
) STRICT;
