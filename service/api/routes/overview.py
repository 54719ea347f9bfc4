"""The dashboard's frames, as server-sent events: callers that may see the same share one encoding.

These routes are for the page only. Programs use the routes of the reference, which are stable.
"""

import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Final

import anyio
import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.responses import StreamingResponse

from roundhouse_client.values.node import Speaking, Status
from roundhouse_client.values.workers import Worker
from service import __version__
from service.api.door.access import CallerNow
from service.api.errors.problems import refused
from service.api.routes.jobs import shown_job
from service.api.routes.status import NOTHING_AWAITED, shown_status
from service.conversations.callers import Caller
from service.conversations.job.job import JobId, TurnKey
from service.conversations.job.states import ENDED_JOBS, ConversationState
from service.errors import InvalidParameter, JobNotFound, PathNotFound, StoreUnavailable
from service.node.conversation_list import MOST_TERMS, ListQuery, Order, terms_of
from service.node.glances import Glances
from service.node.model_views import look_at_models
from service.node.node import Node
from service.node.status import FEW, WORDS, speaking
from service.web.page_files import PREFIX, page_files

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
    " base-uri 'none'; frame-ancestors 'none'; form-action 'self'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # browsers revalidate each time, so an upgrade shows at once
}
INTERVAL_S: Final = 1.0  # as often as a person reads figures
REST: Final = 20.0  # least interval in times of a frame's cost: frames take a twentieth of the time at most
KEEP_ALIVE_S: Final = 15.0  # proxies close silent connections, often after 30 or 60 seconds
MOST_KEPT: Final = 64  # subjects whose last frames are kept for the next viewer
Make = Callable[[], Awaitable[tuple[bytes, bool]]]
NEWEST_JOBS: Final = 20
CONVERSATIONS: Final = 100  # conversations per page
AWAITED: Final = 100  # oldest awaited turns
REQUESTS: Final = 8  # a worker's requests that have been silent for longest; its slots count the others
LAST_PAGE: Final = 2**31
MOST_TEXT: Final = 200  # most characters of a filter


def page_router() -> APIRouter:
    """Return the routes of the page."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def read_page(request: Request) -> Response:
        return _answer("/", request)

    @router.get(PREFIX + "{name:path}")
    async def read_file(name: str, request: Request) -> Response:
        return _answer(PREFIX + name, request)

    return router


def _answer(path: str, request: Request) -> Response:
    file = page_files().get(path)
    if file is None:
        raise PathNotFound("the dashboard has no such file")
    headers = {**HEADERS, "ETag": file.tag}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if file.tag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.kind, headers=headers)


def speaking_router(node: Node) -> APIRouter:
    """Return the route."""
    router = APIRouter(prefix="/v1", tags=["status"])

    @router.get("/speaking", summary="Read the latest words of turns in flight", responses=refused(400, 401))
    async def get_speaking(
        caller: CallerNow,
        limit: Annotated[int, Query(ge=1, le=100, description="the most turns")] = FEW,
        chars: Annotated[int, Query(ge=1, le=1000, description="characters of each turn")] = WORDS,
    ) -> Speaking:
        turns, is_cut = speaking(node.scheduler, limit, chars, None if caller.sees_all else caller.sees)
        return Speaking(turns=tuple(turns), is_cut=is_cut)

    return router


class SharedFrames:
    """The frames of one subject; ``make`` returns the newest, and whether it is the last.

    The first viewer to wait makes a frame; the others wait for it, and get the same bytes.
    """

    def __init__(self, make: Make) -> None:
        self._make = make
        self._lock = anyio.Lock()
        self._frame: bytes | None = None
        self._is_last = False
        self._due_at = 0.0

    async def newest(self) -> tuple[bytes, bool]:
        """Return a frame no older than the interval, and whether it is the last; errors of ``make`` pass through.

        If a viewer leaves while it makes a frame, the next one makes it.
        """
        async with self._lock:
            began_at = anyio.current_time()
            if self._frame is None or (began_at >= self._due_at and not self._is_last):
                self._frame, self._is_last = await self._make()
                took_s = anyio.current_time() - began_at
                self._due_at = began_at + max(INTERVAL_S, REST * took_s)
            return self._frame, self._is_last

    @property
    def due_in_s(self) -> float:
        """Seconds until a newer frame may be made."""
        return max(0.0, self._due_at - anyio.current_time())

    async def follow(self, is_closed: Callable[[], bool]) -> AsyncIterator[bytes]:
        """Yield frames as they change, to the last or until ``is_closed``; after long silence, empty bytes."""
        sent, silent_since = b"", anyio.current_time()
        while not is_closed():
            frame, is_last = await self.newest()
            if frame != sent:
                sent, silent_since = frame, anyio.current_time()
                yield frame
            elif anyio.current_time() - silent_since >= KEEP_ALIVE_S:
                silent_since = anyio.current_time()
                yield b""
            if is_last:
                return
            await anyio.sleep(self.due_in_s or INTERVAL_S)


class FramesBySubject:
    """The shared frames of recent subjects; followers of an older subject keep their frames."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, SharedFrames] = OrderedDict()

    def get_or_make(self, subject: Hashable, make: Make) -> SharedFrames:
        """Return the frames of a subject, new ones of ``make`` if there are none."""
        frames = self._kept.pop(subject, None) or SharedFrames(make)
        self._kept[subject] = frames
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return frames


