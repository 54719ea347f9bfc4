-- What turns have used, summed; it outlives the jobs that it is of.

CREATE TABLE usage (
    day TEXT NOT NULL,                       -- in UTC, on which an attempt ended
    key_name TEXT NOT NULL,                  -- '' is no key
    job_id TEXT NOT NULL,                    -- '' is no job
    agent TEXT NOT NULL,                     -- '' is no agent
    model TEXT NOT NULL,
    turns INTEGER NOT NULL,                  -- that were completed
    attempts INTEGER NOT NULL,               -- of these and all others
    prompt_tokens INTEGER NOT NULL,          -- of attempts that stand, those from a cache included
    cached_tokens INTEGER NOT NULL,
    answer_tokens INTEGER NOT NULL,
    wasted_tokens INTEGER NOT NULL,          -- read and written by attempts that do not stand
    slot_s REAL NOT NULL,                    -- for which attempts held a slot
    PRIMARY KEY (day, key_name, job_id, agent, model)
) STRICT, WITHOUT ROWID;
