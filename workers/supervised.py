"""One engine with its supervisor, its slots, the watch over it, and the requests in flight on it."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial

import anyio
from anyio.abc import TaskStatus

from transport.client import EngineClient
from transport.endpoint import Endpoint
from workers.devices.device_health import DeviceHealth
from workers.engine.engine_owner import EngineOwner, Suspects
from workers.engine.incarnation import Incarnation
from workers.engine.launch import DIALECTS, adapted
from workers.engine.launch.devices import placed
from workers.engine.log_ring import LogRing
from workers.engine.start_gate import StartGate
from workers.engine.supervisor import Supervisor
from workers.errors import NoSlot, StartFailed
from workers.health.calibration import EngineCalibration
from workers.health.circuit_breaker import CircuitBreaker
from workers.health.incident import Incidents, SlotLimit, WorkerSnapshot
from workers.health.kv_watch import KvWatch
from workers.health.latency_record import LatencyRecord
from workers.health.probes import EngineProbes
from workers.health.recorder import Diary, IncidentRecorder
from workers.health.recovery import Recovery, ending_of, may_be_cause
from workers.health.watch import HealthWatch
from workers.loaded import LoadedAdapters, LoadedWeights
from workers.outcome import Cancelled, CancelReason, FailureReason, Outcome
from workers.policy import lifecycle
from workers.process.registry import ProcessRegistry
from workers.request_runner import RequestRunner
from workers.requests.answer import Answer
from workers.requests.constraints import EngineConstraints
from workers.requests.in_flight import InFlightRequest, InFlightRequests
from workers.requests.relay import Relay
from workers.requests.request import Request
from workers.requests.slots import Lease, Slots
from workers.spec import Capacity, EngineKind, WorkerSpec
from workers.states import LEASABLE, PASSING, SERVING, Hold, WorkerState

logger = logging.getLogger(__name__)


class SupervisedWorker(EngineOwner):
    """A worker inside its owner's task group: ``run`` must be running for anything to happen.

    ``run`` owns every task and process of the worker, and when it is left, however it is left, the engine's tree is
    gone. ``on_change`` is called in the event loop after every change of state. ``tries_suspects`` promises that
    the runner of requests finds out which of them an engine died of, and tells what none explains (``count_failure``).
    ``count_pools`` says how many turns wait and run in all: incidents keep it. Workers of one id share a ``diary``.
    ``health`` looks after the devices of lanes.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        environment: Mapping[str, str] | None = None,
        on_change: Callable[["SupervisedWorker"], None] | None = None,
        *,
        tries_suspects: bool = False,
        count_pools: Callable[[], Mapping[str, int] | None] = lambda: None,
        diary: Diary | None = None,
        health: DeviceHealth | None = None,
    ) -> None:
        diary = diary or Diary.of_worker(spec)
        environment = os.environ if environment is None else environment
        self.spec = spec = placed(spec, environment)
        self._tries_suspects = tries_suspects
        self._client = EngineClient(spec.endpoint, DIALECTS[spec.engine])
        self._on_change = on_change
        self._slots = Slots(spec.slots)
        self.in_flight = InFlightRequests()
        self.moves = diary.moves  # its newest changes of state
        self.supervisor = Supervisor(self, spec, environment, self._client, diary.log, diary.moves, health)
        self.adapters = LoadedAdapters(spec.adapters)
        self._probes = EngineProbes(
            self._client, partial(self._asked, None), lambda: self.root_pid, lambda: self.log.bytes_taken
        )
        self._watch = HealthWatch(self.in_flight, self._probes, spec.timeouts, self, time.monotonic)
        self._calibration = EngineCalibration(spec, self._probes, self._watch.observations)
        self.recorder = IncidentRecorder(spec, self.supervisor, self._watch, count_pools, diary.incidents, health)
        self._breaker = CircuitBreaker(
            self, self._probes, self.in_flight, time.monotonic, self._watch.is_at_work, spec.timeouts.prefill_stall_s
        )
        self._has_one_slot = False
        recovery = Recovery(self, self._probes, self.in_flight, self._breaker, time.monotonic)
        self._limit: SlotLimit | None = None
        self.weights = LoadedWeights(self.in_flight) if spec.engine is EngineKind.VLLM else None
        self._runner = RequestRunner(
            spec, self._client, self.supervisor, self._watch, recovery, adapted=self._asked, weights=self.weights
        )
        self.count = self._runner.count  # on no slot at all
        self.read_version = self._client.read_version
        self.kv_pool = self._runner.pool  # who has what of a KV cache that requests share; None where slots bound it
        self.kv = KvWatch(spec, self._client, self.kv_pool, lambda: self.is_serving, self.note_move)
        self.constraints: EngineConstraints = self._runner.constraints
        self.latency: LatencyRecord = self._runner.latency

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.spec.id} {self.supervisor!r} {self._slots!r}>"

    # Lifecycle

    async def run(
        self,
        registry: ProcessRegistry | None = None,
        gate: StartGate | None = None,
        *,
        task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Supervise until cancelled; ``registry`` notes every process, ``gate`` is shared with other workers."""
        gate = gate or StartGate()
        try:
            watches = [self._watch.run, self._breaker.run, self.kv.run, *([self.kv_pool.run] if self.kv_pool else [])]
            await self.supervisor.run(registry, gate, *watches, task_status=task_status)
        finally:
            for running in self.in_flight:
                running.end(Cancelled(reason=CancelReason.SHUTDOWN))

    def start_nowait(self, because: str = "asked to start", *, after: int = 0) -> None:
        """Ask for an engine, whose number is above ``after``; what comes of it shows in the state."""
        self.supervisor.post(lifecycle.StartRequested(because=because, after=after))

    def stop_nowait(self, because: str) -> None:
        """Ask for the engine's end; requests in flight end with it."""
        self.supervisor.post(lifecycle.StopRequested(because=because))

    def drain_nowait(self, because: str, hold: Hold = Hold.OPERATOR) -> None:
        """Admit nothing new, later incarnations neither; requests in flight go on."""
        self.supervisor.post(lifecycle.DrainRequested(because=because, hold=hold))

    def resume_nowait(self, because: str, hold: Hold = Hold.OPERATOR) -> None:
        """Take a drain back; where it was an operator's, also start a worker that was stopped or gave up."""
        self.supervisor.post(lifecycle.ResumeRequested(because=because, hold=hold))

    def restart_nowait(self, because: str) -> None:
        """Replace the engine now; its requests in flight end, and are charged with nothing."""
        self.supervisor.post(lifecycle.RestartRequested(because=because))

    async def wait_ready(self, *, first_try_only: bool = False) -> None:
        """Return when the engine is ready.

        Raises:
            StartFailed: it will not be, without an operator; or, with ``first_try_only``, its first start failed.
        """
        await self.supervisor.wait_ready(first_try_only=first_try_only)

    def failure(self) -> StartFailed:
        """Return why there is no engine, with its last lines."""
        return self.supervisor.failure()

    async def end_engine(self, because: str, *, at_once: bool = False) -> None:
        """End the engine: SIGTERM to its group, the configured grace, then SIGKILL to its whole tree.

        Raises:
            StopTimedOut: its processes do not die.
        """
        self.supervisor.post(lifecycle.StopRequested(because=because, at_once=at_once))
        await self.supervisor.wait_stopped()

    # Looking

    @property
    def state(self) -> WorkerState:
        """The present state; advisory."""
        return self.supervisor.now.state

    @property
    def is_serving(self) -> bool:
        """Whether there is an engine that is ready, and awake."""
        return self.state in SERVING and Hold.ASLEEP not in self.holds

    @property
    def is_starting(self) -> bool:
        """Whether there is one that is not ready yet."""
        return self.state is WorkerState.STARTING

    @property
    def owns_engine(self) -> bool:
        """Whether the engine is ours to kill; no request can have brought down one that is not."""
        return self.spec.owns_engine

    @property
    def incarnation(self) -> int:
        """The number of the present or last engine process."""
        return self.supervisor.now.incarnation

    @property
    def incidents(self) -> Incidents:
        """The incidents of incarnations that broke."""
        return self.recorder.incidents

    @property
    def log(self) -> LogRing:
        """The lines that its engines have printed."""
        return self.supervisor.log

    @property
    def root_pid(self) -> int | None:
        """The process above the tree of the present engine."""
        return self.supervisor.running.root_pid if self.supervisor.running else None

    @property
    def has_given_up(self) -> bool:
        """Whether it has failed for good: only an operator starts it again."""
        now = self.supervisor.now
        return now.state is WorkerState.FAILED and self.spec.restart.retry_s is None and not now.has_process

    @property
    def holds(self) -> frozenset[Hold]:
        """The reasons for which it is drained."""
        return self.supervisor.now.holds

    @property
    def is_available(self) -> bool:
        """Whether it takes requests now, or does so again when its weights or adapters are changed."""
        return self.state is WorkerState.READY or (self.state is WorkerState.DRAINING and self.holds <= PASSING)

    @property
    def is_coming(self) -> bool:
        """Whether another engine is on its way."""
        now = self.supervisor.now
        is_ending = now.state is WorkerState.STOPPING and now.is_wanted
        return is_ending or now.state in {WorkerState.STARTING, WorkerState.BACKOFF}

    @property
    def is_broken(self) -> bool:
        """Whether its engine has ended, or is being killed, and nobody asked for that."""
        now = self.supervisor.now
        is_down = now.state in {WorkerState.STOPPING, WorkerState.BACKOFF, WorkerState.FAILED}
        return is_down and now.is_wanted and not now.is_asked

    @property
    def because(self) -> str:
        """Why it is in its state."""
        return self.supervisor.because

    @property
    def next_at(self) -> datetime | None:
        """When something follows of itself: a try, a question to an engine that is held, the end of a limit."""
        at = self._breaker.next_at if self._breaker.is_open else self.supervisor.next_at
        return None if at is None else datetime.now(UTC) + timedelta(seconds=at - time.monotonic())

    @property
    def slots_in_use(self) -> int:
        """The number of requests in flight."""
        return self._slots.in_use

    @property
    def slots(self) -> int:
        """The number of requests that may be in flight on the present engine."""
        return self._slots.total

    def snapshot(self) -> WorkerSnapshot:
        """Return the worker as it is now."""
        running = self.supervisor.running
        return WorkerSnapshot(
            id=self.spec.id,
            model=self.spec.name,
            engine=self.spec.engine,
            state=self.state,
            because=self.because,
            next_at=self.next_at,
            pid=running.pid if running else None,
            port=self._client.endpoint.port,
            incarnation=self.incarnation,
            slots_total=self._slots.total,
            slots_configured=self.spec.slots,
            slots_in_use=self._slots.in_use,
            slots_because=self._limit.because if self._limit else None,
            last_exit=self.supervisor.last_exit,
            verdict=self._watch.verdict(),
            requests=self._watch.views(),
            tokens_per_s=self.in_flight.tokens_per_s,
            weight_version=self.weights.version if self.weights else None,
        )

    # Requests

    def lease_nowait(self, count: int = 1) -> Lease:
        """Take a slot for a request, or several.

        Raises:
            NoSlot: too many are taken, or the worker is not ready.
        """
        if self.state not in LEASABLE:
            raise NoSlot(f"worker {self.spec.id} is {self.state}")
        return self._slots.lease_nowait(count)

    def prepare(self, request: Request | Relay, answer: Answer) -> InFlightRequest:
        """Return a request of this worker with its id, not yet in flight."""
        return self._runner.prepare(request, answer)

    async def perform(self, request: Request | Relay, answer: Answer, own: InFlightRequest | None = None) -> Outcome:
        """Run one request; the caller holds a lease of this worker meanwhile.

        ``answer`` holds what came, at any moment and after any ending.
        """
        return await self._runner.perform(request, answer, own or self.prepare(request, answer))

    # What a death was of, once that is known

    def count_failure(self) -> None:
        """Count a death that no request explains towards giving up."""
        self.supervisor.post(lifecycle.FailureCounted())

    def forgive_failures(self) -> None:
        """Forget the deaths that a request was convicted of: they no longer lengthen pauses."""
        self.supervisor.post(lifecycle.FailureExplained())

    def limit_slots(self, limit: SlotLimit | None) -> None:
        """Lend no more slots than that until further notice; None is as many as the engine holds."""
        self._limit = limit
        if self.state is WorkerState.READY:
            self.note_move()

    def offer_one_slot(self, *, is_only: bool) -> None:
        """Lend one slot at most, while it is not known that the engine serves turns; or as many as there are again."""
        self._has_one_slot = is_only
        if self.state is WorkerState.READY:
            self.note_move()

    # New weights

    @property
    def endpoint(self) -> Endpoint:
        """The address of the engine."""
        return self._client.endpoint

    def pause_watch(self) -> None:
        """Expect nothing of the engine until further notice: it was told to stand still."""
        self._watch.pause()

    def unpause_watch(self) -> None:
        """Expect progress again."""
        self._watch.unpause()

    async def wait_idle(self) -> None:
        """Return when no request is in flight or about to be; it must be drained meanwhile."""
        await self._slots.wait_empty()

    def end_requests(self, outcome: Outcome) -> None:
        """End all requests in flight."""
        for running in self.in_flight:
            running.end(outcome)

    def want_adapters(self, adapters: Mapping[str, str]) -> None:
        """Start engines with these adapters from now on.

        Raises:
            InvalidSpec: none can be started so.
        """
        self.supervisor.equip(replace(self.spec, adapters=adapters))
        self.adapters.wanted = dict(adapters)

    def _asked(self, adapter: str | None) -> tuple[str, Mapping[str, object]]:
        return adapted(self.spec, self.adapters.loaded, adapter)

    # What the supervisor and the watch ask for

    def break_engine(self, reason: FailureReason, because: str, suspects: Suspects) -> None:
        """Kill the engine and start another; only ``suspects`` count it as their failure, each for its own reason."""
        is_deferred = self._tries_suspects and self.owns_engine and bool(suspects)
        self.supervisor.post(
            lifecycle.EngineBroken(
                incarnation=self.incarnation,
                reason=reason,
                because=because,
                suspects={running.id: own for running, own in suspects.items()},
                is_deferred=is_deferred,
            )
        )

    async def prepare_engine(self) -> None:
        """Measure a new engine, and read its KV cache's size, before it serves."""
        await self._calibration.run()
        await self.kv.begin_incarnation()

    def keep_incident(self, incarnation: Incarnation, because: str) -> None:
        """Keep an incident of an engine that was not asked to end."""
        self.recorder.keep(incarnation, because)

    def end_with_engine(self, ending: lifecycle.EndRequests) -> None:
        """End all requests, before the engine is touched."""
        if not self.recorder.has_viewed:
            self.recorder.view(ending.reason)
        if ending.suspects is not None:
            word = "killed" if self.owns_engine else "let go"
            logger.error("worker %s: engine %d is %s: %s", self.spec.id, self.incarnation, word, ending.because)
        for running in self.in_flight:
            running.end(ending_of(running, ending, owns_engine=self.owns_engine))

    @property
    def has_suspects(self) -> bool:
        """Whether a death of this moment is to be found out about: by trying what is in flight, or of what has left."""
        has_any = any(map(may_be_cause, self.in_flight)) or self._watch.has_departed_suspect
        return self._tries_suspects and self.owns_engine and has_any

    def note_move(self) -> None:
        """Take a change of state, of the supervisor or of the slots that are offered."""
        if self.is_starting:
            self.adapters.begin_incarnation()
            self._watch.begin_incarnation()
        if self.state is WorkerState.READY:
            told = self.supervisor.running.capacity if self.supervisor.running else None
            self._slots.total = self.spec.slots_offered(told, self._limit.slots if self._limit else None)
            if self._has_one_slot:
                self._slots.total = 1
            elif told is not None and told < self.spec.slots and self.spec.capacity is Capacity.SLOTS:
                logger.warning("worker %s: the engine holds %d requests, not %d", self.spec.id, told, self.spec.slots)
        if self._on_change is not None:
            self._on_change(self)
