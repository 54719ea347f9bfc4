"""The supervisor of one engine: it acts out what ``supervision`` decides, and lends the engine's slots."""

import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, assert_never

import anyio
from anyio.abc import TaskGroup, TaskStatus

from transport.client import EngineClient
from transport.request import ChatRequest
from workers import supervision
from workers.errors import NoSlot, StartFailed, StopTimedOut
from workers.flight import Flights
from workers.generation import Generation
from workers.incarnation import Incarnation, answers
from workers.launch import command_for
from workers.logring import LogRing
from workers.outcome import Cancelled, CancelReason, EngineFailed, FailureReason, Outcome
from workers.policy.silence import judge
from workers.process import EngineExit
from workers.request import run_request
from workers.slots import Lease, Slots
from workers.spec import WorkerId, WorkerSpec
from workers.states import LEASABLE, WorkerState
from workers.supervision import Supervision

WATCH_INTERVAL_S: Final = 1.0
ERROR_TAIL_LINES: Final = 20
DEATH_NOTICE_S: Final = 0.5  # from a broken connection to the guardian's news of a death: milliseconds, unless starved
CONFIRM_PROBES: Final = 3
REFUSAL_PAUSE_S: Final = 1.0  # where the engine does not say how long
REFUSAL_PAUSE_MAX_S: Final = 30.0
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
    slots_in_use: int
    last_exit: EngineExit | None
    verdict: str | None
    tokens_per_s: float


