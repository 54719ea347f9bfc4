-- What is large and never changes has rows of its own: each event of a job rewrites the job's, all megabytes of it.

CREATE TABLE job_documents (
    job_id TEXT PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    document TEXT NOT NULL,                  -- the job as it was posted, JSON
    metadata TEXT NOT NULL                   -- the job's own, JSON
) STRICT;

INSERT INTO job_documents (job_id, document, metadata) SELECT id, document, metadata FROM jobs;
ALTER TABLE jobs DROP COLUMN document;
ALTER TABLE jobs DROP COLUMN metadata;
