"""Calls that post, read, end and delete jobs."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final, Literal, TypeVar

from roundhouse_client.decoding import decode, parse
from roundhouse_client.request import (
    JSON,
    NDJSON,
    Call,
    Request,
    as_nothing,
    as_text,
    encoded,
    get,
    into,
    place,
    post,
)
from roundhouse_client.values.job_document import JobDocument
from roundhouse_client.values.jobs import BatchLine, Deliveries, Job, JobPage
from roundhouse_client.values.rollout_rows import StoredReward
from roundhouse_client.values.transcripts import AskedPrompts, AwaitedTurns, Transcript

T = TypeVar("T")
JOBS: Final = "/v1/jobs"


def post_job(
    job: JobDocument | Mapping[str, object], *, idempotency_key: str | None = None, queue: bool = True
) -> Call[Job]:
    """Post a job; it is durable when this returns.

    With an ``idempotency_key`` the job is posted once, however often it is sent, so passing failures are retried.
    Without one it is sent once: after ``AnswerLost`` it may have been posted or not. With ``queue`` false it is refused
    unless every first turn can start at once.

    Raises:
        InvalidRequest: ``faults`` lists everything that is wrong with the job.
        StateConflict: the key is another job's (``idempotency_conflict``).
        NotNow: with ``queue`` false, a first turn would have to wait (``no_slot_available``).
    """
    return _posting(encoded(job), JSON, into(Job), idempotency_key, queue=queue)


def post_jobs(
    jobs: Iterable[JobDocument | Mapping[str, object]], *, idempotency_key: str | None = None
) -> Call[tuple[BatchLine, ...]]:
    """Post many jobs in one request; return the result of each, in order. Each is accepted or refused by itself.

    An ``idempotency_key`` applies to each line.

    Raises:
        InvalidRequest: the whole batch is refused.
    """
    body = b"\n".join(map(encoded, jobs))
    return _posting(body, NDJSON, _batch_lines, idempotency_key)


def _posting(
    body: bytes, media_type: str, read: Callable[[bytes], T], key: str | None, *, queue: bool = True
) -> Call[T]:
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ValueError(f"idempotency_key: {key!r} is not plain ASCII text, which a header needs")
    headers = {"Content-Type": media_type} | ({} if key is None else {"Idempotency-Key": key})
    query = {} if queue else {"queue": False}
    request = Request(method="POST", path=JOBS, query=query, headers=headers, body=body)
    return Call(request=request, read=read, is_repeatable=key is not None)


def _batch_lines(body: bytes) -> tuple[BatchLine, ...]:
    return tuple(decode(BatchLine, parse(line)) for line in body.split(b"\n") if line)


def list_jobs(*, state: str | None = None, limit: int = 100, cursor: str | None = None) -> Call[JobPage]:
    """Return a page of jobs, the newest first, at most 1,000; ``cursor`` is the previous page's ``next_cursor``."""
    return get(JOBS, into(JobPage), state=state, limit=limit, cursor=cursor)


def get_job(job_id: str, *, wait_s: float | None = None) -> Call[Job]:
    """Return a job; with ``wait_s``, at most 60, once it has ended or after that time.

    Raises:
        NotFound: there is no such job.
    """
    return get(JOBS + place(job_id), into(Job), wait_s=wait_s)


def cancel_job(job_id: str) -> Call[Job]:
    """End a job early; what was said is kept. It is durable when this returns, and the job ends soon after.

    Raises:
        NotFound: there is no such job.
    """
    return post(f"{JOBS}{place(job_id)}/cancel", into(Job))


def delete_job(job_id: str, *, heirs: Literal["keep", "drop"] = "keep") -> Call[None]:
    """Delete an ended job from the store.

    Turns that conversations of the same key have inherited from it are kept for them, or their jobs are dropped too.

    Raises:
        StateConflict: it has not ended, or a job to drop has not.
        NotFound: there is no such job.
    """
    query = {} if heirs == "keep" else {"heirs": heirs}
    return Call(request=Request(method="DELETE", path=JOBS + place(job_id), query=query), read=as_nothing)


def get_conversation(job_id: str, conversation_id: str) -> Call[Transcript]:
    """Return a transcript so far, with the words so far of turns in flight.

    Raises:
        NotFound: there is no such job or conversation.
    """
    return get(f"{JOBS}{place(job_id)}/conversations{place(conversation_id)}", into(Transcript))


def get_prompts(
    job_id: str, conversation_id: str, agent: str, round_number: int, *, kind: Literal["turn", "summary"] = "turn"
) -> Call[AskedPrompts]:
    """Return the exact prompts of a turn, or of its summary, one per attempt; rounds count from 0.

    Raises:
        NotFound: there is no such turn.
    """
    turn = place("conversations", conversation_id, "turns", agent, round_number)
    return get(f"{JOBS}{place(job_id)}{turn}/prompt", into(AskedPrompts), kind=None if kind == "turn" else kind)


def awaited(
    job_id: str | None = None, conversation_id: str | None = None, *, limit: int = 100, after: int = 0
) -> Call[AwaitedTurns]:
    """Return turns that wait for a caller, the oldest first, after the first ``after``: of a job, or of all.

    A ``conversation_id`` restricts them to that conversation of the job.

    Raises:
        NotFound: there is no such job or conversation.
        ValueError: a conversation is given without a job.
    """
    if job_id is None and conversation_id is not None:
        raise ValueError(f"conversation_id: {conversation_id!r} is of a job; give its job_id")
    path = "/v1/awaited" if job_id is None else f"{JOBS}{place(job_id)}/awaited"
    return get(path, into(AwaitedTurns), conversation=conversation_id, limit=limit, after=after)


def get_document(job_id: str, conversations: str = "all") -> Call[str]:
    """Return the JSON of a job as posted, with ``all`` conversations, ``none``, or those in one state.

    Raises:
        NotFound: there is no such job.
    """
    return get(f"{JOBS}{place(job_id)}/document", as_text, conversations=conversations)


def get_timeline(job_id: str) -> Call[str]:
    """Return the JSON of the job's attempts on slots over time; for a large job it is megabytes.

    Raises:
        NotFound: there is no such job.
    """
    return get(f"{JOBS}{place(job_id)}/timeline", as_text)


def post_reward(
    job_id: str,
    conversation_id: str,
    reward: float,
    *,
    agent: str | None = None,
    metrics: Mapping[str, float] | None = None,
) -> Call[StoredReward]:
    """Give a conversation, or one agent in it, its reward; it is durable when this returns. The same again is no error.

    Raises:
        StateConflict: there is another reward (``reward_conflict``).
        InvalidRequest: the job has no such conversation or agent.
        NotFound: there is no such job.
    """
    about = {"agent": agent, "metrics": metrics}
    document = {"conversation": conversation_id, "reward": reward}
    document |= {name: value for name, value in about.items() if value is not None}
    return replace(post(f"{JOBS}{place(job_id)}/rewards", into(StoredReward), document), is_repeatable=True)


def get_deliveries(job_id: str) -> Call[Deliveries]:
    """Return the state of each message to the job's webhook.

    Raises:
        NotFound: there is no such job.
    """
    return get(f"{JOBS}{place(job_id)}/deliveries", into(Deliveries))
