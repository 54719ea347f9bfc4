-- The schema that sqlite/0001 to 0003 make, for several nodes: what each owns, and until when.

CREATE SEQUENCE job_numbers;

CREATE TABLE nodes (
    id TEXT PRIMARY KEY,
    is_live INTEGER NOT NULL,
    last_write BIGINT NOT NULL DEFAULT 0,       -- the newest group of writes that was committed
    started_at TEXT NOT NULL,
    lease_until TIMESTAMPTZ NOT NULL,           -- in this server's time, which is the only one that counts
    models TEXT[] NOT NULL,                     -- those that it has or is about to have workers for
    report TEXT NOT NULL DEFAULT '{}'           -- JSON: what of each job is ready and in flight there
);

CREATE TABLE jobs (
    id TEXT PRIMARY KEY,
    number BIGINT NOT NULL UNIQUE,
    name TEXT NOT NULL,
    state TEXT NOT NULL,
    document TEXT NOT NULL,
    idempotency_key TEXT UNIQUE,
    key_until TEXT,
    body_hash TEXT NOT NULL,
    metadata TEXT NOT NULL,
    priority BIGINT NOT NULL,
    models TEXT[] NOT NULL,
    total_conversations INTEGER NOT NULL,
    total_turns INTEGER NOT NULL,
    unfinished INTEGER NOT NULL,
    last_event BIGINT NOT NULL DEFAULT 0,
    is_cancel_requested INTEGER NOT NULL DEFAULT 0,
    webhook TEXT,
    created_at TEXT NOT NULL,
    started_at TEXT,
    finished_at TEXT
);
CREATE INDEX jobs_by_state ON jobs (state, number);

CREATE TABLE conversations (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    id TEXT NOT NULL,
    position INTEGER NOT NULL,
    metadata TEXT NOT NULL,
    state TEXT NOT NULL,
    reason TEXT,
    owner TEXT,
    fence BIGINT NOT NULL DEFAULT 0,
    wants TEXT[] NOT NULL,                      -- the models of the turns that come next
    PRIMARY KEY (job_id, id)
);
CREATE INDEX conversations_to_claim ON conversations (job_id, position)
    WHERE owner IS NULL AND state IN ('queued', 'running');
CREATE INDEX conversations_by_owner ON conversations (owner) WHERE owner IS NOT NULL;

CREATE TABLE turns (
    number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    round INTEGER NOT NULL,
    state TEXT NOT NULL,
    reason TEXT,
    record TEXT NOT NULL,
    UNIQUE (job_id, conversation_id, agent, round)
);

CREATE TABLE unfinished_turns (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    round INTEGER NOT NULL,
    record TEXT NOT NULL,
    PRIMARY KEY (job_id, conversation_id, agent, round)
);

CREATE TABLE events (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    number BIGINT NOT NULL,
    kind TEXT NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (job_id, number)
);

CREATE TABLE tool_calls (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    round INTEGER NOT NULL,
    key TEXT NOT NULL,
    number INTEGER NOT NULL,
    name TEXT NOT NULL,
    arguments TEXT NOT NULL,
    policy TEXT NOT NULL,
    outcome TEXT,
    started_at TEXT NOT NULL,
    ended_at TEXT,
    PRIMARY KEY (job_id, conversation_id, agent, round, key)
);

CREATE TABLE deliveries (
    id TEXT PRIMARY KEY,
    job_id TEXT NOT NULL,
    url TEXT NOT NULL,
    secret TEXT,
    body TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    next_at TEXT NOT NULL,
    last_error TEXT,
    state TEXT NOT NULL,
    created_at TEXT NOT NULL
);
CREATE INDEX deliveries_waiting ON deliveries (next_at) WHERE state = 'waiting';
