"""One engine with its supervisor, its slots, its health watch, and its requests in flight."""

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
from workers.engine.start_gate import StartGate
from workers.engine.supervisor import Supervisor
from workers.errors import NoSlot
from workers.health.calibration import EngineCalibration
from workers.health.circuit_breaker import CircuitBreaker
from workers.health.incident import WorkerSnapshot
from workers.health.kv_watch import KvWatch
from workers.health.probes import EngineProbes
from workers.health.recorder import Diary, IncidentRecorder
from workers.health.recovery import Recovery, ending_of, may_be_cause
from workers.health.watch import HealthWatch
from workers.loaded import LoadedAdapters, LoadedWeights
from workers.outcome import Cancelled, CancelReason, FailureReason
from workers.policy import lifecycle
from workers.policy.lifecycle_state import Lifecycle
from workers.process.registry import ProcessRegistry
from workers.request_runner import RequestRunner
from workers.requests.in_flight import InFlightRequests
from workers.requests.slots import Lease, SlotLimit, Slots
from workers.span_board import SpanBoard, check_board, members_cpu_s, with_suspect
from workers.spec import EngineKind, WorkerSpec
from workers.states import LEASABLE, Hold, WorkerState

logger = logging.getLogger(__name__)


class SupervisedWorker(EngineOwner):
    """A worker inside its owner's task group; nothing happens unless ``run`` is running.

    ``run`` owns every task and process of the worker; when it ends, for whatever reason, the engine's tree is gone.
    ``on_change`` is called in the event loop after every change of state. ``tries_suspects`` promises that the runner
    of requests finds out which request an engine died of, and counts deaths that none explains (``note_cause``).
    ``count_pools`` gives the numbers of waiting and running turns, for incidents. Workers of one id share a ``diary``.
    ``health`` watches the devices of lanes.

    Callers use ``slots``, ``requests``, ``supervisor`` for the engine's life and ``watch`` for its health.
    """

    def __init__(  # noqa: PLR0913 - what it shares with other workers
        self,
        spec: WorkerSpec,
        environment: Mapping[str, str] | None = None,
        on_change: Callable[["SupervisedWorker"], None] | None = None,
        *,
        tries_suspects: bool = False,
        count_pools: Callable[[], Mapping[str, int] | None] = lambda: None,
        diary: Diary | None = None,
        health: DeviceHealth | None = None,
        spans: SpanBoard | None = None,
    ) -> None:
        check_board(spec, spans)
        diary, environment = diary or Diary.of_worker(spec), os.environ if environment is None else environment
        self.spec = spec = placed(spec, environment)
        self._tries_suspects = tries_suspects
        self._client = EngineClient(spec.endpoint, DIALECTS[spec.engine])
        self._on_change = on_change
        self.slots = Slots(spec.slots)
        self.in_flight = InFlightRequests()
        self.moves = diary.moves  # newest changes of state
        self.supervisor = Supervisor(self, spec, environment, self._client, diary.log, diary.moves, health, spans)
        self.adapters = LoadedAdapters(spec.adapters)

        def asked(adapter: str | None = None) -> tuple[str, Mapping[str, object]]:
            return adapted(spec, self.adapters.loaded, adapter)

        root, members = lambda: self.supervisor.root_pid, partial(members_cpu_s, lambda: self.supervisor.part)
        self._probes = EngineProbes(self._client, asked, root, lambda: diary.log.bytes_taken, members)
        self.watch = HealthWatch(self.in_flight, self._probes, spec.timeouts, self, time.monotonic)
        self._calibration = EngineCalibration(spec, self._probes, self.watch.observations)
        self.recorder = IncidentRecorder(spec, self.supervisor, self.watch, count_pools, diary.incidents, health)
        self._breaker = CircuitBreaker(
            self, self._probes, self.in_flight, time.monotonic, self.watch.is_at_work, spec.timeouts.prefill_stall_s
        )
        recovery = Recovery(self, self._probes, self.in_flight, self._breaker, time.monotonic)
        self.weights = LoadedWeights(self.in_flight) if spec.engine is EngineKind.VLLM else None
        self.requests = RequestRunner(
            spec, self._client, self.supervisor, self.watch, recovery, adapted=asked, weights=self.weights
        )
        self.read_version, self.close_idle = self._client.read_version, self._client.close_idle
        self.kv = KvWatch(spec, self._client, self.requests.pool, lambda: self.now.is_serving, self.note_move)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.spec.id} {self.supervisor!r} {self.slots!r}>"

    # Lifecycle

    async def run(
        self,
        registry: ProcessRegistry | None = None,
        gate: StartGate | None = None,
        *,
        task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Supervise until cancelled; ``registry`` records every process, ``gate`` is shared with other workers."""
        gate = gate or StartGate()
        try:
            watches = [
                self.watch.run,
                self._breaker.run,
                self.kv.run,
                *([pool.run] if (pool := self.requests.pool) else []),
            ]
            await self.supervisor.run(registry, gate, *watches, task_status=task_status)
        finally:
            self.in_flight.end_all(Cancelled(reason=CancelReason.SHUTDOWN))

    def start_nowait(self, because: str = "asked to start", *, after: int = 0) -> None:
        """Ask for an engine with a number above ``after``; the outcome shows in the state."""
        self.supervisor.post(lifecycle.StartRequested(because=because, after=after))

    def stop_nowait(self, because: str) -> None:
        """Ask for the engine's end; requests in flight end with it."""
        self.supervisor.post(lifecycle.StopRequested(because=because))

    def drain_nowait(self, because: str, hold: Hold = Hold.OPERATOR) -> None:
        """Admit no new requests, in later incarnations either; requests in flight go on."""
        self.supervisor.post(lifecycle.DrainRequested(because=because, hold=hold))

    def resume_nowait(self, because: str, hold: Hold = Hold.OPERATOR, *, starts: bool = True) -> None:
        """End a drain; if it was an operator's, also start a worker that was stopped or gave up, if it ``starts``."""
        self.supervisor.post(lifecycle.ResumeRequested(because=because, hold=hold, starts=starts))

    def restart_nowait(self, because: str) -> None:
        """Replace the engine now; its requests in flight end without blame."""
        self.supervisor.post(lifecycle.RestartRequested(because=because))

    async def end_engine(self, because: str, *, at_once: bool = False) -> None:
        """End the engine: SIGTERM to its group, the configured grace, then SIGKILL to its whole tree.

        Raises:
            StopTimedOut: its processes do not die.
        """
        self.supervisor.post(lifecycle.StopRequested(because=because, at_once=at_once))
        await self.supervisor.wait_stopped()

    # Looking

    @property
    def now(self) -> Lifecycle:
        """The present state of its engine; advisory."""
        return self.supervisor.now

    @property
    def endpoint(self) -> Endpoint:
        """The address of the present engine, with the key that it was started with."""
        return self._client.endpoint

    @property
    def owns_engine(self) -> bool:
        """Whether the engine is ours to kill; no request is blamed for the death of one that is not."""
        return self.spec.owns_engine

    @property
    def next_at(self) -> datetime | None:
        """When the next automatic step follows: a try, a query to a held engine, the end of a limit."""
        at = self._breaker.next_at if self._breaker.is_open else self.supervisor.next_at
        return None if at is None else datetime.now(UTC) + timedelta(seconds=at - time.monotonic())

    def snapshot(self) -> WorkerSnapshot:
        """Return the present state of the worker."""
        running = self.supervisor.running
        return WorkerSnapshot(
            id=self.spec.id,
            model=self.spec.name,
            engine=self.spec.engine,
            state=self.now.state,
            because=self.supervisor.because,
            next_at=self.next_at,
            pid=running.pid if running else None,
            port=self._client.endpoint.port,
            incarnation=self.now.incarnation,
            slots_total=self.slots.total,
            slots_configured=self.spec.slots,
            slots_in_use=self.slots.in_use,
            slots_because=self.slots.limit.because if self.slots.limit else None,
            last_exit=self.supervisor.last_exit,
            verdict=self.watch.verdict(),
            requests=self.watch.views(),
            tokens_per_s=self.in_flight.tokens_per_s,
            weight_version=self.weights.version if self.weights else None,
            ignored=self.requests.constraints.ignored,
            not_continued=self.requests.begins.fault,
        )

    # Requests

    def lease_nowait(self, count: int = 1) -> Lease:
        """Take one slot or several for a request.

        Raises:
            NoSlot: too many are taken, or the worker is not ready.
        """
        if self.now.state not in LEASABLE:
            raise NoSlot(f"worker {self.spec.id} is {self.now.state}")
        return self.slots.lease_nowait(count)

    # Findings about a death

    def note_cause(self, *, is_request: bool) -> None:
        """Record whether a request was convicted of a death; one that none explains counts towards giving up."""
        self.supervisor.post(lifecycle.FailureExplained() if is_request else lifecycle.FailureCounted())

    def limit_slots(self, limit: SlotLimit | None) -> None:
        """Lend no more slots than ``limit`` until further notice; None is as many as the engine holds."""
        self.slots.limit = limit
        if self.now.state is WorkerState.READY:
            self.note_move()

    def offer_one_slot(self, *, is_only: bool) -> None:
        """Lend at most one slot until the engine is known to serve turns; otherwise lend all again."""
        self.slots.is_trial = is_only
        if self.now.state is WorkerState.READY:
            self.note_move()

    def want_adapters(self, adapters: Mapping[str, str]) -> None:
        """Start engines with these adapters from now on.

        Raises:
            InvalidSpec: no engine can be started with them.
        """
        self.supervisor.equip(replace(self.spec, adapters=adapters))
        self.adapters.wanted = dict(adapters)

    # Calls of the supervisor and the watch

    def break_engine(self, reason: FailureReason, because: str, suspects: Suspects) -> None:
        """Kill the engine and start another; only ``suspects`` count it as their failure, each with its own reason."""
        is_deferred = self._tries_suspects and self.owns_engine and bool(suspects)
        self.supervisor.post(
            lifecycle.EngineBroken(
                incarnation=self.now.incarnation,
                reason=reason,
                because=with_suspect(because, self.supervisor.part),
                suspects={running.id: own for running, own in suspects.items()},
                is_deferred=is_deferred,
            )
        )

    async def prepare_engine(self) -> None:
        """Calibrate a new engine, and read its KV cache's size, before it serves."""
        await self._calibration.run()
        await self.kv.begin_incarnation()

    def keep_incident(self, incarnation: Incarnation, because: str) -> None:
        """Keep an incident of an engine that ended unasked."""
        self.recorder.keep(incarnation, because)

    def end_with_engine(self, ending: lifecycle.EndRequests) -> None:
        """End all requests, before the engine is touched."""
        if not self.recorder.has_viewed:
            self.recorder.view(ending.reason)
        if ending.suspects is not None:
            word = "killed" if self.owns_engine else "let go"
            logger.error("worker %s: engine %d is %s: %s", self.spec.id, self.now.incarnation, word, ending.because)
        for running in self.in_flight:
            running.end(ending_of(running, ending, owns_engine=self.owns_engine))

    @property
    def has_suspects(self) -> bool:
        """Whether a death now needs a trial: suspects are in flight, or one has left."""
        has_any = any(map(may_be_cause, self.in_flight)) or self.watch.has_departed_suspect
        return self._tries_suspects and self.owns_engine and has_any

    def note_move(self) -> None:
        """Handle a change of the supervisor's state or of the offered slots."""
        if self.now.is_starting:
            self.adapters.begin_incarnation()
            self.watch.begin_incarnation()
        if self.now.state is WorkerState.READY:
            holds = self.supervisor.running.capacity if self.supervisor.running else None
            offered = self.spec.slots_offered(holds)
            self.slots.offer(offered)
            if offered < self.spec.slots and not self.slots.is_trial:
                logger.warning("worker %s: the engine holds %d requests, not %d", self.spec.id, holds, self.spec.slots)
        if self._on_change is not None:
            self._on_change(self)
