-- Who runs what: nodes, and the conversations that they have claimed; what a node has written is known by its number.

CREATE TABLE nodes (
    id TEXT PRIMARY KEY,
    is_live INTEGER NOT NULL,
    last_write INTEGER NOT NULL DEFAULT 0,   -- the newest group of writes that was committed
    started_at TEXT NOT NULL
) STRICT;

ALTER TABLE conversations ADD COLUMN owner TEXT;                        -- the node that runs it
ALTER TABLE conversations ADD COLUMN fence INTEGER NOT NULL DEFAULT 0;  -- grows with each claim
CREATE INDEX conversations_unfinished ON conversations (job_id) WHERE state IN ('queued', 'running');

ALTER TABLE jobs ADD COLUMN unfinished INTEGER NOT NULL DEFAULT 0;      -- conversations that have not ended
ALTER TABLE jobs ADD COLUMN last_event INTEGER NOT NULL DEFAULT 0;      -- the number of its newest event
ALTER TABLE jobs ADD COLUMN key_until TEXT;                             -- how long its idempotency key is kept
UPDATE jobs SET
    unfinished = (
        SELECT count(*) FROM conversations WHERE job_id = jobs.id AND conversations.state IN ('queued', 'running')
    ),
    last_event = (SELECT coalesce(max(number), 0) FROM events WHERE job_id = jobs.id);

-- One row for each call of a tool, before it is made and after it: what was asked of the world, and what came of it.
CREATE TABLE tool_calls (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    round INTEGER NOT NULL,
    key TEXT NOT NULL,                       -- the same for the same call in another attempt
    number INTEGER NOT NULL,                 -- the order of the turn's calls, over its attempts
    name TEXT NOT NULL,
    arguments TEXT NOT NULL,                 -- JSON
    policy TEXT NOT NULL,                    -- what is done where the outcome is not known
    outcome TEXT,                            -- JSON; NULL while it is not known
    started_at TEXT NOT NULL,
    ended_at TEXT,
    PRIMARY KEY (job_id, conversation_id, agent, round, key)
) STRICT, WITHOUT ROWID;

-- What callers are to be told: kept until they have taken it, or for as long as the configuration says.
CREATE TABLE deliveries (
    id TEXT PRIMARY KEY,
    job_id TEXT NOT NULL,
    url TEXT NOT NULL,
    secret TEXT,                             -- the name of a secret of the configuration
    body TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    next_at TEXT NOT NULL,
    last_error TEXT,
    state TEXT NOT NULL,                     -- waiting, delivered, given_up
    created_at TEXT NOT NULL
) STRICT;
CREATE INDEX deliveries_waiting ON deliveries (next_at) WHERE state = 'waiting';
ALTER TABLE jobs ADD COLUMN webhook TEXT;                               -- JSON: {url, secret}
