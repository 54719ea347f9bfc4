"""One engine with its supervisor, its slots, the watch over it, and the requests in flight on it."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

import anyio
from anyio.abc import TaskStatus

from transport.client import EngineClient
from transport.endpoint import Endpoint
from workers import supervision
from workers.adapters.held import HeldAdapters
from workers.answer import Answer, Phase
from workers.conversing import Manner, converse
from workers.errors import NoSlot, StartFailed
from workers.flight import Flight, Flights
from workers.incarnation import Incarnation
from workers.incident import Incidents, RequestView
from workers.launch import DIALECTS, adapted, takes_tools
from workers.ledger import Ledger
from workers.logring import LogRing
from workers.outcome import Cancelled, CancelReason, EngineFailed, FailureReason, Outcome
from workers.policy.liveness import Verdict
from workers.process import EngineExit
from workers.recorder import IncidentRecorder
from workers.recovery import Recovery
from workers.request import Request
from workers.slots import Lease, Slots
from workers.spec import EngineKind, WorkerId, WorkerSpec
from workers.startgate import StartGate
from workers.states import LEASABLE, PASSING, SERVING, Hold, WorkerState
from workers.supervisor import Supervisor
from workers.vitals import EngineVitals
from workers.watch import Watch
from workers.weights.held import HeldWeights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """A worker at one moment; advisory."""

    id: WorkerId
    model: str
    engine: str
    state: WorkerState
    because: str
    pid: int | None
    port: int
    incarnation: int
    slots_total: int
    slots_configured: int
    slots_in_use: int
    last_exit: EngineExit | None
    verdict: Verdict | None
    requests: tuple[RequestView, ...]
    tokens_per_s: float
    weight_version: int | None


class SupervisedWorker:
    """A worker inside somebody's task group: ``run`` must be running for anything to happen.

    ``run`` owns every task and process of the worker, and when it is left, however it is left, the engine's tree is
    gone. ``on_change`` is called in the event loop after every change of state.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        environment: Mapping[str, str] | None = None,
        on_change: Callable[["SupervisedWorker"], None] | None = None,
    ) -> None:
        self.spec = spec
        self._client = EngineClient(spec.endpoint, DIALECTS[spec.engine])
        self._on_change = on_change
        self._slots = Slots(spec.slots)
        self._flights = Flights()
        self._supervisor = Supervisor(
            spec,
            os.environ if environment is None else environment,
            self._client,
            on_end=self._end_requests,
            on_gone=self._keep_incident,
            on_move=self._moved,
        )
        self.adapters = HeldAdapters(spec.adapters)
        self._vitals = EngineVitals(
            self._client, partial(self._asked, None), self._root_pid, lambda: self.log.bytes_taken
        )
        self._watch = Watch(self._flights, self._vitals, spec.timeouts, self, time.monotonic)
        self._manner = Manner(
            adapted=self._asked,
            bios=spec.bios,
            tool_limits=spec.tool_limits,
            runner=spec.tool_runner,
            repetition=spec.repetition,
            request_s=spec.timeouts.request_s,
            sends_tools=takes_tools(spec),
            now=lambda: datetime.now().astimezone(),
            cache_scope=lambda: self.weights.scope if self.weights else None,
        )
        self._recorder = IncidentRecorder(spec, self._supervisor, self._watch)
        self._recovery = Recovery(self, self._vitals, self._flights)
        self.weights = HeldWeights(self._flights) if spec.engine is EngineKind.VLLM else None

    def __repr__(self) -> str:
        """State the state."""
        return f"<{type(self).__name__} {self.spec.id} {self._supervisor!r} {self._slots!r}>"

    # Lifecycle

    async def run(
        self,
        ledger: Ledger | None = None,
        gate: StartGate | None = None,
        *,
        task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Supervise until cancelled; ``ledger`` takes note of every process, ``gate`` is shared with other workers."""
        supervisor = self._supervisor
        supervisor.ledger, supervisor.gate = ledger, gate or StartGate()
        try:
            async with anyio.create_task_group() as supervisor.tasks:
                supervisor.tasks.start_soon(self._watch.run)
                task_status.started()
        finally:
            supervisor.end("its supervision has ended")
            for flight in self._flights:
                flight.end(Cancelled(reason=CancelReason.SHUTDOWN))

    def start_nowait(self) -> None:
        """Ask for an engine; what comes of it shows in the state."""
        self._supervisor.post(supervision.StartRequested())

    def drain_nowait(self, because: str, hold: Hold = Hold.OPERATOR) -> None:
        """Admit nothing new, later incarnations neither; requests in flight go on."""
        self._supervisor.post(supervision.DrainRequested(because=because, hold=hold))

    def resume_nowait(self, because: str, hold: Hold = Hold.OPERATOR) -> None:
        """Take a drain back; where it was an operator's, also start a worker that was stopped or gave up."""
        self._supervisor.post(supervision.ResumeRequested(because=because, hold=hold))

    def restart_nowait(self, because: str) -> None:
        """Replace the engine now; its requests in flight end, and are charged with nothing."""
        self._supervisor.post(supervision.RestartRequested(because=because))

    async def wait_ready(self, *, first_try_only: bool = False) -> None:
        """Return when the engine is ready.

        Raises:
            StartFailed: it will not be, without an operator; or, with ``first_try_only``, its first start failed.
        """
        await self._supervisor.wait_ready(first_try_only=first_try_only)

    def failure(self) -> StartFailed:
        """Return why there is no engine, with its last lines."""
        return self._supervisor.failure()

    async def end_engine(self, because: str, *, at_once: bool = False) -> None:
        """End the engine: SIGTERM to its group, the configured grace, then SIGKILL to its whole tree.

        Raises:
            StopTimedOut: its processes do not die.
        """
        self._supervisor.post(supervision.StopRequested(because=because, at_once=at_once))
        await self._supervisor.wait_stopped()

    # Looking

    @property
    def state(self) -> WorkerState:
        """The present state; advisory."""
        return self._supervisor.now.state

    @property
    def is_serving(self) -> bool:
        """Whether there is an engine that is ready."""
        return self.state in SERVING

    @property
    def is_starting(self) -> bool:
        """Whether there is one that is not ready yet."""
        return self.state is WorkerState.STARTING

    @property
    def owns_engine(self) -> bool:
        """Whether the engine is ours to kill; nobody can have brought down one that is not."""
        return self.spec.owns_engine

    @property
    def incarnation(self) -> int:
        """The number of the present or last engine process."""
        return self._supervisor.now.incarnation

    @property
    def incidents(self) -> Incidents:
        """What is kept of incarnations that broke."""
        return self._recorder.incidents

    @property
    def log(self) -> LogRing:
        """What its engines have printed."""
        return self._supervisor.log

    @property
    def has_given_up(self) -> bool:
        """Whether it has failed for good: only an operator starts it again."""
        return self.state is WorkerState.FAILED and self.spec.restart.retry_s is None

    @property
    def holds(self) -> frozenset[Hold]:
        """What it is drained for."""
        return self._supervisor.now.holds

    @property
    def is_available(self) -> bool:
        """Whether it takes requests now, or does so again when its weights or adapters are changed."""
        return self.state is WorkerState.READY or (self.state is WorkerState.DRAINING and self.holds <= PASSING)

    @property
    def because(self) -> str:
        """Why it is in its state."""
        return self._supervisor.now.because

    @property
    def slots_in_use(self) -> int:
        """How many requests are in flight."""
        return self._slots.in_use

    @property
    def slots(self) -> int:
        """How many requests may be in flight on the present engine."""
        return self._slots.total

    def snapshot(self) -> WorkerSnapshot:
        """Return the worker as it is now."""
        running = self._supervisor.running
        return WorkerSnapshot(
            id=self.spec.id,
            model=self.spec.name,
            engine=self.spec.engine,
            state=self.state,
            because=self._supervisor.now.because,
            pid=running.pid if running else None,
            port=self._client.endpoint.port,
            incarnation=self.incarnation,
            slots_total=self._slots.total,
            slots_configured=self.spec.slots,
            slots_in_use=self._slots.in_use,
            last_exit=self._supervisor.last_exit,
            verdict=self._watch.verdict(),
            requests=self._watch.views(),
            tokens_per_s=self._flights.tokens_per_s,
            weight_version=self.weights.version if self.weights else None,
        )

    # Requests

    def lease_nowait(self) -> Lease:
        """Take a slot for one request.

        Raises:
            NoSlot: all are taken, or the worker is not ready.
        """
        if self.state not in LEASABLE:
            raise NoSlot(f"worker {self.spec.id} is {self.state}")
        return self._slots.lease_nowait()

    def prepare(self, request: Request, answer: Answer) -> Flight:
        """Return a request of this worker with its id, not yet in flight."""
        job_name = request.job_name.encode("utf-8", "replace").decode()  # it stands in logs, incidents and answers
        return Flight(self._flights.next_id(), job_name, answer)

    async def perform(self, request: Request, answer: Answer, flight: Flight | None = None) -> Outcome:
        """Run one request; whoever calls holds a lease of this worker meanwhile.

        ``answer`` holds what came, at any moment and after any ending.
        """
        flight = flight or self.prepare(request, answer)
        incarnation = self.incarnation
        asked = replace(request, params={**self.spec.params, **request.params})
        logger.debug("worker %s: request %d of %s begins", self.spec.id, flight.id, flight.job_name)
        with self._flights.admit(flight):
            try:
                with flight.scope:
                    outcome = await converse(self._client, self._manner, asked, answer)
                    self._watch.signs.learn(flight)
                    if isinstance(outcome, EngineFailed):
                        await self._recovery.recover(incarnation, flight, outcome)
                    flight.end(outcome)
            finally:
                self._watch.note_end(flight)
                if self.weights is not None:
                    self.weights.note_end(flight)
        assert flight.ending is not None  # noqa: S101 - the scope is left by an ending or by an error
        self._log_ending(flight)
        return flight.ending

    # New weights

    @property
    def endpoint(self) -> Endpoint:
        """Where the engine listens."""
        return self._client.endpoint

    def pause_watch(self) -> None:
        """Expect nothing of the engine until further notice: somebody has told it to stand still."""
        self._watch.pause()

    def unpause_watch(self) -> None:
        """Expect progress again."""
        self._watch.unpause()

    async def wait_idle(self) -> None:
        """Return when no request is in flight or about to be; it must be drained meanwhile."""
        await self._slots.wait_empty()

    def end_requests(self, outcome: Outcome) -> None:
        """End all requests in flight."""
        for flight in self._flights:
            flight.end(outcome)

    def want_adapters(self, adapters: Mapping[str, str]) -> None:
        """Have engines that are started from now on have these adapters.

        Raises:
            InvalidSpec: none can be started so.
        """
        self._supervisor.equip(replace(self.spec, adapters=adapters))
        self.adapters.wanted = dict(adapters)

    def _asked(self, adapter: str | None) -> tuple[str, Mapping[str, object]]:
        return adapted(self.spec, self.adapters.loaded, adapter)

    # What the supervisor and the watch ask for

    def break_engine(self, reason: FailureReason, because: str, suspects: Mapping[Flight, FailureReason]) -> None:
        """Nuke and repave; ``suspects`` are charged with it, each for its own reason, and nobody else is."""
        self._recorder.view(reason, is_stalled=True)
        word = "killed" if self.owns_engine else "let go"
        logger.error("worker %s: engine %d is %s: %s", self.spec.id, self.incarnation, word, because)
        for flight in self._flights:
            own = suspects.get(flight, FailureReason.ENGINE_DIED)
            detail = because if flight in suspects else f"killed: {because}"
            flight.end(EngineFailed(reason=own, detail=detail, brought_down=flight in suspects and self.owns_engine))
        self._supervisor.break_nowait(self.incarnation, reason, because)

    def _end_requests(self, action: supervision.EndRequests) -> None:
        if not self._recorder.has_viewed:
            self._recorder.view(action.reason)
        for flight in self._flights:
            if action.reason is FailureReason.SHUTDOWN:
                flight.end(Cancelled(reason=CancelReason.SHUTDOWN))
                continue
            # Whoever waits for its tools had nothing on the engine, and cannot have brought it down.
            is_suspect = action.brought_down and self.owns_engine and flight.answer.phase is not Phase.TOOLS
            flight.end(EngineFailed(reason=action.reason, detail=action.because, brought_down=is_suspect))

    def _keep_incident(self, incarnation: Incarnation, because: str) -> None:
        self._recorder.keep(incarnation, because)

    def _moved(self) -> None:
        if self.is_starting:
            self.adapters.begin()
            self._watch.begin()
        if self.state is WorkerState.READY:
            self._slots.total = self._effective_slots()
        if self._on_change is not None:
            self._on_change(self)

    def _effective_slots(self) -> int:
        """Return how many requests may be in flight: what was configured, or less where the engine holds less."""
        running = self._supervisor.running
        told = running.capacity if running is not None else None
        if told is None or told >= self.spec.slots:
            return self.spec.slots
        logger.warning("worker %s: the engine holds %d requests, not %d", self.spec.id, told, self.spec.slots)
        return max(1, told)

    def _root_pid(self) -> int | None:
        return self._supervisor.running.root_pid if self._supervisor.running else None

    def _log_ending(self, flight: Flight) -> None:
        told = flight.ending
        if not isinstance(told, EngineFailed):
            logger.debug("worker %s: request %d of %s: %s", self.spec.id, flight.id, flight.job_name, told)
            return
        logger.warning(
            "worker %s: request %d of %s: %s: %s", self.spec.id, flight.id, flight.job_name, told.reason, told.detail
        )
