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
