-- From which turn on which rounds are shown to an agent no more: decided once, and stored before the turn is asked.

CREATE TABLE memory_cuts (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    agent TEXT NOT NULL,                     -- '' is all that read one text
    round INTEGER NOT NULL,
    from_round INTEGER NOT NULL,
    PRIMARY KEY (job_id, conversation_id, agent, round)
) STRICT, WITHOUT ROWID;
