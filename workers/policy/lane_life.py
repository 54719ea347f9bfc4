"""The life of an engine on a lane that models share: its phase, and its pool's next step with it. Pure.

A lane has no state of its own: its phase is that of the worker whose engine is there. A broken engine is restarted by
its own supervisor, as everywhere, unless another model takes the lane meanwhile; one that gives up leaves the lane to
others.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final

import msgspec

from workers.states import PASSING, SERVING, Hold, WorkerState, state_diagram


class LanePhase(StrEnum):
    """The phase of a lane's engine."""

    EMPTY = "empty"  # there is none, and its memory is free
    LOADING = "loading"
    READY = "ready"
    LEAVING = "leaving"  # it takes no new turns, and ends after its present ones
    BROKEN = "broken"  # it has failed, and waits for its next start


class LaneStep(StrEnum):
    """The pool's next step with an engine."""

    DRAIN = "drain"  # let it take no new requests
    SLEEP = "sleep"  # put it to sleep: its weights stay in the host's memory
    WAKE = "wake"
    START = "start"
    RESTART = "restart"  # end the sleeping engine, and start another
    END = "end"


_P = LanePhase
MOVES: Final[Mapping[LanePhase, frozenset[LanePhase]]] = {
    _P.EMPTY: frozenset({_P.LOADING, _P.LEAVING}),
    _P.LOADING: frozenset({_P.READY, _P.LEAVING, _P.BROKEN, _P.EMPTY}),
    _P.READY: frozenset({_P.LEAVING, _P.LOADING, _P.BROKEN}),
    _P.LEAVING: frozenset({_P.EMPTY, _P.LOADING, _P.BROKEN}),
    _P.BROKEN: frozenset({_P.LOADING, _P.EMPTY}),
}
_OF_STATES: Final[Mapping[WorkerState, LanePhase]] = {
    WorkerState.STOPPED: LanePhase.EMPTY,
    WorkerState.STARTING: LanePhase.LOADING,
    WorkerState.READY: LanePhase.READY,
    WorkerState.DRAINING: LanePhase.READY,
    WorkerState.STOPPING: LanePhase.LEAVING,
    WorkerState.BACKOFF: LanePhase.BROKEN,
    WorkerState.FAILED: LanePhase.BROKEN,
}


class LaneEngine(msgspec.Struct, frozen=True, kw_only=True):
    """The engine on a lane, or the last that was there.

    ``is_coming`` says that another engine of its worker follows it, ``is_turning`` that it is falling asleep or waking.
    """

    state: WorkerState
    holds: frozenset[Hold] = frozenset()
    is_coming: bool = False
    is_turning: bool = False
    in_flight: int = 0

    @property
    def is_asleep(self) -> bool:
        """Whether it sleeps, or is on its way there or back."""
        return self.state in SERVING and Hold.ASLEEP in self.holds

    @property
    def phase(self) -> LanePhase:
        """The phase of its lane."""
        if self.state is WorkerState.DRAINING and Hold.SWAP in self.holds:
            return LanePhase.LEAVING
        if self.is_asleep:
            return LanePhase.LOADING if self.is_turning else LanePhase.EMPTY
        if self.state is WorkerState.STOPPING and self.is_coming:
            return LanePhase.LOADING
        return _OF_STATES[self.state]


def next_step(
    engine: LaneEngine, *, is_wanted: bool, is_left_alone: bool, can_sleep: Callable[[], bool]
) -> LaneStep | None:
    """Return the next step with a lane's engine: that of the first row that matches.

    | | the engine | step |
    | --- | --- | --- |
    | 1 | is ready, and another model wants its place: an operator has started it again meanwhile | drain |
    | 2 | has given up | end |
    | 3 | is broken, and its device is marked | end |
    | 4 | is falling asleep or waking | none |
    | 5 | has no turn left, has no other hold than the swap, and can sleep | sleep |
    | 6 | has no turn left, and no change of it is in progress | end |
    | 7 | is broken, and another model wants its place | end |
    | 8 | is any other | none |

    ``is_wanted`` says that another model wants its place, ``is_left_alone`` that its device is marked; ``can_sleep`` is
    called once the last turn has left.
    """
    phase = engine.phase
    if phase is LanePhase.READY and is_wanted:
        return LaneStep.DRAIN
    is_broken = phase is LanePhase.BROKEN
    if engine.state is WorkerState.FAILED or (is_broken and is_left_alone):
        return LaneStep.END
    if engine.is_turning:
        return None
    is_drained = engine.state is WorkerState.DRAINING and Hold.SWAP in engine.holds and not engine.in_flight
    if is_drained and engine.holds == {Hold.SWAP} and can_sleep():
        return LaneStep.SLEEP
    is_left = is_drained and engine.holds.isdisjoint(PASSING)
    return LaneStep.END if is_left or (is_broken and is_wanted) else None


def load_step(engine: LaneEngine, *, is_as_wanted: bool) -> LaneStep:
    """Return the step that loads an engine's model when the lane is free for it.

    ``is_as_wanted`` says that it would wake with its model's present weights and adapters.
    """
    if not engine.is_asleep:
        return LaneStep.START
    return LaneStep.WAKE if is_as_wanted else LaneStep.RESTART


def diagram() -> str:
    """Return the moves of a lane as a Mermaid state diagram, one line per move, for ``design.md``."""
    return state_diagram(MOVES)
