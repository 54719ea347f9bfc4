"""One call with retries, where that doubles nothing and the failure may pass."""

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, Final, ParamSpec, TypeVar, cast

from roundhouse_client.errors import AnswerLost, NotNow, RoundhouseError, Unreachable
from roundhouse_client.flows.steps import Flow, Pause, now, send
from roundhouse_client.request import Call, checked

P = ParamSpec("P")
T = TypeVar("T")
FIRST_PAUSE_S: Final = 0.1
MOST_PAUSE_S: Final = 1.0  # finds a restarted service soon without flooding one that starts
PATIENCE_S: Final = 60.0  # time for a restart, which may have much to read back
WANTED: Final = frozenset({"no_slot_available"})  # the caller chose a refusal over a wait


def is_passing(error: RoundhouseError) -> bool:
    """Whether the same request may succeed later by itself."""
    match error:
        case Unreachable() | AnswerLost():
            return True
        case NotNow():
            return error.code not in WANTED
        case _:
            return False


class Patience:
    """The pauses of one outage: each is twice the last, and at least as long as the service asks."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.reset()

    def __repr__(self) -> str:
        return f"<Patience {self._limit_s:g} s, {self.number} pauses>"

    def reset(self) -> None:
        """End an outage: the next one gets the full time again."""
        self._until: float | None = None
        self._pause_s = FIRST_PAUSE_S
        self.number = 0  # pauses in this outage

    def next_pause_s(self, error: RoundhouseError, at: float) -> float:
        """Return the seconds to wait after an error at ``at``.

        Raises:
            RoundhouseError: the error itself, if it will not pass or the time is over.
        """
        if not is_passing(error):
            raise error
        if self._until is None:
            self._until = at + self._limit_s
        asked_for_s = error.retry_after_s if isinstance(error, NotNow) else None
        seconds = max(self._pause_s, asked_for_s or 0.0)
        if at + seconds > self._until:
            raise error
        self.number += 1
        self._pause_s = min(2 * self._pause_s, MOST_PAUSE_S)
        return seconds

    def pause(self, error: RoundhouseError) -> Flow[None]:
        """Wait for ``next_pause_s`` after an error that may pass."""
        seconds = self.next_pause_s(error, (yield from now()))
        yield Pause(seconds=seconds, because=error, number=self.number)


def ask(call: Call[T], patience_s: float) -> Flow[T]:
    """Return the answer of a call; a repeatable call is retried for up to ``patience_s``.

    Raises:
        RoundhouseError: any error of its tree.
    """
    patience = Patience(patience_s if call.is_repeatable else 0.0)
    while True:
        try:
            reply = yield from send(call.request)
            return call.read(checked(reply))
        except RoundhouseError as error:
            failure = error
        yield from patience.pause(failure)


def patient(flow: Callable[P, T], patience_s: float | None) -> Callable[P, T]:
    """Return a flow with ``patience_s`` as its default patience; None keeps its own."""
    if patience_s is None or "patience_s" not in signature(flow).parameters:
        return flow
    return cast("Callable[P, T]", partial(cast("Any", flow), patience_s=patience_s))
