"""A running job: server-sent events, numbered ones that are stored and progress between them; and its timeline."""

from collections.abc import AsyncIterator, Sequence
from typing import Final

import anyio
import anyio.lowlevel
import msgspec
from fastapi import APIRouter, Depends, Response
from starlette.responses import StreamingResponse

from service.api.door.access import CallerNow
from service.api.errors.problems import refused
from service.conversations.job.job import JobId
from service.conversations.record.transcript import rfc3339
from service.errors import JobNotFound
from service.node.jobs import Jobs
from service.node.node import Node
from service.scheduling.turn_record import Progress
from service.store.records import StoredEvent
from workers.lanes.swap_log import Swap

PROGRESS_INTERVAL_S: Final = 0.5  # as often as a person reads; progress in between is merged
KEEP_ALIVE_S: Final = 15.0  # proxies close silent connections, often after 30 or 60 seconds
JSON: Final = "application/json"


async def follow(jobs: Jobs, job_id: JobId, after: int) -> StreamingResponse:
    """Return the events of a job after number ``after``, up to its end.

    The watcher reads the store at its own pace: a slow one delays no other and loses nothing.

    Raises:
        JobNotFound: there is no such job.
    """
    await jobs.events_after(job_id, after)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_events(jobs, job_id, after), media_type="text/event-stream", headers=headers)


async def _events(jobs: Jobs, job_id: JobId, after: int) -> AsyncIterator[bytes]:
    reported: Sequence[Progress] = ()
    silent_s = 0.0
    sent = [swap.number for swap in jobs.swaps(job_id)]  # earlier swaps are not news
    while not jobs.watch.is_closed:
        change = jobs.watch.next_change(job_id)
        try:
            events, is_over = await jobs.events_after(job_id, after)
        except JobNotFound:
            return  # deleted meanwhile
        if events:
            if events[0].number > after + 1:
                yield _gap(after + 1, events[0].number - 1)
            after = events[-1].number
            silent_s = 0.0
            yield b"".join(map(_frame, events))
        if is_over:
            return
        if events:
            continue
        with anyio.move_on_after(PROGRESS_INTERVAL_S):
            await change.wait()
        swaps = [swap for swap in jobs.swaps(job_id) if swap.number not in sent]
        sent += [swap.number for swap in swaps]
        if swaps:
            yield b"".join(map(_swap_frame, swaps))
        progress = jobs.progress(job_id)
        silent_s += PROGRESS_INTERVAL_S
        if progress != reported:
            reported, silent_s = progress, 0.0
            yield b"event: progress\ndata: %s\n\n" % msgspec.json.encode({"turns": [_turn(turn) for turn in progress]})
        elif silent_s >= KEEP_ALIVE_S:
            silent_s = 0.0
            yield b": keep-alive\n\n"


def _frame(event: StoredEvent) -> bytes:
    return f"id: {event.number}\nevent: {event.kind}\ndata: {event.data}\n\n".encode()


def _gap(first: int, last: int) -> bytes:
    """Return the frame for events that are gone: only a job's newest are kept."""
    return b"event: gap\ndata: %s\n\n" % msgspec.json.encode({"first": first, "last": last})


def _swap_frame(swap: Swap) -> bytes:
    return b"event: swap\ndata: %s\n\n" % msgspec.json.encode(swap_document(swap))


def swap_document(swap: Swap) -> dict[str, object]:
    """Return the JSON of a model's load on a lane."""
    return {
        "lane": swap.lane,
        "model": swap.model,
        "left": swap.left,
        "because": swap.because,
        "seconds": round(swap.seconds, 3),
        "at": rfc3339(swap.at),
    }


def _turn(progress: Progress) -> dict[str, object]:
    return {
        "conversation": progress.key.conversation_id,
        "agent": progress.key.agent_id,
        "round": progress.key.round,
        "prompt_tokens_done": progress.prompt_tokens_done,
        "prompt_tokens": progress.prompt_tokens,
        "output_tokens": progress.output_tokens,
        "tokens_per_s": round(progress.tokens_per_s, 1),
        "verdict": progress.verdict,
        "silent_s": progress.silent_s,
        "silence_limit_s": progress.silence_limit_s,
    }


def timeline_router(node: Node) -> APIRouter:
    """Return the route; another key's job is a 404."""

    async def check_seen(job_id: str, caller: CallerNow) -> None:
        await node.jobs.check_seen(JobId(job_id), caller)

    router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["jobs"], dependencies=[Depends(check_seen)])

    @router.get(
        "/timeline",
        response_class=StreamingResponse,
        summary="See which attempt used which slot, and when",
        responses={
            200: {"content": {JSON: {"schema": {"$ref": "#/components/schemas/Timeline"}}}},
            **refused(401, 404, 503),
        },
    )
    async def get_timeline(job_id: str) -> Response:
        return StreamingResponse(_sent(await node.timelines.of_job(JobId(job_id))), media_type=JSON)

    return router


async def _sent(pieces: list[bytes]) -> AsyncIterator[bytes]:
    """Send piece by piece, and let other tasks run in between."""
    for piece in pieces:
        yield piece
        await anyio.lowlevel.checkpoint()
