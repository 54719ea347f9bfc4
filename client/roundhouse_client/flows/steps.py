"""The steps of flows, and the runner that takes a flow from one step to the next.

A flow yields a step and gets its outcome, or an error thrown in. It never waits, sends or reads a clock itself,
so the same flow serves both drivers, and tests walk through it with ``==``.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from roundhouse_client.errors import RoundhouseError
from roundhouse_client.request import Reply, Request

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send a request; the outcome is its :class:`Reply`."""

    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Send a request and leave its answer's body for ``Read``; the answer of an error is read whole."""

    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Read more of the opened answer; the outcome is bytes, empty at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Wait; ``because`` is the error that causes the wait, if any, and ``number`` counts its waits from 1."""

    seconds: float
    because: RoundhouseError | None = None
    number: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """The outcome is the time of a monotonic clock in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Give:
    """Hand a value to the caller."""

    value: Any


Step = Send | Open | Read | Pause | Now | Give
Flow = Generator[Step, Any, T]  # T is its result


class Gives(Generic[T]):
    """A flow that yields values of a type, and returns nothing."""

    def __init__(self, flow: Flow[None]) -> None:
        self.flow = flow


def send(request: Request) -> Flow[Reply]:
    """Return the answer to a request."""
    reply: Reply = yield Send(request=request)
    return reply


def open_stream(request: Request) -> Flow[Reply]:
    """Return the head of an answer."""
    reply: Reply = yield Open(request=request)
    return reply


def read() -> Flow[bytes]:
    """Return the next bytes of the opened answer, empty at its end."""
    chunk: bytes = yield Read()
    return chunk


def now() -> Flow[float]:
    """Return the time."""
    at: float = yield Now()
    return at


class Runner(Generic[R]):
    """Takes a flow from step to step; a step of None means that it has returned, and ``result`` is set."""

    def __init__(self, flow: Flow[R]) -> None:
        self._flow = flow
        self.result: R

    def begin(self) -> Step | None:
        """Return the first step."""
        return self.answer(None)

    def answer(self, outcome: object) -> Step | None:
        """Give the outcome of a step; return the next."""
        try:
            return self._flow.send(outcome)
        except StopIteration as end:
            self.result = end.value
            return None

    def fail(self, error: RoundhouseError) -> Step | None:
        """Give the error of a step; return the next."""
        try:
            return self._flow.throw(error)
        except StopIteration as end:
            self.result = end.value
            return None
