"""The subject of log lines that are written here and now: a job's turn, a worker, or neither.

Kept beside the messages, so that nobody has to read it out of them. A task that is started takes on what its starter's
lines concern, until it says otherwise.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

Fields = Mapping[str, str | int]
Concerns = Callable[[], Fields]


def _nothing() -> Fields:
    return {}


_concerns: ContextVar[Concerns] = ContextVar("concerns", default=_nothing)


@contextmanager
def about(concerns: Concerns) -> Iterator[None]:
    """Set ``concerns`` for the lines of a block; it is called when a line is written."""
    token = _concerns.set(concerns)
    try:
        yield
    finally:
        _concerns.reset(token)


def concerns_now() -> Concerns:
    """Return the concerns of lines written here, for a line that is written elsewhere."""
    return _concerns.get()


def of_worker(worker: str, incarnation: int) -> Fields:
    """Return the fields of a line that concerns a worker."""
    return {"worker": worker, "incarnation": incarnation}


def line_about(fields: Fields) -> dict[str, Fields]:
    """Return the ``extra`` of one line that concerns something else than those around it."""
    return {"about": fields}
