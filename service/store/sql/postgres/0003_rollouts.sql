-- Recorded tokens of turns, and what makes rollouts of them; the comments are in the form for SQLite.

CREATE TABLE turn_tokens (
    number BIGINT PRIMARY KEY REFERENCES turns (number) ON DELETE CASCADE,
    tokens BYTEA NOT NULL
);
ALTER TABLE turn_tokens ALTER COLUMN tokens SET STORAGE EXTERNAL;  -- they are packed already

CREATE TABLE rollouts (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    conversation_id TEXT NOT NULL,
    PRIMARY KEY (job_id, number),
    UNIQUE (job_id, conversation_id)
);

CREATE TABLE rewards (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    reward DOUBLE PRECISION,
    error TEXT,
    metrics TEXT NOT NULL,
    PRIMARY KEY (job_id, conversation_id, agent)
);

CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    owner TEXT,
    settings TEXT NOT NULL,
    created_at TEXT NOT NULL,
    expires_at TEXT NOT NULL,
    reward DOUBLE PRECISION,
    metrics TEXT
);
CREATE INDEX sessions_by_expiry ON sessions (expires_at);

CREATE TABLE exchanges (
    session_id TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    at TEXT NOT NULL,
    is_certain INTEGER NOT NULL,
    mark TEXT NOT NULL,
    head TEXT NOT NULL,
    tokens BYTEA,
    messages BYTEA,
    PRIMARY KEY (session_id, number)
);
ALTER TABLE exchanges ALTER COLUMN tokens SET STORAGE EXTERNAL;
ALTER TABLE exchanges ALTER COLUMN messages SET STORAGE EXTERNAL;
