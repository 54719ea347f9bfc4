-- Conversations that begin with turns of others: which, by agent, up to which round.

CREATE TABLE heritages (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    heritage TEXT NOT NULL,                  -- JSON
    is_lost INTEGER NOT NULL DEFAULT 0,      -- what was inherited is gone: its owner has deleted it
    PRIMARY KEY (job_id, conversation_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE heirs (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    place INTEGER NOT NULL,                  -- of the source among all of this one's: in that order they were spoken
    source_job TEXT NOT NULL,                -- where they were spoken; it may have been deleted
    source_conversation TEXT NOT NULL,
    agent TEXT NOT NULL,
    kind TEXT NOT NULL,                      -- turn, summary
    rounds INTEGER NOT NULL,                 -- turns of rounds below it
    PRIMARY KEY (job_id, conversation_id, source_job, source_conversation, agent, kind)
) STRICT, WITHOUT ROWID;
CREATE INDEX heirs_by_source ON heirs (source_job, source_conversation, agent);

-- What heirs have inherited of jobs that were deleted, as long as there are such heirs.
CREATE TABLE kept_turns (
    job_id TEXT NOT NULL,
    conversation_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    round INTEGER NOT NULL,
    kind TEXT NOT NULL,
    number INTEGER NOT NULL,                 -- that of the turn, which another may have by now
    state TEXT NOT NULL,
    record TEXT NOT NULL,
    kept_for TEXT,                           -- heirs of this key ('' is none); of any where NULL
    PRIMARY KEY (job_id, conversation_id, agent, round, number)
) STRICT, WITHOUT ROWID;
