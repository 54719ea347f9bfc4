"""The states of a worker and the legal moves between them, in one table."""

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Final, TypeVar

from workers.errors import IllegalTransition

_State = TypeVar("_State", bound=StrEnum)


class WorkerState(StrEnum):
    """The state of a worker's engine."""

    STOPPED = "stopped"  # no engine, none coming
    STARTING = "starting"  # an engine process exists or is coming, and is not ready yet
    READY = "ready"  # the engine answers; slots may be leased
    DRAINING = "draining"  # the engine answers; requests in flight go on, no new leases
    STOPPING = "stopping"  # the stop ladder is running
    BACKOFF = "backoff"  # no engine; waiting before the next one is started
    FAILED = "failed"  # gave up; restarted by an operator or an occasional retry


class Hold(StrEnum):
    """Why an engine that answers gets no new requests."""

    ADAPTERS = "adapters"
    ASLEEP = "asleep"
    LEAVING = "leaving"
    STALE_WEIGHTS = "stale_weights"
    OPERATOR = "operator"
    REFUSING = "refusing"
    SPARE = "spare"
    SWAP = "swap"
    UPDATE = "update"


# Holds that the next program of this process takes over; the reasons for the others end with this program.
LASTING: Final = frozenset({Hold.ADAPTERS, Hold.STALE_WEIGHTS, Hold.OPERATOR, Hold.SPARE})
HELD: Final[Mapping[Hold, str]] = {
    Hold.ADAPTERS: "its adapters are being changed",
    Hold.ASLEEP: "it sleeps, and its lane is free for another model",
    Hold.LEAVING: "the configuration has no use for it, or other settings",
    Hold.STALE_WEIGHTS: "its weights are not the model's current ones",
    Hold.OPERATOR: "drained by an operator",
    Hold.REFUSING: "it refused a request and a probe of ours, and is asked until it answers one",
    Hold.SPARE: "a spare, for the place of a worker of its model that is down",
    Hold.SWAP: "its lane is wanted for another model, or was idle",
    Hold.UPDATE: "its weights are being changed",
}
PASSING: Final = frozenset({Hold.ADAPTERS, Hold.UPDATE})  # the present engine takes requests again by itself
_S = WorkerState
LEASABLE: Final = frozenset({_S.READY})
SERVING: Final = frozenset({_S.READY, _S.DRAINING})
ALLOWED: Final[Mapping[WorkerState, frozenset[WorkerState]]] = {
    _S.STOPPED: frozenset({_S.STARTING}),
    _S.STARTING: frozenset({_S.READY, _S.DRAINING, _S.STOPPING, _S.BACKOFF, _S.FAILED}),
    _S.READY: frozenset({_S.DRAINING, _S.STOPPING, _S.BACKOFF, _S.FAILED}),
    _S.DRAINING: frozenset({_S.READY, _S.STOPPING, _S.BACKOFF, _S.FAILED}),
    _S.STOPPING: frozenset({_S.STOPPED, _S.STARTING, _S.BACKOFF, _S.FAILED}),
    _S.BACKOFF: frozenset({_S.STARTING, _S.STOPPED}),
    _S.FAILED: frozenset({_S.STARTING, _S.STOPPED}),
}


def check_move(old: WorkerState, new: WorkerState) -> None:
    """Check that a move is legal.

    Raises:
        IllegalTransition: it is not.
    """
    if new not in ALLOWED[old]:
        raise IllegalTransition(f"a worker cannot go from {old} to {new}")


def diagram() -> str:
    """Return the table as a Mermaid state diagram, for ``design.md``."""
    return state_diagram(ALLOWED)


def state_diagram(moves: Mapping[_State, Collection[_State]]) -> str:
    """Return a table of moves as a Mermaid state diagram: one line per move, states in the order of their enum."""
    lines = ["stateDiagram-v2"]
    for old, targets in moves.items():
        lines += [f"    {old} --> {new}" for new in type(old) if new in targets]
    return "\n".join(lines)
