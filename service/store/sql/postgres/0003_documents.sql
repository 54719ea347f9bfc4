-- As sqlite/0005: what is large and never changes has rows of its own.

CREATE TABLE job_documents (
    job_id TEXT PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    document TEXT NOT NULL,
    metadata TEXT NOT NULL
);

INSERT INTO job_documents (job_id, document, metadata) SELECT id, document, metadata FROM jobs;
ALTER TABLE jobs DROP COLUMN document, DROP COLUMN metadata;
