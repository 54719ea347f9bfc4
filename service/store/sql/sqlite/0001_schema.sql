-- Jobs. Large parts that never change are in job_documents, since each event of a job rewrites its row.
CREATE TABLE jobs (
    id TEXT PRIMARY KEY,
    number INTEGER NOT NULL UNIQUE,          -- order of posting; the cursor of a listing
    key_name TEXT,                           -- name of the key that posted it; NULL without keys
    name TEXT NOT NULL,
    state TEXT NOT NULL,
    idempotency_key TEXT UNIQUE,
    key_until TEXT,                          -- when the idempotency key becomes free
    body_hash TEXT NOT NULL,
    total_conversations INTEGER NOT NULL,
    total_turns INTEGER NOT NULL,
    unfinished INTEGER NOT NULL,             -- conversations that have not ended
    last_event INTEGER NOT NULL,             -- number of its newest event
    is_cancel_requested INTEGER NOT NULL DEFAULT 0,
    webhook TEXT,                            -- JSON: {url, secret}
    created_at TEXT NOT NULL,
    started_at TEXT,
    finished_at TEXT
) STRICT;
CREATE INDEX jobs_by_state ON jobs (state, number);
CREATE INDEX jobs_by_key ON jobs (key_name, number) WHERE key_name IS NOT NULL;
CREATE INDEX jobs_queued ON jobs (key_name) WHERE unfinished > 0;

CREATE TABLE job_documents (
    job_id TEXT PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    document TEXT NOT NULL,                  -- the job as it was posted, JSON
    metadata TEXT NOT NULL                   -- the job's own, JSON
) STRICT;

-- Words that Roundhouse puts around a job's own, shared by all conversations with the same words.
CREATE TABLE wordings (
    digest TEXT PRIMARY KEY,                 -- SHA-256 of the words
    words TEXT NOT NULL                      -- JSON, by model
) STRICT, WITHOUT ROWID;

CREATE TABLE conversations (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    id TEXT NOT NULL,
    position INTEGER NOT NULL,
    metadata TEXT NOT NULL,                  -- JSON
    state TEXT NOT NULL,
    reason TEXT,
    ending TEXT,                             -- condition that ended it before its rounds were over, JSON
    owner TEXT,                              -- node that runs it
    fence INTEGER NOT NULL DEFAULT 0,        -- grows with each claim
    awaits INTEGER NOT NULL DEFAULT 0,       -- 1: only callers can move it, and no node runs it
    began_at TEXT,                           -- start with its time zone, for the clock in its prompts
    wording TEXT REFERENCES wordings (digest),
    PRIMARY KEY (job_id, id)
) STRICT, WITHOUT ROWID;
CREATE INDEX conversations_unfinished ON conversations (job_id) WHERE state IN ('queued', 'running');
-- A claim reads neither conversations that wait for callers nor those that this node runs already.
CREATE INDEX conversations_to_claim ON conversations (owner) WHERE awaits = 0 AND state IN ('queued', 'running');
CREATE INDEX conversations_by_owner ON conversations (owner) WHERE owner IS NOT NULL;

-- Clients' bodies, of conversations whose turn is asked with one.
CREATE TABLE posted_requests (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    request TEXT NOT NULL,                   -- JSON, without the body
    body BLOB NOT NULL,
    PRIMARY KEY (job_id, conversation_id)
) STRICT, WITHOUT ROWID;

-- Turns that have ended. A row never changes: the unique key records each result once.
CREATE TABLE turns (
    number INTEGER PRIMARY KEY,              -- order in which turns became visible
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    round INTEGER NOT NULL,
    kind TEXT NOT NULL,                      -- turn, summary
    state TEXT NOT NULL,
    reason TEXT,
    record TEXT NOT NULL,                    -- the whole turn, JSON
    UNIQUE (job_id, conversation_id, agent, round, kind)
) STRICT;

-- Turns that failed on a slot and will run again, with their attempts so far.
CREATE TABLE unfinished_turns (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    round INTEGER NOT NULL,
    record TEXT NOT NULL,                    -- JSON
    PRIMARY KEY (job_id, conversation_id, agent, round)
) STRICT, WITHOUT ROWID;

CREATE TABLE events (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,                 -- from 1, without gaps within the job
    kind TEXT NOT NULL,
    data TEXT NOT NULL,                      -- JSON
    PRIMARY KEY (job_id, number)
) STRICT, WITHOUT ROWID;

-- Calls of tools, each written before the call and completed after it.
CREATE TABLE tool_calls (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    round INTEGER NOT NULL,
    key TEXT NOT NULL,                       -- the same for the same call in another attempt
    number INTEGER NOT NULL,                 -- order of the turn's calls over all attempts
    name TEXT NOT NULL,
    arguments TEXT NOT NULL,                 -- JSON
    policy TEXT NOT NULL,                    -- what to do if the outcome is unknown
    outcome TEXT,                            -- JSON; NULL while unknown
    started_at TEXT NOT NULL,
    ended_at TEXT,
    PRIMARY KEY (job_id, conversation_id, agent, round, key)
) STRICT, WITHOUT ROWID;

