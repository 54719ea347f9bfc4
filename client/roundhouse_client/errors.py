"""The errors between a caller and Roundhouse, sorted by what the caller does about them.

    RoundhouseError
    ├── Unreachable         nothing was done: look at the address, or wait for the service
    ├── AnswerLost          it may have been done: look whether it was
    ├── Refused             the service said no, with its code and its words
    │   ├── InvalidRequest      mend the request; ``faults`` says where
    │   ├── AccessDenied        give another key
    │   ├── NotFound            it is not there, or no more
    │   ├── StateConflict       its state is against it: wait for another, or give it up
    │   ├── NotNow              the same passes later, after ``retry_after_s``
    │   └── ServiceFailed       Roundhouse or an engine failed at it; the service's log says more
    ├── AnswerMalformed     what answered is not Roundhouse, or one with other answers
    ├── WaitExceeded        it has not happened in the time that was given
    └── WeightsError        a trainer's weights were refused, or have failed

Errors of httpx are translated in ``drivers/exchange.py``, and nowhere else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


class RoundhouseError(Exception):
    """The base of everything that this package raises."""


class Unreachable(RoundhouseError):
    """No connection came about, so nothing was done; ``cause`` says why."""

    def __init__(self, url: str, cause: str) -> None:
        super().__init__(f"no Roundhouse at {url}: {cause}")
        self.url = url
        self.cause = cause


class AnswerLost(RoundhouseError):
    """The connection broke after the request had begun, so it may have been done; ``cause`` says how it broke."""

    def __init__(self, url: str, cause: str) -> None:
        super().__init__(f"the answer of {url} was lost: {cause}")
        self.url = url
        self.cause = cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong with a request: where, and what; ``line`` of the job's text, where it is known."""

    path: str
    message: str
    line: int | None = None


class Refused(RoundhouseError):
    """The service answered with a problem (RFC 9457); ``document`` is all that it said.

    ``code`` is its stable word, and empty where what answered has none. ``retry_after_s`` is None where it names no
    time after which the same may pass.
    """

    def __init__(self, status: int, document: Mapping[str, Any], retry_after_s: float | None = None) -> None:
        self.status = status
        self.document = document
        self.code = str(document.get("code") or "")
        self.title = str(document.get("title") or f"status {status}")
        self.detail = str(document.get("detail") or f"status {status}")
        self.faults = tuple(_faults(document.get("errors")))
        self.retry_after_s = retry_after_s
        told = (f"{fault.path}: {fault.message}" if fault.path else fault.message for fault in self.faults)
        lines = "".join(f"\n  {line}" for line in told)
        super().__init__(f"{self.title}{lines}" if lines else self.detail)


class InvalidRequest(Refused):
    """The request cannot be taken as it is: 400, 405, 413, 414, 415, 422 or 431."""


class AccessDenied(Refused):
    """The key is missing, not known, or may not do this: 401 or 403."""


class NotFound(Refused):
    """The thing that was asked for is not there, or no more: 404 or 410."""


class StateConflict(Refused):
    """The state of what was asked for is against it: 409."""


class NotNow(Refused):
    """The service cannot do it at the moment: 408, 429 or 503."""


class ServiceFailed(Refused):
    """Roundhouse or one of its engines failed: 500, 502, or a status that Roundhouse does not send."""


class AnswerMalformed(RoundhouseError):
    """The answer is not Roundhouse's, or lacks a field that this version of the client needs."""


class NothingAwaited(RoundhouseError):
    """Not exactly one turn of a conversation is awaited, so it has to be named."""


class NothingToFork(RoundhouseError):
    """A job has no such conversation, or a path leads nowhere in it."""


class WaitExceeded(RoundhouseError):
    """The wait is over without its event; ``last`` is what was seen last, if anything was."""

    def __init__(self, text: str, last: object = None) -> None:
        super().__init__(text)
        self.last = last


class WeightsError(RoundhouseError):
    """The service refused, or an update has failed; ``code`` is the service's word, ``document`` all that it said."""

    def __init__(self, text: str, code: str, document: Mapping[str, Any]) -> None:
        super().__init__(text)
        self.code = code
        self.document = document


KINDS: Final[Mapping[int, type[Refused]]] = {
    **dict.fromkeys((400, 405, 413, 414, 415, 422, 431), InvalidRequest),
    **dict.fromkeys((401, 403), AccessDenied),
    **dict.fromkeys((404, 410), NotFound),
    409: StateConflict,
    **dict.fromkeys((408, 429, 503), NotNow),
}


def refusal(status: int, document: object, retry_after: str | None = None) -> Refused:
    """Return the error that an answer stands for; ``retry_after`` is the header, of which only seconds are read."""
    after_s = float(retry_after) if retry_after is not None and retry_after.isdecimal() else None
    return KINDS.get(status, ServiceFailed)(status, document if isinstance(document, dict) else {}, after_s)


def _number(told: object) -> int | None:
    return told if isinstance(told, int) else None


def _faults(listed: object) -> list[Fault]:
    entries = listed if isinstance(listed, list) else []
    return [
        Fault(path=str(each.get("path", "")), message=str(each.get("message", "")), line=_number(each.get("line")))
        for each in entries
        if isinstance(each, dict)
    ]
