"""The errors between us and one engine.

    EngineError
    ├── EngineUnreachable      no connection, or it broke before an answer began
    ├── CannotAsk              we have no descriptor, port or memory left for a connection; the engine is not to blame
    ├── EngineTimeout          the engine did not connect or answer a probe in time
    ├── EngineRejected         the engine refused (a status, or an error inside a 200 stream)
    │   ├── EngineOverloaded   429 or 503: not now, perhaps later
    │   ├── ContextOverflow    the prompt is longer than the slot's context
    │   ├── CacheFull          the KV cache that its requests share has no room left for all of them
    │   └── RequestAtFault     the same request was refused twice in the same words, while others were served
    └── EngineProtocolError    the answer breaks the protocol
        ├── MalformedFrame     not HTTP, not SSE, or not the expected JSON
        │   └── UnreadableFrame  a frame or a body that is neither an answer nor an error
        ├── FrameTooLarge      one event larger than the cap
        ├── AnswerTooLarge     an answer over the cap; asking again would bring the same
        └── TruncatedStream    the stream ended before the engine said that it was finished

Foreign errors (OSError, httptools, msgspec, httpx) are translated where they occur, with the cause chained.
"""

from http import HTTPStatus
from typing import Final

import msgspec

UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # msgspec raises all three
MOST_CAUSES: Final = 8  # longest chain of causes that is cleaned


class EngineError(Exception):
    """Something between us and the engine failed."""


class EngineUnreachable(EngineError):
    """No connection to the engine, or it broke before an answer began; ``is_refused`` if nothing listens there."""

    def __init__(self, text: str, *, is_refused: bool = False) -> None:
        super().__init__(text)
        self.is_refused = is_refused


class CannotAsk(EngineError):
    """We cannot open a connection; the engine is not to blame."""


class EngineTimeout(EngineError):
    """The engine did not do ``waited_for`` in time."""

    def __init__(self, waited_for: str, limit_s: float) -> None:
        super().__init__(f"no {waited_for} within {limit_s:g} s")
        self.waited_for = waited_for
        self.limit_s = limit_s


class EngineRejected(EngineError):
    """The engine refused the request, before the stream or inside it."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(f"{status} {kind}: {message}" if kind else f"{status}: {message}")
        self.status = status
        self.kind = kind
        self.message = message

    @property
    def is_about_the_request(self) -> bool:
        """Whether the request itself is at fault, so that sending it again cannot help."""
        return 400 <= self.status < 500 and self.status != HTTPStatus.REQUEST_TIMEOUT  # noqa: PLR2004 - client errors


class EngineOverloaded(EngineRejected):
    """The engine cannot take the request now: 429, or 503 while it loads."""

    def __init__(self, status: int, kind: str, message: str, retry_after_s: float | None) -> None:
        super().__init__(status, kind, message)
        self.retry_after_s = retry_after_s

    @property
    def is_about_the_request(self) -> bool:
        """False: the same request may be taken a moment later."""
        return False


class ContextOverflow(EngineRejected):
    """The prompt does not fit the context of one slot."""


class CacheFull(EngineRejected):
    """The KV cache that requests share is full: the engine ends all of them, large and small."""


class RequestAtFault(EngineRejected):
    """The engine always refuses this request while it serves others; ``status`` marks it as the client's fault.

    llama.cpp answers 500 if its chat template refuses a request; ``answer`` is that answer.
    """

    def __init__(self, kind: str, message: str, answer: str) -> None:
        super().__init__(HTTPStatus.BAD_REQUEST, kind, message)
        self.args = (answer,)


class EngineProtocolError(EngineError):
    """The engine's answer breaks the protocol."""


class MalformedFrame(EngineProtocolError):
    """Bytes that are not HTTP, not SSE, or not the dialect's JSON."""


class UnreadableFrame(MalformedFrame):
    """A frame or body that cannot be read; the same request would bring it again."""


class FrameTooLarge(EngineProtocolError):
    """One event grew past the cap on a frame."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"one event is larger than {limit_bytes} bytes")
        self.limit_bytes = limit_bytes


class AnswerTooLarge(EngineProtocolError):
    """The answer grew past the cap on one answer; asking again would bring the same."""


class TruncatedStream(EngineProtocolError):
    """The stream ended before the engine said that it was finished."""


def without_frames(error: EngineError) -> EngineError:
    """Return an error, and its causes, without the frames in which they were raised.

    Those frames hold the bytes received, up to 16 MiB, and hold the error in a cycle until the collector runs.
    """
    each: BaseException | None = error
    for _ in range(MOST_CAUSES):
        if each is None:
            break
        each = each.with_traceback(None).__cause__ or each.__context__
    return error
