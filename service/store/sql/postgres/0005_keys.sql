-- As sqlite/0007: the name of the key that a job was posted with.

ALTER TABLE jobs ADD COLUMN key_name TEXT;
CREATE INDEX jobs_by_key ON jobs (key_name, number) WHERE key_name IS NOT NULL;
CREATE INDEX jobs_queued ON jobs (key_name) WHERE unfinished > 0;
