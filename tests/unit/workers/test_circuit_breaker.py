"""An engine that refuses everybody: held, asked again, and killed after its own minute if it is of no use."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import anyio
import pytest

from tests.harness.virtual import pass_time, virtually
from tests.unit.workers.test_liveness import FakeEngine, Watching
from transport.events import TextDelta
from workers.health.canary import CanaryResult
from workers.health.circuit_breaker import PAUSES, REPAVE_S, CircuitBreaker
from workers.outcome import FailureReason
from workers.requests.in_flight import InFlightRequest
from workers.states import Hold


@dataclass
class RefusingEngine(FakeEngine):
    """Its canaries come back at once, as ``canary`` says; a break gives the next engine, up again within the second."""

    canary: CanaryResult = CanaryResult.REFUSED
    held: list[Hold] = field(default_factory=list)

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

    def break_engine(
        self, reason: FailureReason, because: str, suspects: Mapping[InFlightRequest, FailureReason]
    ) -> None:
        super().break_engine(reason, because, suspects)
        self.is_serving = True


async def refuse(engine: RefusingEngine, seconds: float, *, is_working: bool = False) -> None:
    """Open the breaker, and let time pass, with a turn on the engine that gets its tokens, or with none."""
    watching = Watching()
    if is_working:
        generation = watching.fly().answer.generation
        generation.touch()
        generation.receive(TextDelta("word "))
    breaker = CircuitBreaker(engine, engine, watching.in_flight, anyio.current_time)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(breaker.run)
        breaker.open("500")
        await pass_time(seconds)
        tasks.cancel_scope.cancel()


def test_each_engine_has_its_own_minute_however_fast_it_is_up() -> None:
    """The next engine is not killed for what the one before it refused."""
    engine = RefusingEngine()
    virtually(lambda: refuse(engine, 4 * (REPAVE_S + PAUSES.last_s)))
    times = [at for at, _, _ in engine.broken]
    assert len(times) >= 3
    assert all(later - earlier >= REPAVE_S for earlier, later in pairwise(times))
    assert engine.held == [Hold.REFUSING]


@pytest.mark.parametrize("innocent", ["answers", "is silent", "gives a turn its tokens", "is not ours"])
def test_an_innocent_is_left_alone(innocent: str) -> None:
    """One that answers gets turns again; the silent are the watch's; what works, or is another's, is not killed."""
    engine = RefusingEngine(owns_engine=innocent != "is not ours")
    engine.canary = {"answers": CanaryResult.HEARD, "is silent": CanaryResult.SILENT}.get(
        innocent, CanaryResult.REFUSED
    )
    virtually(lambda: refuse(engine, 10 * REPAVE_S, is_working=innocent == "gives a turn its tokens"))
    assert engine.broken == []
    assert engine.held == ([] if innocent == "answers" else [Hold.REFUSING])
