"""The errors between a caller and Roundhouse, sorted by the caller's remedy.

    RoundhouseError
    ├── Unreachable         nothing was done: check the address, or wait for the service
    ├── AnswerLost          it may have been done: check whether it was
    ├── Refused             the service said no, with its code and its words
    │   ├── InvalidRequest      correct the request; ``faults`` says where
    │   ├── AccessDenied        use another key
    │   ├── NotFound            it does not exist, or no longer
    │   ├── StateConflict       its state forbids it: wait for another state, or give up
    │   ├── NotNow              try again later, after ``retry_after_s``
    │   └── ServiceFailed       Roundhouse or an engine failed; the service's log says more
    ├── AnswerMalformed     another program answered, or an incompatible Roundhouse
    ├── WaitExceeded        it did not happen in the given time
    └── WeightsError        a trainer's weights were refused, or their update failed

Errors of httpx are translated in ``drivers/exchange.py``, and nowhere else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


class RoundhouseError(Exception):
    """The base of all errors of this package."""


class Unreachable(RoundhouseError):
    """No connection was made, so nothing was done; ``cause`` says why."""

    def __init__(self, url: str, cause: str) -> None:
        super().__init__(f"no Roundhouse at {url}: {cause}")
        self.url = url
        self.cause = cause


class AnswerLost(RoundhouseError):
    """The connection broke after the request began, so it may have been done; ``cause`` says how it broke."""

    def __init__(self, url: str, cause: str) -> None:
        super().__init__(f"the answer of {url} was lost: {cause}")
        self.url = url
        self.cause = cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a request: its path and message; ``line`` in the job's text, where known."""

    path: str
    message: str
    line: int | None = None


class Refused(RoundhouseError):
    """The service answered with a problem (RFC 9457); ``document`` is the whole answer.

    ``code`` is its stable word, empty where the answer has none. ``retry_after_s`` is None where the answer names no
    time for another try.
    """

    def __init__(self, status: int, document: Mapping[str, Any], retry_after_s: float | None = None) -> None:
        error = document.get("error")  # the form on Roundhouse's paths of OpenAI's API
        inner = error if isinstance(error, dict) else {}
        self.status = status
        self.document = document
        self.code = str(document.get("code") or inner.get("code") or "")
        self.title = str(document.get("title") or f"status {status}")
        self.detail = str(document.get("detail") or inner.get("message") or f"status {status}")
        self.faults = tuple(_faults(document.get("errors")))
        self.retry_after_s = retry_after_s
        faults = (f"{fault.path}: {fault.message}" if fault.path else fault.message for fault in self.faults)
        lines = "".join(f"\n  {line}" for line in faults)
        super().__init__(f"{self.title}{lines}" if lines else self.detail)


class InvalidRequest(Refused):
    """The request is not valid: 400, 405, 413, 414, 415, 422 or 431."""


class AccessDenied(Refused):
    """The key is missing, not known, or may not do this: 401 or 403."""


class NotFound(Refused):
    """The requested thing does not exist, or no longer: 404 or 410."""


class StateConflict(Refused):
    """The state of the requested thing forbids it: 409."""


class NotNow(Refused):
    """The service cannot do it at the moment: 408, 429 or 503."""


class ServiceFailed(Refused):
    """Roundhouse or one of its engines failed: 500, 502, or a status that Roundhouse does not send."""


class AnswerMalformed(RoundhouseError):
    """The answer is not Roundhouse's, or lacks a field that this version of the client needs."""


class NothingAwaited(RoundhouseError):
    """None or several turns of a conversation wait for a caller, so the turn must be named."""


class NothingToFork(RoundhouseError):
    """A job has no such conversation, or the path of a change cannot be set."""


class WaitExceeded(RoundhouseError):
    """The wait ended without its event; ``last`` is the last state seen, if any."""

    def __init__(self, text: str, last: object = None) -> None:
        super().__init__(text)
        self.last = last


class WeightsError(RoundhouseError):
    """The service refused, or an update failed; ``code`` is the service's word, ``document`` its whole answer."""

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
    """Return the error for an answer; of the header ``retry_after`` only a number of seconds is read."""
    after_s = float(retry_after) if retry_after is not None and retry_after.isdecimal() else None
    return KINDS.get(status, ServiceFailed)(status, document if isinstance(document, dict) else {}, after_s)


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _faults(listed: object) -> list[Fault]:
    entries = listed if isinstance(listed, list) else []
    return [
        Fault(path=str(each.get("path", "")), message=str(each.get("message", "")), line=_number(each.get("line")))
        for each in entries
        if isinstance(each, dict)
    ]