-- Turns that wait for callers, until the node that runs the conversation takes their words over.
CREATE TABLE awaited_turns (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    round INTEGER NOT NULL,
    since REAL NOT NULL,                     -- seconds since the epoch
    until REAL,                              -- NULL: no limit
    demand TEXT NOT NULL,                    -- a digest in demands
    is_said INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (job_id, conversation_id, agent, round)
) STRICT, WITHOUT ROWID;
CREATE INDEX awaited_turns_since ON awaited_turns (since) WHERE is_said = 0;
CREATE INDEX awaited_turns_until ON awaited_turns (until) WHERE is_said = 0 AND until IS NOT NULL;
CREATE INDEX awaited_turns_said ON awaited_turns (job_id, conversation_id) WHERE is_said = 1;
-- Those of conversations that go on, with the node that runs each; the rest means nothing.
CREATE VIEW open_turns AS
    SELECT awaited_turns.job_id, conversation_id, agent, round, since, until, demand, is_said, owner
    FROM awaited_turns JOIN conversations ON conversations.job_id = awaited_turns.job_id
    AND conversations.id = awaited_turns.conversation_id AND conversations.state IN ('queued', 'running');

-- Rules for a caller's words, shared by all turns of a job with the same rules, since a schema may be large.
CREATE TABLE demands (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    digest TEXT NOT NULL,
    demand TEXT NOT NULL,                    -- JSON
    PRIMARY KEY (job_id, digest)
) STRICT, WITHOUT ROWID;

-- The last look for waits that are over: one row.
CREATE TABLE waits (
    seen REAL NOT NULL,                      -- time of the look, in seconds since the epoch
    pause_s REAL NOT NULL                    -- announced pause after it; a longer one is a gap
) STRICT;
INSERT INTO waits (seen, pause_s) VALUES (0, 0);

-- Conversations that begin with turns of others.
CREATE TABLE heritages (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    heritage TEXT NOT NULL,                  -- JSON
    turns INTEGER NOT NULL,                  -- number of inherited turns: they count for a key until the heir ends
    is_lost INTEGER NOT NULL DEFAULT 0,      -- 1: the owner of the source has deleted the turns
    PRIMARY KEY (job_id, conversation_id)
) STRICT, WITHOUT ROWID;

-- The turns that they begin with, by source, agent and kind.
CREATE TABLE heirs (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    place INTEGER NOT NULL,                  -- order of the sources of this conversation
    source_job TEXT NOT NULL,                -- where the turns were spoken; it may have been deleted
    source_conversation TEXT NOT NULL,
    agent TEXT NOT NULL,
    kind TEXT NOT NULL,                      -- turn, summary
    rounds INTEGER NOT NULL,                 -- turns of rounds below this one
    PRIMARY KEY (job_id, conversation_id, source_job, source_conversation, agent, kind)
) STRICT, WITHOUT ROWID;
CREATE INDEX heirs_by_source ON heirs (source_job, source_conversation, agent);

-- Turns of deleted jobs, kept as long as a conversation has inherited them.
CREATE TABLE kept_turns (
    job_id TEXT NOT NULL,
    conversation_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    round INTEGER NOT NULL,
    kind TEXT NOT NULL,
    number INTEGER NOT NULL,                 -- the turn's; another turn may have it by now
    state TEXT NOT NULL,
    record TEXT NOT NULL,
    kept_for TEXT,                           -- key of the heirs, '' without a key; NULL: heirs of any key
    PRIMARY KEY (job_id, conversation_id, agent, round, number)
) STRICT, WITHOUT ROWID;

-- Memory cuts: from this turn on, its agent is shown no rounds before from_round.
CREATE TABLE memory_cuts (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    conversation_id TEXT NOT NULL,
    agent TEXT NOT NULL,                     -- '': all agents that read one text
    round INTEGER NOT NULL,
    from_round INTEGER NOT NULL,
    PRIMARY KEY (job_id, conversation_id, agent, round)
) STRICT, WITHOUT ROWID;

-- Patterns and schemas that ran out of time too often, with the turn from which on they are not tried.
CREATE TABLE given_up (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    path TEXT NOT NULL,
    pattern TEXT NOT NULL,                   -- '': a schema
    conversation_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    round INTEGER NOT NULL,
    PRIMARY KEY (job_id, path, pattern)
) STRICT, WITHOUT ROWID;

-- Webhook messages, kept until they are delivered or the retention time is over.
CREATE TABLE deliveries (
    id TEXT PRIMARY KEY,
    job_id TEXT NOT NULL,
    url TEXT NOT NULL,
    secret TEXT,                             -- name of a secret of the configuration
    body TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    next_at TEXT NOT NULL,
    last_error TEXT,
    state TEXT NOT NULL,                     -- waiting, delivered, given_up
    created_at TEXT NOT NULL
) STRICT;
CREATE INDEX deliveries_waiting ON deliveries (next_at) WHERE state = 'waiting';

-- Sums of usage; they outlive their jobs.
CREATE TABLE usage (
    day TEXT NOT NULL,                       -- day in UTC on which an attempt ended
    key_name TEXT NOT NULL,                  -- '': no key
    job_id TEXT NOT NULL,                    -- '': no job
    agent TEXT NOT NULL,                     -- '': no agent
    model TEXT NOT NULL,
    turns INTEGER NOT NULL,                  -- completed turns
    attempts INTEGER NOT NULL,               -- attempts of all turns
    prompt_tokens INTEGER NOT NULL,          -- prompts of attempts that count, cached tokens included
    cached_tokens INTEGER NOT NULL,
    answer_tokens INTEGER NOT NULL,
    wasted_tokens INTEGER NOT NULL,          -- read and written by attempts that do not count
    slot_s REAL NOT NULL,                    -- seconds on a slot
    PRIMARY KEY (day, key_name, job_id, agent, model)
) STRICT, WITHOUT ROWID;

CREATE TABLE nodes (
    id TEXT PRIMARY KEY,
    is_live INTEGER NOT NULL,
    last_write INTEGER NOT NULL DEFAULT 0,   -- number of the last group of writes that was committed
    started_at TEXT NOT NULL
) STRICT;
