"""Recovery after an engine's failure: the charge of each request on it, and its slots before they are lent again."""

from collections.abc import Callable
from typing import Final

import anyio
from msgspec.structs import replace

from workers.engine.engine_owner import EngineOwner
from workers.health.canary import CanaryResult
from workers.health.circuit_breaker import CircuitBreaker
from workers.health.probes import ProbeResult, Probes
from workers.outcome import Cancelled, CancelReason, EngineFailed, FailureReason, Outcome
from workers.policy.lifecycle import EndRequests
from workers.policy.refusals import Refusals
from workers.requests.answer import Phase
from workers.requests.in_flight import InFlightRequest, InFlightRequests

SHORTLY_S: Final = 5.0  # from the end of a request to a death of its engine that it may have caused
DEATH_NOTICE_S: Final = 0.5  # from a broken connection to the guardian's news of a death: milliseconds, unless starved
CONFIRM_PROBES: Final = 3
REFUSAL_PAUSE_S: Final = 1.0  # if the engine gives no time
REFUSAL_PAUSE_MAX_S: Final = 30.0
CANARY_S: Final = 5.0
CANARIES: Final = (
    3  # refused canaries before the engine gets no turns: some refuse half of everything, and serve the rest
)
CANARY_PAUSE_S: Final = 0.2


def ending_of(running: InFlightRequest, action: EndRequests, *, owns_engine: bool) -> Outcome:
    """Return the outcome of a request whose engine is stopped, has died or is killed.

    No request can have brought down an engine that is not ours.
    """
    if action.reason is FailureReason.SHUTDOWN:
        return Cancelled(reason=CancelReason.SHUTDOWN)
    if action.suspects is None:  # the engine ended by itself, or was replaced
        is_suspect = action.brought_down and may_be_cause(running) and owns_engine
        is_outside = is_suspect and action.is_outside
        return EngineFailed(reason=action.reason, detail=action.because, brought_down=is_suspect, is_outside=is_outside)
    own = action.suspects.get(running.id)
    if own is None:
        detail = f"killed: {action.because}"
        return EngineFailed(reason=FailureReason.ENGINE_DIED, detail=detail, brought_down=False)
    return EngineFailed(reason=own, detail=action.because, brought_down=owns_engine)


def may_be_cause(running: InFlightRequest) -> bool:
    """Whether a request may have brought its engine down: not while its tools run and it is off the engine."""
    return running.answer.phase is not Phase.TOOLS


