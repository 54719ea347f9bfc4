"""One call, sent again where that doubles nothing and the failure may pass."""

from typing import Final, TypeVar

from roundhouse_client.errors import AnswerLost, NotNow, RoundhouseError, Unreachable
from roundhouse_client.flows.steps import Flow, Pause, now, send
from roundhouse_client.request import Call, checked

T = TypeVar("T")
FIRST_PAUSE_S: Final = 0.1
MOST_PAUSE_S: Final = 1.0  # a service that is back is found soon, and one that starts is not asked all the time
PATIENCE_S: Final = 60.0  # with a service that was there: a start with much to read back takes a while
WANTED: Final = frozenset({"no_slot_available"})  # the caller asked to be refused rather than to wait


def is_passing(error: RoundhouseError) -> bool:
    """Whether the same request may succeed later, without anybody doing anything about it."""
    match error:
        case Unreachable() | AnswerLost():
            return True
        case NotNow():
            return error.code not in WANTED
        case _:
            return False


class Patience:
    """The pauses of one outage: each is twice the last, and none is shorter than was asked for."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.reset()

    def __repr__(self) -> str:
        return f"<Patience {self._limit_s:g} s, {self.number} pauses>"

    def reset(self) -> None:
        """End an outage: the next one gets the whole time again."""
        self._until: float | None = None
        self._pause_s = FIRST_PAUSE_S
        self.number = 0  # of pauses, in this outage

    def next_pause_s(self, error: RoundhouseError, at: float) -> float:
        """Return how long to wait after an error that came at ``at``.

        Raises:
            RoundhouseError: the error itself, where it will not pass or the time is over.
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
        """Wait after an error that may pass, as long as ``next_pause_s`` says."""
        seconds = self.next_pause_s(error, (yield from now()))
        yield Pause(seconds=seconds, because=error, number=self.number)


def ask(call: Call[T], patience_s: float) -> Flow[T]:
    """Return the answer of a call; a repeatable call waits up to ``patience_s`` for a passing failure to end.

    Raises:
        RoundhouseError: as its tree says.
    """
    patience = Patience(patience_s if call.is_repeatable else 0.0)
    while True:
        try:
            reply = yield from send(call.request)
            return call.read(checked(reply))
        except RoundhouseError as error:
            failure = error
        yield from patience.pause(failure)
