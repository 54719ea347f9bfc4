"""The fields of log lines about a job, a conversation or a turn."""

from service.conversations.job.job import JobId, TurnKey

Fields = dict[str, str | int]


def of_job(job_id: JobId) -> Fields:
    """Return the fields of a line about a job."""
    return {"job": job_id}


def of_turn(key: TurnKey, worker: str | None = None, incarnation: int | None = None) -> Fields:
    """Return the fields of a line about a turn, with its worker if it is on one."""
    fields: Fields = {
        "job": key.job_id,
        "conversation": key.conversation_id,
        "agent": key.agent_id,
        "round": key.round,
    }
    if worker is not None:
        fields["worker"] = worker
    if incarnation is not None:
        fields["incarnation"] = incarnation
    return fields
