-- As sqlite/0006: what Roundhouse says around a job's own words.

CREATE TABLE wordings (
    digest TEXT PRIMARY KEY,
    words TEXT NOT NULL
);

ALTER TABLE conversations ADD COLUMN began_at TEXT, ADD COLUMN wording TEXT REFERENCES wordings (digest);
