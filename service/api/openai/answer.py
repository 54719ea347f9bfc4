"""The answer to a relayed request: a stream as its engine sends it, or what is known once it is whole."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import anyio
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.api.door.writer import WRITER, BodyWriter
from service.api.errors.forms import MESSAGES, ClientError, error_of_failure
from service.scheduling.relayed.request import RelayedRequest, RelayFailure, WholeAnswer
from workers.outcome import FailureReason

EVENT_STREAM: Final = "text/event-stream"
WAITING: Final = b": waiting\n\n"
QUEUE_TIMEOUT: Final = "queue_timeout"
AGAIN_S: Final = 5
NO_PATH: Final = "File Not Found"  # llama.cpp, of a path that it has not
WORDS: Final = 500  # bytes of a refusal in a form that nobody knows
_NOT_FOUND: Final = 404
_NOT_SERVED: Final = 501
_LEAST_ERROR: Final = 400
Withdraw = Callable[[RelayedRequest, RelayFailure | None], None]
NO_STREAM: Final = RelayFailure(reason="engine_rejected", detail="a stream was asked for, and the engine sent none")


class _Error(msgspec.Struct):
    message: str = ""
    type: str = ""


class _Told(msgspec.Struct):
    error: _Error | None = None
    type: str | None = None


class RelayedAnswer:
    """An ASGI application that waits for its request; ``withdraw`` ends a request that nobody waits for any more.

    ``trouble`` tells why no worker serves its model, None where one does; ``place`` is its place in the queue, None
    where it waits no more.

    Headers are held until the engine's first byte, for ``heartbeat_s`` at most where a stream is asked for.
    """

    def __init__(
        self,
        request: RelayedRequest,
        withdraw: Withdraw,
        heartbeat_s: float,
        *,
        trouble: Callable[[], str | None],
        place: Callable[[RelayedRequest], int | None],
    ) -> None:
        self._trouble = trouble
        self._place = place
        self._request = request
        self._path = request.posted.path
        self._withdraw = withdraw
        self._heartbeat_s = heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client goes away before; however it ends, the request holds no slot afterwards."""
        scope[WRITER].on_gone(partial(self._withdraw, self._request, None))
        try:
            await self._answer(scope, receive, send)
        finally:
            self._withdraw(self._request, None)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, writer = self._request, scope[WRITER]
        has_started = await self._wait(send, writer)
        if not has_started and not request.has_begun:
            await self._whole()(scope, receive, send)
            return
        if has_started:
            place = f"worker={request.worker} wait_ms={_ms(request.waited_s)} attempts={request.attempts}"
            writer.write_nowait(b": roundhouse %b\n\n" % place.encode())
        else:
            await self._start(send, self._told())
        request.stream_to(writer.write_nowait)
        await request.changed.wait_until(lambda: request.is_over)
        error = self._last_error()
        if error is not None:
            writer.write_nowait(error.event(self._path))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _wait(self, send: Send, writer: BodyWriter) -> bool:
        """Return when there is something to answer with, and whether headers have gone out meanwhile."""
        request, posted = self._request, self._request.posted
        has_started, beat_at = False, time.monotonic() + self._heartbeat_s
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

    def _tell_waiting(self, writer: BodyWriter) -> None:
        writer.write_nowait(WAITING)
        if place := self._place(self._request):
            writer.write_nowait(b": place %d in the queue\n\n" % place)
        if trouble := self._trouble():
            writer.write_nowait(b": %b\n\n" % " ".join(trouble.split()).encode("utf-8", "replace"))

    def _is_silent(self) -> bool:
        return not (self._request.has_begun or self._request.is_over)

    async def _start(self, send: Send, headers: Mapping[str, str]) -> None:
        fields = {
            "Content-Type": self._request.content_type or EVENT_STREAM,
            "Cache-Control": "no-store",
            "X-Accel-Buffering": "no",
            **headers,
        }
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})

    def _told(self) -> dict[str, str]:
        request = self._request
        told = {
            "X-Roundhouse-Wait-Ms": str(_ms(request.waited_s)),
            "X-Roundhouse-Attempts": str(request.attempts),
        }
        return told if request.worker is None else {"X-Roundhouse-Worker": request.worker, **told}

    def _whole(self) -> Response:
        """Return the engine's answer, or the reason for its absence."""
        request = self._request
        if request.whole is not None and (request.failure is None or request.engine_refused):
            missing = _missing_path(request.whole, request.posted.model, self._path)
            if missing is not None:
                return missing.response(self._path, self._told())
            whole = request.whole
            headers = {**self._told(), "Content-Type": whole.content_type}
            error = _other_form(whole, self._path)
            return Response(whole.body, whole.status, headers) if error is None else error.response(self._path, headers)
        failure = request.failure or RelayFailure(reason="internal", detail="the engine's answer was lost")
        return error_of_failure(failure).response(self._path, self._told())

    def _last_error(self) -> ClientError | None:
        """Return the error of a failed stream, unless the engine has sent it in the stream."""
        request = self._request
        if request.failure is None:
            return None if request.has_begun else error_of_failure(NO_STREAM)
        if request.engine_refused and request.whole is not None:
            words = request.whole.body.decode("utf-8", "replace")
            return ClientError(status=request.whole.status, code=request.failure.reason, message=words)
        return None if request.has_begun and request.was_told else error_of_failure(request.failure)


async def _wait_for(changed: anyio.Event, limit_s: float | None) -> None:
    if limit_s is None:  # a scope costs more than all else of it
        await changed.wait()
        return
    with anyio.move_on_after(limit_s):
        await changed.wait()


def _timed_out(wait_s: float, trouble: str | None) -> RelayFailure:
    detail = f"no slot was free for it within {wait_s:g} s" + (f": {trouble}" if trouble else "")
    return RelayFailure(reason=QUEUE_TIMEOUT, detail=detail, after_s=AGAIN_S)


def _missing_path(whole: WholeAnswer, model: str, path: str) -> ClientError | None:
    """Return an error if the engine does not know or serve the path; other errors pass as the engine sent them.

    A 404 of its own making names its error. Stock clients would ask again three times after a 501.
    """
    if whole.status not in {_NOT_FOUND, _NOT_SERVED}:
        return None
    error = _read(whole.body).error
    if error is not None and whole.status == _NOT_FOUND and error.message != NO_PATH:
        return None
    reason = f": {error.message}" if error is not None and error.message else ""
    return ClientError(status=_NOT_FOUND, code="not_found", message=f"the engine of {model} has no {path}{reason}")


def _other_form(whole: WholeAnswer, path: str) -> ClientError | None:
    """Return an engine's refusal that is not in the form of the surface that was asked; None where it is."""
    if whole.status < _LEAST_ERROR:
        return None
    told = _read(whole.body)
    is_in_form = told.error is not None and (told.type == "error" or not path.startswith(MESSAGES))
    if is_in_form:
        return None
    words = told.error.message if told.error is not None else whole.body[:WORDS].decode("utf-8", "replace")
    return ClientError(
        status=whole.status, code=FailureReason.ENGINE_REJECTED, message=words or "the engine refuses it"
    )


def _read(body: bytes) -> _Told:
    try:
        return msgspec.json.decode(body, type=_Told)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Told()


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
