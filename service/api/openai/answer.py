"""The answer to a relayed request: a stream as its engine sends it, or a whole answer or error."""

import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, Protocol

import anyio
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.api.door.writer import WRITER, BodyWriter
from service.api.errors.forms import MESSAGES, ClientError, error_of_failure
from service.conversations.job.client_request import WholeAnswer
from service.scheduling.keeping.request import RelayedRequest, RelayFailure
from transport.dialects.refusals import read_refusal
from transport.errors import UNDECODABLE
from workers.outcome import FailureReason

EVENT_STREAM: Final = "text/event-stream"
WAITING: Final = b": waiting\n\n"
QUEUE_TIMEOUT: Final = "queue_timeout"
AGAIN_S: Final = 5
# Messages for an unknown path, from llama.cpp, FastAPI, OpenAI, Go and web servers.
_NO_PATH: Final = re.compile(
    r"\A(?:\{\}|\[\]|null)\Z|\A(?:File )?Not Found\W*\Z|\A404 page not found|Invalid (?:request )?URL|<html"
    r"|no route|cannot POST",
    re.IGNORECASE,
)
WORDS: Final = 500  # most characters of a reason
_NOT_FOUND: Final = 404
_NOT_SERVED: Final = 501
_LEAST_ERROR: Final = 400
Withdraw = Callable[[RelayedRequest, RelayFailure | None], None]
NO_STREAM: Final = RelayFailure(reason="engine_rejected", detail="a stream was requested, but the engine sent none")


class _Error(msgspec.Struct):
    message: str = ""


class _ErrorFrame(msgspec.Struct):
    error: _Error | None = None
    type: str | None = None


class Recorder(Protocol):
    """Records complete answers before their clients hear the end of them."""

    async def record(self, request: RelayedRequest) -> None:
        """Store a complete answer and make it the request's; or let the request fail."""

    async def note_delivered(self, request: RelayedRequest) -> None:
        """Record that the client has the answer."""


class RelayedAnswer:
    """An ASGI application that waits for its request; ``withdraw`` ends a request that no client waits for.

    ``trouble`` gives the reason why no worker serves its model, None where one does; ``place`` gives its place in the
    queue, None once it has left the queue.

    Headers wait for the engine's first byte, for a stream ``heartbeat_s`` at most. A ``recorder`` is for requests
    whose answers are recorded.
    """

    def __init__(
        self,
        request: RelayedRequest,
        withdraw: Withdraw,
        heartbeat_s: float,
        *,
        trouble: Callable[[], str | None],
        place: Callable[[RelayedRequest], int | None],
        recorder: Recorder | None = None,
    ) -> None:
        self._trouble = trouble
        self._place = place
        self._request = request
        self._path = request.posted.path
        self._withdraw = withdraw
        self._heartbeat_s = heartbeat_s
        self._recorder = recorder

    @property
    def has_begun(self) -> bool:
        """Whether its headers are sent."""
        return self._request.has_headers

    @property
    def keeps_alive(self) -> bool:
        """Whether its client's connection stays open afterwards."""
        return self._request.keeps_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client leaves first; in any case the request holds no slot afterwards."""
        scope[WRITER].on_gone(partial(self._withdraw, self._request, None))
        scope[WRITER].request = self._request
        self._request.headers = scope["headers"]
        try:
            was_lost = await self._answer(scope, receive, send)
            if self._recorder is not None and scope[WRITER].is_whole and not was_lost:
                await self._recorder.note_delivered(self._request)
        finally:
            scope[WRITER].forget_gone()
            self._withdraw(self._request, None)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer; return whether the connection of a stream was lost before its end."""
        request, writer = self._request, scope[WRITER]
        is_resumed = request.has_headers and request.asked.has_begun
        has_started = await self._wait(send, writer)
        if self._recorder is not None and request.is_over and request.failure is None:
            await self._recorder.record(request)
        if not has_started and not request.asked.has_begun:
            await self._whole()(scope, receive, send)
            return False
        if has_started and not is_resumed:
            self._tell_worker(writer)
        elif not has_started:
            await self._start(send, self._own_headers())
        request.asked.stream_to(writer.write_nowait)
        while not await self._passes_on():
            await self._wait_for_another(writer)
            if request.worker is not None:
                self._tell_worker(writer)
        error = self._last_error()
        if error is not None:
            writer.write_nowait(error.event(self._path))
        was_lost: bool = writer.is_lost  # the end may be "sent" to it all the same
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return was_lost

    async def _passes_on(self) -> bool:
        """Return True at the end of the answer, or False once its engine has broken off."""
        request = self._request
        await request.changed.wait_until(lambda: request.is_over or request.asked.owes)
        return request.is_over

    async def _wait_for_another(self, writer: BodyWriter) -> None:
        """Keep a stream open until another engine goes on with it."""
        request, posted = self._request, self._request.posted
        if request.is_waiting:
            self._tell_waiting(writer)
        while request.asked.owes and not request.is_over:
            left_s = self._heartbeat_s
            if posted.wait_s is not None and request.is_waiting:
                if request.waited_s >= posted.wait_s:
                    self._withdraw(request, _timed_out(posted.wait_s, self._trouble()))
                    break
                left_s = min(left_s, posted.wait_s - request.waited_s)
            changed = request.changed.next
            await _wait_for(changed, left_s)
            if not changed.is_set():
                self._tell_waiting(writer)

    async def _wait(self, send: Send, writer: BodyWriter) -> bool:
        """Wait until there is something to send; return whether headers have gone out meanwhile."""
        request, posted = self._request, self._request.posted
        has_started, beat_at = request.has_headers, time.monotonic() + self._heartbeat_s
        while self._is_silent():
            changed, left_s = request.changed.next, None
            if request.is_waiting and posted.wait_s is not None:
                left_s = posted.wait_s - request.waited_s
                if left_s <= 0:
                    self._withdraw(request, _timed_out(posted.wait_s, self._trouble()))
                    break
            if posted.is_streamed:
                beat_s = beat_at - time.monotonic()
                left_s = beat_s if left_s is None else min(left_s, beat_s)
            await _wait_for(changed, left_s)
            if posted.is_streamed and self._is_silent() and time.monotonic() >= beat_at:
                if not has_started:
                    await self._start(send, {})
                    has_started = True
                self._tell_waiting(writer)
                beat_at = time.monotonic() + self._heartbeat_s
        return has_started

    def _tell_worker(self, writer: BodyWriter) -> None:
        request = self._request
        place = f"worker={request.worker} wait_ms={_ms(request.waited_s)} attempts={request.attempts}"
        writer.write_nowait(b": roundhouse %b\n\n" % place.encode())

    def _tell_waiting(self, writer: BodyWriter) -> None:
        writer.write_nowait(WAITING)
        if place := self._place(self._request):
            writer.write_nowait(b": place %d in the queue\n\n" % place)
        if trouble := self._trouble():
            writer.write_nowait(b": %b\n\n" % " ".join(trouble.split()).encode("utf-8", "replace"))

    def _is_silent(self) -> bool:
        return not (self._request.asked.has_begun or self._request.is_over)

    async def _start(self, send: Send, headers: Mapping[str, str]) -> None:
        self._request.has_headers = True
        fields = {
            "Content-Type": self._request.asked.content_type or EVENT_STREAM,
            "Cache-Control": "no-store",
            "X-Accel-Buffering": "no",
            **headers,
        }
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})

    def _own_headers(self) -> dict[str, str]:
        request = self._request
        headers = {
            "X-Roundhouse-Wait-Ms": str(_ms(request.waited_s)),
            "X-Roundhouse-Attempts": str(request.attempts),
        }
        return headers if request.worker is None else {"X-Roundhouse-Worker": request.worker, **headers}

    def _whole(self) -> Response:
        """Return the engine's answer, or the reason for its absence."""
        request = self._request
        if request.asked.whole is not None and (request.failure is None or request.engine_refused):
            missing = _missing_path(request.asked.whole, request.posted.model, self._path)
            if missing is not None:
                return missing.response(self._path, self._own_headers())
            whole = request.asked.whole
            headers = {**self._own_headers(), "Content-Type": whole.content_type}
            error = _other_form(whole, self._path)
            return Response(whole.body, whole.status, headers) if error is None else error.response(self._path, headers)
        failure = request.failure or RelayFailure(reason="internal", detail="the engine's answer was lost")
        return error_of_failure(failure).response(self._path, self._own_headers())

    def _last_error(self) -> ClientError | None:
        """Return the error of a failed stream, unless the engine sent it in the stream."""
        request = self._request
        if request.failure is None:
            return None if request.asked.has_begun else error_of_failure(NO_STREAM)
        if request.engine_refused and request.asked.whole is not None:
            words = read_refusal(request.asked.whole.body).message
            return ClientError(status=request.asked.whole.status, code=request.failure.reason, message=words)
        return None if request.was_told and request.asked.shows_error else error_of_failure(request.failure)