class Recovery:
    """Finds out whether an engine that failed a request still works."""

    def __init__(
        self,
        worker: EngineOwner,
        probes: Probes,
        in_flight: InFlightRequests,
        breaker: CircuitBreaker,
        clock: Callable[[], float],
    ) -> None:
        self._worker = worker
        self._probes = probes
        self.in_flight = in_flight
        self._breaker = breaker
        self._clock = clock
        self._refusals = Refusals()  # since a turn was served
        self._answered: tuple[int, float] = (0, 0.0)  # an incarnation, and the start of the newest request it completed

    def __repr__(self) -> str:
        return f"<Recovery of {self._worker!r}>"

    def note_answer(self, incarnation: int, running: InFlightRequest) -> None:
        """Record a request that an engine has completed."""
        began_at = running.answer.started_at
        self._refusals.clear()
        if incarnation >= self._answered[0]:
            self._answered = incarnation, max(began_at, self._answered[1] if incarnation == self._answered[0] else 0.0)

    async def is_serving_others(self) -> bool:
        """Whether the engine answers a canary, or makes tokens for a request while a canary waits behind others."""
        if self._breaker.is_open:
            return False
        canary = await self._probes.ask_canary(CANARY_S)
        if canary is CanaryResult.SILENT:
            return any(each.answer.generation.first_token_at is not None for each in self.in_flight)
        return canary is CanaryResult.HEARD

    async def recover(self, incarnation: int, running: InFlightRequest, failed: EngineFailed) -> EngineFailed:
        """Return the failure and its proof when the slot may be lent again; the engine may be broken then."""
        if failed.reason is FailureReason.ENGINE_UNREACHABLE:
            await self._confirm_alive(incarnation, running, failed.detail)
        elif await self._probes.probe() is ProbeResult.REFUSED:
            await self._confirm_dead(incarnation, failed.detail)
            return failed
        if failed.retry_after_s is not None:  # the engine is overloaded, and this request is not the cause
            await anyio.sleep(min(failed.retry_after_s, REFUSAL_PAUSE_MAX_S))
            return failed
        is_proved = await self._serves_others(incarnation, running, failed.detail)
        # An engine that refuses one request refuses the next as well: its slot is held for a moment.
        await anyio.sleep(REFUSAL_PAUSE_S)
        return replace(failed, is_proved=is_proved)

    async def _serves_others(self, incarnation: int, running: InFlightRequest, detail: str) -> bool:
        """Whether the engine answers a request that began after the refused one, or a canary; else it may be ill."""
        if self._answered[0] == incarnation and self._answered[1] >= running.answer.started_at:
            return True
        if self._is_ill(incarnation, running, detail):
            return False
        for _ in range(CANARIES):
            if self._breaker.is_open:
                self._breaker.note_refusal()
                return False
            canary = await self._probes.ask_canary(CANARY_S)
            if canary in {CanaryResult.HEARD, CanaryResult.SILENT, CanaryResult.UNFIT}:
                return canary is CanaryResult.HEARD and not self._refusals.speak_against_engine(incarnation)
            await anyio.sleep(CANARY_PAUSE_S)
        if incarnation == self._worker.now.incarnation:
            self._breaker.open(detail)
        return False

    def _is_ill(self, incarnation: int, running: InFlightRequest, detail: str) -> bool:
        """Whether different turns were refused and none is served, whatever canaries say; later replace it."""
        if any(each.answer.generation.first_token_at is not None for each in self.in_flight if each is not running):
            self._refusals.clear()
            return False
        now = self._clock()
        self._refusals.add(tuple(sorted(running.concerns().items())), incarnation, now)
        is_present = incarnation == self._worker.now.incarnation and self._worker.now.is_serving
        if self._refusals.are_too_many(incarnation, now) and is_present and self._worker.owns_engine:
            reason = FailureReason.ENGINE_REJECTED
            because = f"{reason}: it answers canaries, and has refused every turn for a while: {detail}"
            self._worker.break_engine(reason, because, {})
            return True
        return False

    async def _confirm_alive(self, incarnation: int, running: InFlightRequest, detail: str) -> None:
        """Check that the engine lives after a broken request; else break it, and charge that request.

        The guardian reports a death within milliseconds, which ends the request with that reason. Silence proves
        nothing: a healthy engine may be in the middle of a batch, and the watch handles one that hangs.
        """
        for _ in range(CONFIRM_PROBES):
            await anyio.sleep(DEATH_NOTICE_S)
            if await self._probes.probe() is not ProbeResult.REFUSED:
                return
        if incarnation == self._worker.now.incarnation and self._worker.now.is_serving:
            reason = FailureReason.ENGINE_UNREACHABLE
            self._worker.break_engine(reason, f"{reason}: {detail}", {running: reason})

    async def _confirm_dead(self, incarnation: int, detail: str) -> None:
        """Break an engine whose front answers errors and reports itself not ready: the engine behind it has died.

        vLLM's API server goes on for five seconds without its engine, and then ends with status 0. The request that was
        on the engine may have brought it down.
        """
        await anyio.sleep(DEATH_NOTICE_S)
        if await self._probes.probe() is not ProbeResult.REFUSED:
            return
        if incarnation == self._worker.now.incarnation and self._worker.now.is_serving:
            reason = FailureReason.ENGINE_DIED
            suspects = {each: reason for each in self.in_flight if each.answer.phase is not Phase.TOOLS}
            self._worker.break_engine(
                reason, f"{reason}: it answers, and says that it is not ready: {detail}", suspects
            )
