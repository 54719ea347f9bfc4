"""The circuit breaker of one engine: after it refuses a turn and then canaries it gets no turns until it answers one.

Now and then one waiting turn is let through all the same: a canary has another form, and an engine that refuses it may
serve turns.
"""

import logging
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Final

import anyio

from workers.engine.engine_owner import EngineOwner
from workers.health.canary import CanaryResult
from workers.health.probes import Probes
from workers.outcome import FailureReason
from workers.policy.restart import Backoff
from workers.requests.in_flight import InFlightRequests
from workers.states import Hold

CANARY_S: Final = 5.0
PAUSES: Final = Backoff(first_s=1.0, last_s=10.0)
TRIAL_S: Final = 30.0  # between two turns that are let through, and the longest wait for one
TRIAL_LOOK_S: Final = 0.25
REPAVE_S: Final = 60.0  # a loaded engine that refuses everything for this long is replaced
logger = logging.getLogger(__name__)


class CircuitBreaker:
    """Open while the engine refuses; ``run`` must be running, and then asks it at growing intervals.

    ``is_at_work`` looks at the engine's counters and processes; ``silence_s`` is how long it may ignore its canaries
    without a sign there, None is for ever.
    """

    def __init__(
        self,
        worker: EngineOwner,
        probes: Probes,
        in_flight: InFlightRequests,
        clock: Callable[[], float],
        is_at_work: Callable[[], Awaitable[bool]],
        silence_s: float | None,
    ) -> None:
        self._worker = worker
        self._probes = probes
        self._in_flight = in_flight
        self._clock = clock
        self._is_at_work = is_at_work
        self._silence_s = silence_s
        self._because: str | None = None
        self._refused = 0  # turns that were let through and refused
        self._opened = anyio.Event()
        self.next_at: float | None = None  # when the engine is asked next, by the clock; None while closed

    def __repr__(self) -> str:
        return f"<CircuitBreaker open={self._because!r}>"

    @property
    def is_open(self) -> bool:
        """Whether the engine gets no turns, except one now and then."""
        return self._because is not None

    def open(self, because: str) -> None:
        """Give the engine no turns: it has refused one, and canaries after it."""
        if self._because is None:
            self._because = because
            self._worker.drain_nowait(f"it refuses requests, a canary of ours too: {because}", Hold.REFUSING)
            self._opened.set()

    def note_refusal(self) -> None:
        """Count a turn that the engine refused while the breaker was open."""
        self._refused += 1

    async def run(self) -> None:
        """Close the breaker when the engine answers, each time it is opened."""
        while True:
            await self._opened.wait()
            is_held = await self._wait_answer()
            self._because, self._opened, self.next_at = None, anyio.Event(), None
            if is_held:
                self._worker.resume_nowait("it answers again", Hold.REFUSING)

    async def _wait_answer(self) -> bool:
        """Return when the engine answers, and whether it is still held: not after a turn was let through."""
        refused_at = tried_at = self._clock()
        silent_since: float | None = None
        for tries in count(1):
            pause_s = PAUSES.after(tries)
            self.next_at = self._clock() + pause_s
            await anyio.sleep(pause_s)
            if not self._worker.now.is_serving:
                refused_at = tried_at = self._clock()  # the next engine has its own time
                silent_since = None
                continue
            asked_at = self._clock()
            canary = await self._ask_canary()
            if canary in {CanaryResult.HEARD, CanaryResult.UNFIT}:
                return True
            silent_since = (silent_since or asked_at) if canary is CanaryResult.SILENT else None
            because = await self._why_of_no_use(refused_at, silent_since)
            if because is not None:
                self._worker.break_engine(FailureReason.ENGINE_REJECTED, because, {})
                refused_at = tried_at = self._clock()  # the next engine may be up before the next look at this one
                silent_since = None
            elif self._clock() - tried_at >= TRIAL_S:
                if await self._is_turn_served():
                    return False
                tried_at = self._clock()
        raise AssertionError("it counts for ever")

    async def _why_of_no_use(self, refused_at: float, silent_since: float | None) -> str | None:
        """Return why the engine must be replaced: it refuses everything, or is silent without a sign of work."""
        is_working = any(running.answer.generation.has_progressed for running in self._in_flight)
        if not self._worker.owns_engine or is_working:
            return None
        now, reason = self._clock(), FailureReason.ENGINE_REJECTED
        if silent_since is None:
            refuses_s = now - refused_at
            if refuses_s < REPAVE_S:
                return None
            return f"{reason}: for {refuses_s:.0f} s it has refused everything: {self._because}"
        silent_s = now - silent_since
        if self._silence_s is None or silent_s < self._silence_s or await self._is_at_work():
            return None
        return f"{reason}: it has refused a request, and answered no canary for {silent_s:.0f} s: {self._because}"

    async def _is_turn_served(self) -> bool:
        """Let one waiting turn through; return whether the engine serves it."""
        began_at, refused = self._clock(), self._refused
        self._worker.offer_one_slot(is_only=True)
        self._worker.resume_nowait("one turn is let through", Hold.REFUSING)
        is_served = False
        while self._worker.now.is_serving and self._refused == refused and not is_served:
            await anyio.sleep(TRIAL_LOOK_S)
            tried = [running for running in self._in_flight if running.answer.started_at >= began_at]
            is_served = any(running.answer.generation.has_progressed for running in tried)
            if not tried and self._clock() - began_at >= TRIAL_S:
                break  # no turn waits, or it was answered in one go: then the next canary decides
        if not is_served:
            self._worker.drain_nowait(f"it refuses requests: {self._because}", Hold.REFUSING)
        self._worker.offer_one_slot(is_only=False)
        return is_served

    async def _ask_canary(self) -> CanaryResult:
        try:
            return await self._probes.ask_canary(CANARY_S)
        except Exception:  # a failing canary must not end the worker
            logger.exception("a canary could not be sent")
            return CanaryResult.SILENT
