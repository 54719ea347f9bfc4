"""The subject of log lines that are written here and now: a job's turn, a worker, or neither.

Kept beside the messages, so that nobody has to read it out of them. A task that is started takes on what its starter's
lines concern, until it says otherwise.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar

Fields = Mapping[str, str | int]
Concerns = Callable[[], Fields]


def _nothing() -> Fields:
    return {}


_concerns: ContextVar[Concerns] = ContextVar("concerns", default=_nothing)


class about:  # noqa: N801 - it reads as the function that it stands for, and costs half
    """Set ``concerns`` for the lines of a block; it is called when a line is written."""

    def __init__(self, concerns: Concerns) -> None:
        self._to_set = concerns

    def __enter__(self) -> None:
        """Set them."""
        self._token = _concerns.set(self._to_set)

    def __exit__(self, *_: object) -> None:
        """Set those from before again."""
        _concerns.reset(self._token)


def concerns_now() -> Concerns:
    """Return the concerns of lines written here, for a line that is written elsewhere."""
    return _concerns.get()


def of_worker(worker: str, incarnation: int) -> Fields:
    """Return the fields of a line that concerns a worker."""
    return {"worker": worker, "incarnation": incarnation}


def line_about(fields: Fields) -> dict[str, Fields]:
    """Return the ``extra`` of one line that concerns something else than those around it."""
    return {"about": fields}
