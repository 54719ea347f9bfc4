"""The circuit breaker of one engine: one that refuses a turn and then canaries gets no turns until it answers one."""

import logging
from collections.abc import Callable
from itertools import count
from typing import Final, Protocol

import anyio

from workers.health.canary import CanaryResult
from workers.health.engine_owner import EngineOwner
from workers.health.probes import Probes
from workers.outcome import FailureReason
from workers.policy.backoff import Backoff
from workers.requests.in_flight import InFlightRequests
from workers.states import Hold

CANARY_S: Final = 5.0
PAUSES: Final = Backoff(first_s=1.0, last_s=10.0)
REPAVE_S: Final = 60.0  # an engine that has loaded, and refuses everything for as long, is started anew
logger = logging.getLogger(__name__)


class Guarded(EngineOwner, Protocol):
    """A worker that the breaker can keep requests from."""

    def drain_nowait(self, because: str, hold: Hold) -> None:
        """Admit nothing new."""

    def resume_nowait(self, because: str, hold: Hold) -> None:
        """Take that back."""


class CircuitBreaker:
    """Open while the engine refuses; ``run`` must be running, and asks it then, at longer and longer intervals."""

    def __init__(
        self, worker: Guarded, probes: Probes, in_flight: InFlightRequests, clock: Callable[[], float]
    ) -> None:
        self._worker = worker
        self._probes = probes
        self._in_flight = in_flight
        self._clock = clock
        self._because: str | None = None
        self._opened = anyio.Event()

    def __repr__(self) -> str:
        return f"<CircuitBreaker open={self._because!r}>"

    @property
    def is_open(self) -> bool:
        """Whether the engine gets no turns."""
        return self._because is not None

    def open(self, because: str) -> None:
        """Let the engine have no turns: it has refused one, and canaries after it."""
        if self._because is None:
            self._because = because
            self._worker.drain_nowait(f"it refuses requests, a canary of ours too: {because}", Hold.REFUSING)
            self._opened.set()

    async def run(self) -> None:
        """Close the breaker when the engine answers, as often as it is opened."""
        while True:
            await self._opened.wait()
            await self._wait_answer()
            self._because, self._opened = None, anyio.Event()
            self._worker.resume_nowait("it answers again", Hold.REFUSING)

    async def _wait_answer(self) -> None:
        refused_at = self._clock()
        for tries in count(1):
            await anyio.sleep(PAUSES.after(tries))
            if not self._worker.is_serving:
                refused_at = self._clock()  # the next engine has its own time
                continue
            canary = await self._ask_canary()
            if canary is CanaryResult.HEARD:
                return
            refuses_s = self._clock() - refused_at
            if canary is not CanaryResult.SILENT and refuses_s >= REPAVE_S and self._is_of_no_use():
                reason = FailureReason.ENGINE_REJECTED
                because = f"{reason}: for {refuses_s:.0f} s it has refused everything: {self._because}"
                self._worker.break_engine(reason, because, {})
                refused_at = self._clock()  # the next engine may be up before the next look at this one

    def _is_of_no_use(self) -> bool:
        """Whether nothing is lost with the engine: no request on it gets anything."""
        is_working = any(running.answer.generation.has_progressed for running in self._in_flight)
        return self._worker.owns_engine and not is_working

    async def _ask_canary(self) -> CanaryResult:
        try:
            return await self._probes.ask_canary(CANARY_S)
        except Exception:  # whatever is wrong with the canary must not end the worker
            logger.exception("a canary could not be sent")
            return CanaryResult.SILENT
