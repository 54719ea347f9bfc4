-- A turn may be a summary: beside an agent's turn of a round, of what was said before it.

ALTER TABLE turns ADD COLUMN kind TEXT NOT NULL DEFAULT 'turn';         -- turn, summary
ALTER TABLE turns DROP CONSTRAINT turns_job_id_conversation_id_agent_round_key;
ALTER TABLE turns ADD UNIQUE (job_id, conversation_id, agent, round, kind);
