-- The name of the key that a job was posted with; one of before, or posted without keys, is nobody's.

ALTER TABLE jobs ADD COLUMN key_name TEXT;
CREATE INDEX jobs_by_key ON jobs (key_name, number) WHERE key_name IS NOT NULL;
CREATE INDEX jobs_queued ON jobs (key_name) WHERE unfinished > 0;
