"""The steps that flows are made of, and the runner that takes a flow from one to the next.

A flow yields a step and is given its outcome, or has an error thrown in. It never waits, sends or reads a clock itself,
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
    """Send a request and leave the body of its answer for ``Read``; an answer that is no success is read whole."""

    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Read on in what was opened last; the outcome are bytes, none at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Wait; ``because`` is the error that is waited out, where there is one, and ``number`` counts from 1 for each."""

    seconds: float
    because: RoundhouseError | None = None
    number: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """The outcome is the time in seconds of a clock that only rises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Give:
    """Hand a value to the caller."""

    value: Any


Step = Send | Open | Read | Pause | Now | Give
Flow = Generator[Step, Any, T]  # with what it returns


class Gives(Generic[T]):
    """A flow that hands out values of a type, and returns nothing."""

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
    """Return the next bytes of what was opened, none at its end."""
    chunk: bytes = yield Read()
    return chunk


def now() -> Flow[float]:
    """Return the time."""
    at: float = yield Now()
    return at


class Runner(Generic[R]):
    """Takes a flow from step to step: None in place of a step means that it has returned, and ``result`` is there."""

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
        """Give the error that a step ended with; return the next."""
        try:
            return self._flow.throw(error)
        except StopIteration as end:
            self.result = end.value
            return None
