-- As sqlite/0008: what turns have used, summed.

CREATE TABLE usage (
    day TEXT NOT NULL,
    key_name TEXT NOT NULL,
    job_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    model TEXT NOT NULL,
    turns BIGINT NOT NULL,
    attempts BIGINT NOT NULL,
    prompt_tokens BIGINT NOT NULL,
    cached_tokens BIGINT NOT NULL,
    answer_tokens BIGINT NOT NULL,
    wasted_tokens BIGINT NOT NULL,
    slot_s DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (day, key_name, job_id, agent, model)
);
