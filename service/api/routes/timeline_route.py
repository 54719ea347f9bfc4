"""GET /v1/jobs/{id}/timeline: which attempt held which slot when, streamed in pieces."""

from collections.abc import AsyncIterator
from typing import Final

import anyio.lowlevel
from fastapi import APIRouter, Depends, Response
from starlette.responses import StreamingResponse

from service.api.door.access import CallerNow
from service.api.errors.problems import refused
from service.api.schemas import Body
from service.conversations.job import JobId
from service.conversations.states import JobState, TurnState
from service.node.node import Node


class TimelineWorker(Body):
    """A worker, and on how many rows the attempts on it lie."""

    id: str
    rows: int
    model: str | None = None
    slots: int | None = None


class TimelineState(Body):
    """A worker is in a state from a moment on."""

    worker: str
    at_s: float
    state: str
    incarnation: int
    because: str


class TimelineIncident(Body):
    """An engine broke or was killed."""

    worker: str
    at_s: float
    incarnation: int
    reason: str
    because: str
    exit: str | None = None


class TimelineAttempt(Body):
    """One attempt of a turn: it waited until ``started_s``, and held a slot from then on."""

    conversation: str
    agent: str
    round: int
    number: int
    worker: str
    incarnation: int
    outcome: TurnState
    started_s: float
    row: int = 0
    queued_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    reason: str | None = None
    detail: str | None = None
    tools: list[str] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class TimelineOut(Body):
    """A job's timeline; all times are in seconds after ``origin``."""

    id: str
    name: str
    state: JobState
    origin: str
    until_s: float
    workers: list[TimelineWorker]
    states: list[TimelineState]
    incidents: list[TimelineIncident]
    attempts: list[TimelineAttempt]


JSON: Final = "application/json"


def timeline_router(node: Node) -> APIRouter:
    """Return the route: to whom a job is another's, it is not there."""

    async def check_seen(job_id: str, caller: CallerNow) -> None:
        await node.jobs.check_seen(JobId(job_id), caller)

    router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["jobs"], dependencies=[Depends(check_seen)])

    @router.get(
        "/timeline",
        response_model=TimelineOut,
        response_model_exclude_unset=True,
        summary="See which attempt held which slot when",
        responses=refused(401, 404, 503),
    )
    async def get_timeline(job_id: str) -> Response:
        return StreamingResponse(_sent(await node.timelines.of_job(JobId(job_id))), media_type=JSON)

    return router


async def _sent(pieces: list[bytes]) -> AsyncIterator[bytes]:
    """Send piece by piece, and let everybody else have a turn between them."""
    for piece in pieces:
        yield piece
        await anyio.lowlevel.checkpoint()
