"""The real watch over an engine that reports what a test sets, on a virtual clock."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import anyio

from tests.harness.quiet_owner import QuietOwner
from tests.harness.virtual import pass_time
from transport.counters import EngineCounters
from workers.health.canary import CanaryResult
from workers.health.probes import Calibration, KernelView, ProbeResult, ProcessView
from workers.health.watch import HealthWatch
from workers.outcome import FailureReason
from workers.policy.lifecycle_state import Lifecycle
from workers.policy.repetition import RepetitionLimits
from workers.requests.answer import Answer
from workers.requests.in_flight import InFlightRequest, InFlightRequests
from workers.spec import WorkerTimeouts
from workers.states import WorkerState

SERVING = Lifecycle(state=WorkerState.READY, incarnation=1)


@dataclass
class FakeEngine(QuietOwner):
    """Probes with answers set by the test (``workers.health.probes.Probes``), and a record of what the watch did."""

    counters: EngineCounters | None = None
    sings: bool = False
    calibration: Calibration | None = None
    probes: ProbeResult = ProbeResult.ANSWERED
    cpu_s: float = 0.0
    compiler_s: float = 0.0
    printed: int = 0
    calibrated_with: list[tuple[int, int]] = field(default_factory=list)
    read: list[tuple[object, ...]] = field(default_factory=list)
    now: Lifecycle = SERVING
    owns_engine: bool = True
    broken: list[tuple[float, FailureReason, Mapping[InFlightRequest, FailureReason]]] = field(default_factory=list)

    async def read_counters(self) -> EngineCounters | None:
        await pass_time(0.01)
        return self.counters

    async def ask_canary(self, limit_s: float) -> CanaryResult:
        if not self.sings:
            await pass_time(limit_s)
        return CanaryResult.HEARD if self.sings else CanaryResult.SILENT

    async def calibrate(self, words: int, answer_tokens: int) -> Calibration | None:
        self.calibrated_with.append((words, answer_tokens))
        return self.calibration

    async def read_prompt(self, system: str, tools: Sequence[Mapping[str, object]]) -> None:
        self.read.append((system, *tools))

    async def probe(self) -> ProbeResult:
        return self.probes

    def kernel_view_nowait(self) -> KernelView:
        return KernelView()

    async def kernel_view(self) -> KernelView:
        one = ProcessView(pid=1, name="e", state="running", wchan=None, rss_bytes=1, cpu_s=self.cpu_s, threads=1)
        two = ProcessView(
            pid=2, name="ptxas", state="running", wchan=None, rss_bytes=1, cpu_s=self.compiler_s, threads=1
        )
        return KernelView(processes=(one, two) if self.compiler_s else (one,))

    def log_bytes(self) -> int:
        return self.printed

    def break_engine(
        self, reason: FailureReason, because: str, suspects: Mapping[InFlightRequest, FailureReason]
    ) -> None:
        assert because
        self.broken.append((anyio.current_time(), reason, suspects))
        self.now = Lifecycle(state=WorkerState.STOPPING, incarnation=1)


class Watching:
    """The real watch over a fake engine, on a clock that runs as fast as it can."""

    def __init__(self, timeouts: WorkerTimeouts | None = None) -> None:
        self.engine = FakeEngine()
        self.in_flight = InFlightRequests()
        self.flights: dict[InFlightRequest, ExitStack] = {}  # each is closed when its request lands
        self.watch = HealthWatch(
            self.in_flight, self.engine, timeouts or WorkerTimeouts(), self.engine, anyio.current_time
        )

    def fly(self, prompt_chars: int = 100) -> InFlightRequest:
        """Put a request in flight."""
        answer = Answer(anyio.current_time)
        answer.begin_generation(RepetitionLimits(), prompt_chars).begin_stream()
        running = InFlightRequest(self.in_flight.next_id(), "a job", answer)
        self.flights[running] = ExitStack()
        self.flights[running].enter_context(self.in_flight.admit(running))
        return running

    def land(self, running: InFlightRequest) -> None:
        """Take a request out of the air."""
        self.flights.pop(running).close()
        self.watch.note_end(running)


MINUTE = 60.0
