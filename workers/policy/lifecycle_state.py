"""The state that a supervisor's decisions are based on: the stage of its engine's life, and the limits. Pure."""

import msgspec

from workers.policy.restart import RestartPolicy
from workers.states import HELD, PASSING, SERVING, Hold, WorkerState


class Lifecycle(msgspec.Struct, frozen=True, kw_only=True):
    """The whole basis of the supervisor's decisions."""

    state: WorkerState = WorkerState.STOPPED
    because: str = "not started"
    incarnation: int = 0
    has_process: bool = False  # the tree of this incarnation may still have members
    is_adopting: bool = False  # the first start takes over a running engine
    is_wanted: bool = False  # another engine follows when this one is gone
    is_killed: bool = False  # SIGKILL was sent to this incarnation
    is_broken: bool = False  # it is useless, and its end is an incident, whatever ends it
    is_asked: bool = False  # an operator wants this incarnation replaced: its end is no failure
    holds: frozenset[Hold] = frozenset()  # reasons to admit no requests, also for later incarnations
    is_half_open: bool = False  # one try after giving up: a failure gives up again at once
    is_deferred: bool = False  # trials of its turns find out later whether its end counts
    failed_at: tuple[float, ...] = ()  # monotonic seconds of the failures that count towards giving up
    paused_at: tuple[float, ...] = ()  # all failures since an engine last answered a request: they lengthen pauses
    timer: int = 0  # the number of the only valid timer

    @property
    def is_serving(self) -> bool:
        """Whether there is an engine that is ready, and awake."""
        return self.state in SERVING and Hold.ASLEEP not in self.holds

    @property
    def held_because(self) -> str:
        """Why it gets no new requests, by its holds."""
        return "; ".join(HELD[hold] for hold in sorted(self.holds))

    @property
    def is_starting(self) -> bool:
        """Whether there is an engine that is not ready yet."""
        return self.state is WorkerState.STARTING

    @property
    def is_available(self) -> bool:
        """Whether it takes requests now, or will once its weights or adapters are changed."""
        return self.state is WorkerState.READY or (self.state is WorkerState.DRAINING and self.holds <= PASSING)

    @property
    def is_coming(self) -> bool:
        """Whether another engine is coming."""
        is_ending = self.state is WorkerState.STOPPING and self.is_wanted
        return is_ending or self.state in {WorkerState.STARTING, WorkerState.BACKOFF}

    @property
    def is_down(self) -> bool:
        """Whether its engine ended unasked, or is being killed for a failure."""
        is_down = self.state in {WorkerState.STOPPING, WorkerState.BACKOFF, WorkerState.FAILED}
        return is_down and self.is_wanted and not self.is_asked


class LifecycleLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's limits, in seconds."""

    start_s: float
    stop_grace_s: float
    restart: RestartPolicy
