"""What the dashboard watches, as server-sent events: one encoding for all who may see the same.

These routes are the page's own. Programs use the routes of the reference, which promise to stay.
"""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Depends, Query, Response
from starlette.responses import StreamingResponse

from service import __version__
from service.api import status_schemas
from service.api.door.access import CallerNow
from service.api.jobs import job_document
from service.api.shared_frames import FramesBySubject, SharedFrames
from service.api.status import status_document
from service.conversations.callers import Caller
from service.conversations.job import JobId
from service.conversations.states import ENDED_JOBS, ConversationState
from service.conversations.transcript import rfc3339
from service.errors import JobNotFound, StoreUnavailable
from service.node.glances import Glances
from service.node.node import Node

NEWEST_JOBS: Final = 20
CONVERSATIONS: Final = 100  # a page
REQUESTS: Final = 8  # of a worker, those that have been silent for longest; its slots count the others
LAST_POSITION: Final = 2**31


def overview_router(node: Node) -> APIRouter:
    """Return the routes that the page follows."""
    router = APIRouter(prefix="/v1", include_in_schema=False)
    frames, glances = FramesBySubject(), Glances(node.store, node.jobs)

    async def check_seen(job_id: str, caller: CallerNow) -> None:
        await node.jobs.check_seen(JobId(job_id), caller)

    @router.get("/overview/events")
    async def follow_overview(caller: CallerNow) -> StreamingResponse:
        viewer = None if caller.sees_all else caller.name
        return await _stream(node, frames.of((viewer, caller.sees_all), partial(_overview, node, glances, caller)))

    @router.get("/jobs/{job_id}/overview/events", dependencies=[Depends(check_seen)])
    async def follow_job(
        job_id: str,
        state: ConversationState | None = None,
        after: Annotated[int, Query(ge=-1, le=LAST_POSITION)] = -1,
    ) -> StreamingResponse:
        make = partial(_job, glances, JobId(job_id), state, after)
        return await _stream(node, frames.of((job_id, state, after), make))

    @router.get("/jobs/{job_id}/conversations/{conversation_id}/place", dependencies=[Depends(check_seen)])
    async def get_place(job_id: str, conversation_id: str) -> Response:
        place = await glances.place(JobId(job_id), conversation_id)
        return Response(msgspec.json.encode(place), media_type="application/json")

    return router


async def _stream(node: Node, frames: SharedFrames) -> StreamingResponse:
    """Return what is followed; the first frame is made before the answer begins, so that its errors are answers."""
    await frames.newest()
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_events(node, frames), media_type="text/event-stream", headers=headers)


async def _events(node: Node, frames: SharedFrames) -> AsyncIterator[bytes]:
    try:
        async for frame in frames.follow(lambda: node.jobs.watch.is_closed):
            yield b"event: frame\ndata: %b\n\n" % frame if frame else b": keep-alive\n\n"
    except (JobNotFound, StoreUnavailable):  # it was deleted, or the page asks again and is told the trouble
        return
    yield b"event: %b\ndata: {}\n\n" % (b"stopping" if node.jobs.watch.is_closed else b"end")


async def _overview(node: Node, glances: Glances, caller: Caller) -> tuple[bytes, bool]:
    try:
        jobs = [job_document(view) for view in await glances.at_newest(NEWEST_JOBS, caller)]
        unclaimed = await node.unclaimed()
    except StoreUnavailable:  # the status names the trouble
        jobs, unclaimed = None, {}
    status = status_document(node, unclaimed, caller)
    for worker in status.workers:
        worker.requests = sorted(worker.requests, key=lambda each: -each.evidence.silent_s)[:REQUESTS]
    can = {"updatable": sorted(node.fleet.weights), "adaptable": sorted(node.fleet.adapters)}
    return _encoded(status, version=__version__, jobs=jobs, sees_all=caller.sees_all, **can), False


def _encoded(status: status_schemas.StatusOut, **others: object) -> bytes:
    head = msgspec.json.encode({"at": rfc3339(datetime.now(UTC)), **others})
    return head[:-1] + b',"status":' + status.model_dump_json().encode() + b"}"


async def _job(glances: Glances, job_id: JobId, state: ConversationState | None, after: int) -> tuple[bytes, bool]:
    view, listed = await glances.into(job_id, state, after, CONVERSATIONS + 1)
    heads = await glances.prompt_heads(job_id)
    shown = [
        {
            "id": each.id,
            "position": each.position,
            "state": each.state,
            "reason": each.reason,
            "turns": each.ended_turns,
            "prompt": heads[each.position],
        }
        for each in listed[:CONVERSATIONS]
    ]
    more = listed[CONVERSATIONS - 1].position if len(listed) > CONVERSATIONS else None
    document = {"job": job_document(view), "conversations": shown, "next_after": more}
    return msgspec.json.encode(document), view.stored.state in ENDED_JOBS