def overview_router(node: Node) -> APIRouter:
    """Return the routes that the page follows."""
    router = APIRouter(prefix="/v1", include_in_schema=False)
    frames, glances = FramesBySubject(), Glances(node.store, node.jobs)

    async def check_seen(job_id: str, caller: CallerNow) -> None:
        await node.jobs.check_seen(JobId(job_id), caller)

    @router.get("/overview/events")
    async def follow_overview(caller: CallerNow) -> StreamingResponse:
        viewer = caller.owner
        return await _stream(
            node, frames.get_or_make((viewer, caller.sees_all), partial(_overview, node, glances, caller))
        )

    @router.get("/overview/history")
    async def get_history(after: Annotated[float, Query(ge=0)] = 0.0) -> Response:
        points = node.past_hour.after(after)
        return Response(msgspec.json.encode({"now": time.time(), "points": points}), media_type="application/json")

    @router.get("/overview/awaited")
    async def get_awaited(caller: CallerNow) -> Response:
        turns = await glances.awaited(node.callers, caller, AWAITED)
        return Response(msgspec.json.encode({"turns": turns}), media_type="application/json")

    @router.get("/overview/models")
    async def get_models() -> Response:
        models = await look_at_models(node)
        return Response(msgspec.json.encode({"models": models}), media_type="application/json")

    @router.get("/jobs/{job_id}/overview/events", dependencies=[Depends(check_seen)])
    async def follow_job(
        job_id: str,
        wanted: Annotated[ListQuery, Depends(_wanted)],
    ) -> StreamingResponse:
        make = partial(_job, glances, JobId(job_id), wanted)
        return await _stream(node, frames.get_or_make((job_id, wanted), make))

    @router.get("/jobs/{job_id}/conversations/{conversation_id}/place", dependencies=[Depends(check_seen)])
    async def get_place(job_id: str, conversation_id: str) -> Response:
        place = await glances.place(JobId(job_id), conversation_id)
        return Response(msgspec.json.encode(place), media_type="application/json")

    return router


async def _stream(node: Node, frames: SharedFrames) -> StreamingResponse:
    """Build the first frame before the headers go out, so that an error is still an HTTP error; return the stream."""
    await frames.newest()
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_events(node, frames), media_type="text/event-stream", headers=headers)


async def _events(node: Node, frames: SharedFrames) -> AsyncIterator[bytes]:
    try:
        async for frame in frames.follow(lambda: node.jobs.watch.is_closed):
            yield b"event: frame\ndata: %b\n\n" % frame if frame else b": keep-alive\n\n"
    except (JobNotFound, StoreUnavailable):  # deleted, or the page reconnects and gets the trouble
        return
    yield b"event: %b\ndata: {}\n\n" % (b"stopping" if node.jobs.watch.is_closed else b"end")


async def _overview(node: Node, glances: Glances, caller: Caller) -> tuple[bytes, bool]:
    try:
        jobs = [shown_job(view) for view in await glances.at_newest(NEWEST_JOBS, caller)]
        unclaimed, awaited = await node.unclaimed(), await node.callers.count(caller.owner)
    except StoreUnavailable:  # the status names the trouble
        jobs, unclaimed, awaited = None, {}, NOTHING_AWAITED
    status = shown_status(node, unclaimed, caller, awaited)
    status = replace(status, workers=tuple(map(_with_few_requests, status.workers)))
    turns = _turns_of(node, status.workers)
    has_others = node.seats is not None
    can = {"updatable": sorted(node.fleet.weights), "adaptable": sorted(node.fleet.adapters)}
    return _encoded(
        status, version=__version__, jobs=jobs, sees_all=caller.sees_all, turns=turns, has_others=has_others, **can
    ), False


def _turns_of(node: Node, workers: Iterable[Worker]) -> dict[str, TurnKey]:
    """Return the turns of requests by the requests' names, for the page's links.

    A name that two turns share, since their jobs have the same name, has no link.
    """
    named = {request.job_name for worker in workers for request in worker.requests} - {""}
    if not named:
        return {}
    turns: dict[str, TurnKey] = {}
    doubled = set()
    for run in node.scheduler.turns.in_flight():
        job_id, conversation_id, agent_id, round_number = run.key
        name = f"{node.scheduler.works.job_name(job_id)}/{conversation_id}/{agent_id}/{round_number}"
        if name in turns:
            doubled.add(name)
        if name in named:
            turns[name] = run.key
    return {name: key for name, key in turns.items() if name not in doubled}


def _with_few_requests(worker: Worker) -> Worker:
    silent = sorted(worker.requests, key=lambda each: -each.evidence.silent_s)
    return replace(worker, requests=tuple(silent[:REQUESTS]))


def _encoded(status: Status, **others: object) -> bytes:
    return msgspec.json.encode({"at": datetime.now(UTC), **others, "status": status})


async def _job(glances: Glances, job_id: JobId, wanted: ListQuery) -> tuple[bytes, bool]:
    view, page = await glances.into(job_id, wanted, CONVERSATIONS)
    return msgspec.json.encode({"job": shown_job(view), "page": page}), view.stored.state in ENDED_JOBS


def _wanted(
    state: ConversationState | None = None,
    text: Annotated[str, Query(max_length=MOST_TEXT)] = "",
    order: Order = Order.POSITION,
    page: Annotated[int, Query(ge=1, le=LAST_PAGE)] = 1,
    *,
    awaited: bool = False,
    descending: bool = False,
) -> ListQuery:
    if len(terms_of(text)) > MOST_TERMS:
        raise InvalidParameter(f"text: at most {MOST_TERMS} words")
    return ListQuery(state=state, is_awaited=awaited, text=text, order=order, is_descending=descending, page=page)
