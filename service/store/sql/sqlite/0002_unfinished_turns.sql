-- Turns that were on a slot and have not ended: what they have behind them, so that a restart forgets no attempt.

CREATE TABLE unfinished_turns (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    round INTEGER NOT NULL,
    record TEXT NOT NULL,                    -- JSON
    PRIMARY KEY (job_id, conversation_id, agent, round)
) STRICT, WITHOUT ROWID;