async def _wait_for(changed: anyio.Event, limit_s: float | None) -> None:
    if limit_s is None:  # a cancel scope would cost more than the wait itself
        await changed.wait()
        return
    with anyio.move_on_after(limit_s):
        await changed.wait()


def _timed_out(wait_s: float, trouble: str | None) -> RelayFailure:
    detail = f"no slot was free within {wait_s:g} s" + (f": {trouble}" if trouble else "")
    return RelayFailure(reason=QUEUE_TIMEOUT, detail=detail, after_s=AGAIN_S)


def _missing_path(whole: WholeAnswer, model: str, path: str) -> ClientError | None:
    """Return an error if the engine does not know or serve the path; other errors keep the engine's words.

    Stock clients would try three times after a 501.
    """
    if whole.status not in {_NOT_FOUND, _NOT_SERVED}:
        return None
    words = read_refusal(whole.body).message if whole.body.strip() else ""
    if whole.status == _NOT_FOUND and words and _NO_PATH.search(words) is None:
        return None
    reason = f": {words[:WORDS]}" if whole.status == _NOT_SERVED and words else ""
    return ClientError(status=_NOT_FOUND, code="not_found", message=f"the engine of {model} has no {path}{reason}")


def _other_form(whole: WholeAnswer, path: str) -> ClientError | None:
    """Return an engine's refusal if it is not in the form of the requested API, else None."""
    if whole.status < _LEAST_ERROR or _is_in_form(whole.body, path):
        return None
    words = read_refusal(whole.body).message if whole.body.strip() else "the engine refused it without a reason"
    return ClientError(status=whole.status, code=FailureReason.ENGINE_REJECTED, message=words)


def _is_in_form(body: bytes, path: str) -> bool:
    try:
        frame = msgspec.json.decode(body, type=_ErrorFrame)
    except UNDECODABLE:
        return False
    return bool(frame.error and frame.error.message) and (frame.type == "error" or not path.startswith(MESSAGES))


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
