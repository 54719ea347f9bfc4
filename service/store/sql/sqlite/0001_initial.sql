-- Jobs, their conversations, the turns that have ended, and the events that callers follow.

CREATE TABLE jobs (
    id TEXT PRIMARY KEY,
    number INTEGER NOT NULL UNIQUE,          -- the order in which jobs were posted; the cursor of a listing
    name TEXT NOT NULL,
    state TEXT NOT NULL,
    document TEXT NOT NULL,                  -- the job as it was posted, JSON
    idempotency_key TEXT UNIQUE,
    body_hash TEXT NOT NULL,
    metadata TEXT NOT NULL,                  -- the job's own, JSON
    total_conversations INTEGER NOT NULL,
    total_turns INTEGER NOT NULL,
    is_cancel_requested INTEGER NOT NULL DEFAULT 0,
    created_at TEXT NOT NULL,
    started_at TEXT,
    finished_at TEXT
) STRICT;

CREATE INDEX jobs_by_state ON jobs (state, number);

CREATE TABLE conversations (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    id TEXT NOT NULL,
    position INTEGER NOT NULL,
    metadata TEXT NOT NULL,                  -- JSON
    state TEXT NOT NULL,
    reason TEXT,
    PRIMARY KEY (job_id, id)
) STRICT, WITHOUT ROWID;

-- One row a turn, written when it ends and never changed: the primary key is what makes a result be recorded once.
CREATE TABLE turns (
    number INTEGER PRIMARY KEY,              -- the order in which turns became visible
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    round INTEGER NOT NULL,
    state TEXT NOT NULL,
    reason TEXT,
    record TEXT NOT NULL,                    -- everything else of the turn, JSON
    UNIQUE (job_id, conversation_id, agent, round)
) STRICT;

CREATE TABLE events (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,                 -- from 1, without gaps, within the job
    kind TEXT NOT NULL,
    data TEXT NOT NULL,                      -- JSON
    PRIMARY KEY (job_id, number)
) STRICT, WITHOUT ROWID;
