"""The subject of log lines: a job's turn, a worker, or neither.

It is kept beside the messages, so that no reader has to parse them. A new task inherits the subject of the task that
started it, until it sets its own.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar

Fields = Mapping[str, str | int]
Concerns = Callable[[], Fields]


def _nothing() -> Fields:
    return {}


_concerns: ContextVar[Concerns] = ContextVar("concerns", default=_nothing)


class about:  # noqa: N801 - it reads as the function that it stands for, and costs half
    """Set ``concerns`` for the log lines of a block; it is called when a line is written."""

    def __init__(self, concerns: Concerns) -> None:
        self._to_set = concerns

    def __enter__(self) -> None:
        """Set the concerns."""
        self._token = _concerns.set(self._to_set)

    def __exit__(self, *_: object) -> None:
        """Restore the concerns from before."""
        _concerns.reset(self._token)


def concerns_now() -> Concerns:
    """Return the present concerns, for a line that is written elsewhere."""
    return _concerns.get()


def of_worker(worker: str, incarnation: int) -> Fields:
    """Return the fields of a line that concerns a worker."""
    return {"worker": worker, "incarnation": incarnation}


def line_about(fields: Fields) -> dict[str, Fields]:
    """Return the ``extra`` of one line with another subject than the lines around it."""
    return {"about": fields}
