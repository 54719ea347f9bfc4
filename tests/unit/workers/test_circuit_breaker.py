"""An engine that refuses every request gets no turns, is asked again, and is killed after a minute without recovery."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import anyio
import pytest

from tests.harness.virtual import pass_time, virtually
from tests.harness.watching import SERVING, FakeEngine, Watching
from transport.events import TextDelta
from workers.health.canary import CanaryResult
from workers.health.circuit_breaker import PAUSES, REPAVE_S, TRIAL_S, CircuitBreaker
from workers.outcome import FailureReason
from workers.requests.in_flight import InFlightRequest
from workers.states import Hold


@dataclass
class RefusingEngine(FakeEngine):
    """Its canaries return at once, as ``canary`` says; a break starts the next engine, which is up within a second."""

    canary: CanaryResult = CanaryResult.REFUSED
    held: list[Hold] = field(default_factory=list)
    one_slot: list[bool] = field(default_factory=list)
    works: bool = False

    async def ask_canary(self, limit_s: float) -> CanaryResult:
        if self.canary is CanaryResult.SILENT:
            await pass_time(limit_s)
        return self.canary

    def drain_nowait(self, because: str, hold: Hold) -> None:
        assert because
        self.held.append(hold)

    def resume_nowait(self, because: str, hold: Hold) -> None:
        assert because
        self.held.remove(hold)

    def offer_one_slot(self, *, is_only: bool) -> None:
        self.one_slot.append(is_only)

    async def is_at_work(self) -> bool:
        return self.works

    def break_engine(
        self, reason: FailureReason, because: str, suspects: Mapping[InFlightRequest, FailureReason]
    ) -> None:
        super().break_engine(reason, because, suspects)
        self.now = SERVING


SILENCE_S = 120.0


async def refuse(engine: RefusingEngine, seconds: float, *, is_working: bool = False) -> bool:
    """Open the breaker and let time pass, beside a turn that gets its tokens or without one.

    Return whether the breaker is still open.
    """
    watching = Watching()
    if is_working:
        generation = watching.fly().answer.generation
        generation.touch()
        generation.receive(TextDelta("word "))
    breaker = CircuitBreaker(engine, engine, watching.in_flight, anyio.current_time, engine.is_at_work, SILENCE_S)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(breaker.run)
        breaker.open("500")
        await pass_time(seconds)
        is_open = breaker.is_open
        tasks.cancel_scope.cancel()
    return is_open


def test_each_engine_has_a_minute_of_its_own_however_fast_it_starts() -> None:
    """The next engine is not killed for the refusals of the one before."""
    engine = RefusingEngine()
    virtually(lambda: refuse(engine, 4 * (REPAVE_S + PAUSES.last_s)))
    times = [at for at, _, _ in engine.broken]
    assert len(times) >= 3
    assert all(later - earlier >= REPAVE_S for earlier, later in pairwise(times))
    assert engine.held == [Hold.REFUSING]


@pytest.mark.parametrize(
    "innocent", ["answers", "refuses its form", "is silent and works", "gives a turn its tokens", "is not ours"]
)
def test_an_innocent_engine_is_left_alone(innocent: str) -> None:
    """An engine that answers gets turns again, even if it refuses a canary's form; no working engine is killed."""
    engine = RefusingEngine(owns_engine=innocent != "is not ours", works=innocent == "is silent and works")
    engine.canary = {
        "answers": CanaryResult.HEARD,
        "refuses its form": CanaryResult.UNFIT,
        "is silent and works": CanaryResult.SILENT,
    }.get(innocent, CanaryResult.REFUSED)
    is_open = virtually(lambda: refuse(engine, 10 * REPAVE_S, is_working=innocent == "gives a turn its tokens"))
    assert engine.broken == []
    assert is_open is (innocent not in {"answers", "refuses its form"})


def test_an_engine_that_refuses_and_then_falls_silent_is_replaced() -> None:
    """It gets no requests but canaries, so their silence counts as the engine's (specification, "Circuit breaker")."""
    engine = RefusingEngine(canary=CanaryResult.SILENT)
    virtually(lambda: refuse(engine, 3 * SILENCE_S))
    assert engine.broken
    assert SILENCE_S <= engine.broken[0][0] <= SILENCE_S + 3 * PAUSES.last_s


def test_one_turn_is_let_through_now_and_then() -> None:
    """An attached server may serve turns and refuse canaries: a waiting turn finds this out."""
    engine = RefusingEngine(owns_engine=False)
    virtually(lambda: refuse(engine, 3 * TRIAL_S + 4 * PAUSES.last_s))
    assert engine.one_slot[:4] == [True, False, True, False]
    assert engine.held == [Hold.REFUSING]


def test_a_served_turn_closes_the_breaker() -> None:
    """The results of canaries do not matter then."""
    engine = RefusingEngine(owns_engine=False)

    async def serve() -> None:
        watching = Watching()
        breaker = CircuitBreaker(engine, engine, watching.in_flight, anyio.current_time, engine.is_at_work, SILENCE_S)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(breaker.run)
            breaker.open("500")
            while True not in engine.one_slot:
                await pass_time(0.5)
            generation = watching.fly().answer.generation
            generation.touch()
            generation.receive(TextDelta("word "))
            await pass_time(2.0)
            assert not breaker.is_open
            tasks.cancel_scope.cancel()

    virtually(serve)
    assert engine.held == []
    assert engine.one_slot == [True, False]
