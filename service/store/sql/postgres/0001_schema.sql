-- The tables of sqlite/0001_schema.sql, whose comments hold here as well, with columns for several nodes.

CREATE SEQUENCE job_numbers;

CREATE TABLE jobs (
    id TEXT PRIMARY KEY,
    number BIGINT NOT NULL UNIQUE,              -- from job_numbers
    key_name TEXT,
    name TEXT NOT NULL,
    state TEXT NOT NULL,
    idempotency_key TEXT UNIQUE,
    key_until TEXT,
    body_hash TEXT NOT NULL,
    priority BIGINT NOT NULL,
    models TEXT[] NOT NULL,                     -- all models of its agents
    total_conversations INTEGER NOT NULL,
    total_turns INTEGER NOT NULL,
    unfinished INTEGER NOT NULL,
    last_event BIGINT NOT NULL,
    is_cancel_requested INTEGER NOT NULL DEFAULT 0,
    webhook TEXT,
    created_at TEXT NOT NULL,
    started_at TEXT,
    finished_at TEXT
);
CREATE INDEX jobs_by_state ON jobs (state, number);
CREATE INDEX jobs_by_key ON jobs (key_name, number) WHERE key_name IS NOT NULL;
CREATE INDEX jobs_queued ON jobs (key_name) WHERE unfinished > 0;

CREATE TABLE job_documents (
    job_id TEXT PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    document TEXT NOT NULL,
    metadata TEXT NOT NULL
);

CREATE TABLE wordings (
    digest TEXT PRIMARY KEY,
    words TEXT NOT NULL
);

CREATE TABLE conversations (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    id TEXT NOT NULL,
    position INTEGER NOT NULL,
    metadata TEXT NOT NULL,
    state TEXT NOT NULL,
    reason TEXT,
    ending TEXT,
    owner TEXT,
    fence BIGINT NOT NULL DEFAULT 0,
    wants TEXT[] NOT NULL,                      -- models of the next turns; none: only callers can move it
    began_at TEXT,
    wording TEXT REFERENCES wordings (digest),
    PRIMARY KEY (job_id, id)
);
CREATE INDEX conversations_to_claim ON conversations (job_id, position)
    WHERE owner IS NULL AND state IN ('queued', 'running');
CREATE INDEX conversations_by_owner ON conversations (owner) WHERE owner IS NOT NULL;

-- Clients' bodies, of conversations whose turn is asked with one.
CREATE TABLE posted_requests (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    request TEXT NOT NULL,                   -- JSON, without the body
    body BYTEA NOT NULL,
    PRIMARY KEY (job_id, conversation_id)
);

CREATE TABLE turns (
    number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    round INTEGER NOT NULL,
    kind TEXT NOT NULL,
    state TEXT NOT NULL,
    reason TEXT,
    record TEXT NOT NULL,
    UNIQUE (job_id, conversation_id, agent, round, kind)
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

CREATE TABLE awaited_turns (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    round INTEGER NOT NULL,
    since DOUBLE PRECISION NOT NULL,
    until DOUBLE PRECISION,
    demand TEXT NOT NULL,
    is_said INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (job_id, conversation_id, agent, round)
);
CREATE INDEX awaited_turns_since ON awaited_turns (since) WHERE is_said = 0;
CREATE INDEX awaited_turns_until ON awaited_turns (until) WHERE is_said = 0 AND until IS NOT NULL;
CREATE INDEX awaited_turns_said ON awaited_turns (job_id, conversation_id) WHERE is_said = 1;
CREATE VIEW open_turns AS
    SELECT awaited_turns.job_id, conversation_id, agent, round, since, until, demand, is_said, owner
    FROM awaited_turns JOIN conversations ON conversations.job_id = awaited_turns.job_id
    AND conversations.id = awaited_turns.conversation_id AND conversations.state IN ('queued', 'running');

CREATE TABLE demands (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    digest TEXT NOT NULL,
    demand TEXT NOT NULL,
    PRIMARY KEY (job_id, digest)
);

CREATE TABLE waits (
    seen DOUBLE PRECISION NOT NULL,
    pause_s DOUBLE PRECISION NOT NULL
);
INSERT INTO waits (seen, pause_s) VALUES (0, 0);

CREATE TABLE heritages (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    heritage TEXT NOT NULL,
    turns INTEGER NOT NULL,
    is_lost INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (job_id, conversation_id)
);

CREATE TABLE heirs (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    place INTEGER NOT NULL,
    source_job TEXT NOT NULL,
    source_conversation TEXT NOT NULL,
    agent TEXT NOT NULL,
    kind TEXT NOT NULL,
    rounds INTEGER NOT NULL,
    PRIMARY KEY (job_id, conversation_id, source_job, source_conversation, agent, kind)
);
CREATE INDEX heirs_by_source ON heirs (source_job, source_conversation, agent);

CREATE TABLE kept_turns (
    job_id TEXT NOT NULL,
    conversation_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    round INTEGER NOT NULL,
    kind TEXT NOT NULL,
    number BIGINT NOT NULL,
    state TEXT NOT NULL,
    record TEXT NOT NULL,
    kept_for TEXT,
    PRIMARY KEY (job_id, conversation_id, agent, round, number)
);

CREATE TABLE memory_cuts (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    round INTEGER NOT NULL,
    from_round INTEGER NOT NULL,
    PRIMARY KEY (job_id, conversation_id, agent, round)
);

CREATE TABLE given_up (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    path TEXT NOT NULL,
    pattern TEXT NOT NULL,
    conversation_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    round INTEGER NOT NULL,
    PRIMARY KEY (job_id, path, pattern)
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

CREATE TABLE usage (
    day TEXT NOT NULL,
    key_name TEXT NOT NULL,
    job_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    model TEXT NOT NULL,
    turns BIGINT NOT NULL,
    attempts BIGINT NOT NULL,
    prompt_tokens BIGINT NOT NULL,
    cached_tokens BIGINT NOT NULL,
    answer_tokens BIGINT NOT NULL,
    wasted_tokens BIGINT NOT NULL,
    slot_s DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (day, key_name, job_id, agent, model)
);

CREATE TABLE nodes (
    id TEXT PRIMARY KEY,
    is_live INTEGER NOT NULL,
    last_write BIGINT NOT NULL DEFAULT 0,
    started_at TEXT NOT NULL,
    lease_until TIMESTAMPTZ NOT NULL,           -- in the time of this server, the only one that counts
    models TEXT[] NOT NULL,                     -- models that it has workers for, or soon will
    report TEXT NOT NULL DEFAULT '{}'           -- JSON: ready turns and turns in flight, by job
);
