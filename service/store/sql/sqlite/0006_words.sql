-- What Roundhouse says around a job's own words, once for all conversations that it is said in; a conversation that had
-- begun before has none, and is told what it was told before.

CREATE TABLE wordings (
    digest TEXT PRIMARY KEY,                 -- of the words
    words TEXT NOT NULL                      -- JSON, by model
) STRICT, WITHOUT ROWID;

ALTER TABLE conversations ADD COLUMN began_at TEXT;                     -- with its zone: the clock that it is told
ALTER TABLE conversations ADD COLUMN wording TEXT REFERENCES wordings (digest);