class Worker:
    """One engine process with its supervisor and its slots.

    ``run`` must be running for anything to happen; it owns every task and process of the worker, and when it is
    left, however it is left, the engine's tree is gone. ``on_change`` is called in the event loop after every change
    of state.
    """

    def __init__(
        self, spec: WorkerSpec, environment: Mapping[str, str], on_change: Callable[["Worker"], None] | None = None
    ) -> None:
        self.spec = spec
        self.log = LogRing()
        self._command = command_for(spec, environment)
        self._client = EngineClient(spec.host, spec.port)
        self._on_change = on_change
        self._limits = supervision.Limits(
            start_s=spec.timeouts.start_s, stop_grace_s=spec.timeouts.stop_grace_s, restart=spec.restart
        )
        self._now = Supervision()
        self._slots = Slots(spec.slots)
        self._flights = Flights()
        self._tasks: TaskGroup | None = None
        self._running: Incarnation | None = None
        self._last_exit: EngineExit | None = None
        self._was_ready = False
        self._changed = anyio.Event()

    def __repr__(self) -> str:
        """State the state."""
        return f"<Worker {self.spec.id} {self._now.state} incarnation={self._now.incarnation} {self._slots!r}>"

    # Lifecycle

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Supervise until cancelled."""
        async with anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self._watch)
            task_status.started()

    def start_nowait(self) -> None:
        """Ask for an engine; what comes of it shows in the state."""
        self._post(supervision.StartRequested())

    def drain_nowait(self, because: str) -> None:
        """Admit nothing new; requests in flight go on."""
        self._post(supervision.DrainRequested(because=because))

    async def wait_ready(self, *, first_try_only: bool = False) -> None:
        """Return when the engine is ready.

        Raises:
            StartFailed: it will not be, without an operator; or, with ``first_try_only``, its first start failed.
        """
        while self._now.state is not WorkerState.READY:
            gave_up = self._now.state in {WorkerState.FAILED, WorkerState.STOPPED}
            if gave_up or (first_try_only and not self._was_ready and self._now.state is WorkerState.BACKOFF):
                raise self.failure()
            await self._changed.wait()

    def failure(self) -> StartFailed:
        """Return why there is no engine, with its last lines."""
        tail = self.log.tail(ERROR_TAIL_LINES, incarnation=self._now.incarnation)
        return StartFailed(self.spec.id, self._now.because, tuple(line.text for line in tail))

    async def stop(self, because: str, *, at_once: bool = False) -> None:
        """End the engine: SIGTERM to its group, the configured grace, then SIGKILL to its whole tree.

        Raises:
            StopTimedOut: its processes do not die.
        """
        self._post(supervision.StopRequested(because=because, at_once=at_once))
        while self._now.state not in {WorkerState.STOPPED, WorkerState.FAILED}:
            await self._changed.wait()  # the supervision's own timers bound the states on the way
        if self._now.has_process:
            raise StopTimedOut(f"worker {self.spec.id}: {self._now.because}")

    # Requests

    @property
    def state(self) -> WorkerState:
        """The present state; advisory."""
        return self._now.state

    @property
    def incarnation(self) -> int:
        """The number of the present or last engine process."""
        return self._now.incarnation

    def lease_nowait(self) -> Lease:
        """Take a slot for one request.

        Raises:
            NoSlot: all are taken, or the worker is not ready.
        """
        if self._now.state not in LEASABLE:
            raise NoSlot(f"worker {self.spec.id} is {self._now.state}")
        return self._slots.lease_nowait()

    async def generate(self, request: ChatRequest, generation: Generation) -> Outcome:
        """Run one request; whoever calls holds a lease of this worker meanwhile.

        ``generation`` holds what came, at any moment and after any ending.
        """
        incarnation = self._now.incarnation
        with self._flights.admit(generation) as flight:
            with flight.scope:
                outcome = await run_request(self._client, request, generation, self.spec.timeouts.request_s)
                flight.is_answered = True
                if isinstance(outcome, EngineFailed):
                    await self._recover(incarnation, outcome)
                flight.end(outcome)
            assert flight.ending is not None  # noqa: S101 - the scope is left by an ending or by an error
            return flight.ending

    def snapshot(self) -> WorkerSnapshot:
        """Return the worker as it is now."""
        return WorkerSnapshot(
            id=self.spec.id,
            model=self.spec.model,
            engine=self.spec.engine,
            state=self._now.state,
            because=self._now.because,
            pid=self._running.pid if self._running else None,
            port=self.spec.port,
            incarnation=self._now.incarnation,
            slots_total=self._slots.total,
            slots_in_use=self._slots.in_use,
            last_exit=self._last_exit,
            verdict="loading" if self._now.state is WorkerState.STARTING else self._flights.verdict(),
            tokens_per_s=self._flights.tokens_per_s,
        )

    # Acting

    def _post(self, event: supervision.Event) -> None:
        """Decide on ``event`` and act; the only writer of the state. Nothing here waits."""
        before = self._now
        self._now, actions = supervision.decide(before, event, time.monotonic(), self._limits)
        if self._now.state is not before.state:
            self._was_ready = self._was_ready or self._now.state is WorkerState.READY
            logger.info("worker %s: %s -> %s: %s", self.spec.id, before.state, self._now.state, self._now.because)
            self.log.note(f"{before.state} -> {self._now.state}: {self._now.because}")
            if self._now.state in {WorkerState.BACKOFF, WorkerState.FAILED}:
                logger.warning("%s", self.failure())
        for action in actions:
            self._act(action)
        if self._now.state is not before.state:
            self._changed.set()
            self._changed = anyio.Event()
            if self._on_change is not None:
                self._on_change(self)

    def _act(self, action: supervision.Action) -> None:
        if self._tasks is None:
            raise RuntimeError(f"{self!r} is not running: run() owns its tasks")
        match action:
            case supervision.SpawnEngine():
                self._running = Incarnation(action.incarnation, self.spec, self._command, self._client, self.log)
                self._tasks.start_soon(self._run_incarnation, self._running)
            case supervision.TerminateEngine():
                if self._running is not None:
                    self._tasks.start_soon(self._running.terminate)
            case supervision.KillEngine():
                if self._running is not None:
                    self._running.kill()
            case supervision.StartTimer():
                self._tasks.start_soon(self._run_timer, action.timer, action.after_s)
            case supervision.EndRequests():
                self._flights.end_all(_ending(action))
            case _:
                assert_never(action)

    async def _run_timer(self, timer: int, after_s: float) -> None:
        await anyio.sleep(after_s)
        self._post(supervision.TimerElapsed(timer=timer))

    async def _run_incarnation(self, incarnation: Incarnation) -> None:
        number = incarnation.number
        because = await incarnation.run(lambda: self._post(supervision.EngineReady(incarnation=number)))
        if not incarnation.is_gone:
            logger.error("worker %s: processes of engine %d cannot be killed", self.spec.id, number)
            return  # the supervision's own timer says what becomes of the worker; nothing is started beside it
        self._last_exit = incarnation.exit
        self._running = None
        self._post(supervision.EngineGone(incarnation=number, because=because, jitter=random.random()))  # noqa: S311

    # Watching

    async def _watch(self) -> None:
        limits = self.spec.timeouts.silence
        bounds = [limit / 4 for limit in (limits.prefill_s, limits.decode_s) if limit is not None]
        interval_s = min(WATCH_INTERVAL_S, *bounds) if bounds else WATCH_INTERVAL_S
        while True:
            await anyio.sleep(interval_s)
            self._flights.measure_rate(time.monotonic())
            self._end_silent()

    def _end_silent(self) -> None:
        """End the requests whose engine has said nothing for too long, and break that engine."""
        now = time.monotonic()
        stalled: FailureReason | None = None
        for flight in self._flights:
            if flight.is_answered:
                continue  # it waits for us, not for the engine
            generation = flight.generation
            has_token = generation.first_token_at is not None
            silence = judge(
                self.spec.timeouts.silence, last_byte_at=generation.last_byte_at, has_token=has_token, now=now
            )
            if silence is not None:
                stalled = FailureReason(silence)
                silent_s = now - generation.last_byte_at
                flight.end(EngineFailed(reason=stalled, detail=f"no byte for {silent_s:.1f} s", brought_down=True))
        if stalled is not None:
            self._break(self._now.incarnation, stalled, f"{stalled}: a request got no byte for too long")

    async def _recover(self, incarnation: int, failed: EngineFailed) -> None:
        """Do what a failure asks for before the slot is lent again."""
        if failed.reason is FailureReason.ENGINE_UNREACHABLE:
            await self._confirm_alive(incarnation, failed.detail)
        else:
            # An engine that refuses one request refuses the next as well: its slot is held for a moment.
            await anyio.sleep(min(failed.retry_after_s or REFUSAL_PAUSE_S, REFUSAL_PAUSE_MAX_S))

    async def _confirm_alive(self, incarnation: int, detail: str) -> None:
        """Return if the engine answers after a broken request; else break it, which ends the request that asks.

        A death is told by the guardian within milliseconds, and ends the request meanwhile with that reason.
        """
        await anyio.sleep(DEATH_NOTICE_S)
        for _ in range(CONFIRM_PROBES):
            if await answers(self._client):
                return
        reason = FailureReason.ENGINE_UNREACHABLE
        self._post(supervision.EngineBroken(incarnation=incarnation, reason=reason, because=f"{reason}: {detail}"))

    def _break(self, incarnation: int, reason: FailureReason, because: str) -> None:
        """Nuke and repave. Requests that are still in flight were not silent: none of them is suspected."""
        ending = EngineFailed(reason=FailureReason.ENGINE_DIED, detail=f"killed: {because}", brought_down=False)
        self._flights.end_all(ending)
        self._post(supervision.EngineBroken(incarnation=incarnation, reason=reason, because=because))


def _ending(action: supervision.EndRequests) -> Outcome:
    if action.reason is FailureReason.SHUTDOWN:
        return Cancelled(reason=CancelReason.SHUTDOWN)
    return EngineFailed(reason=action.reason, detail=action.because, brought_down=True)
