"""The supervisor of one engine: it carries out what ``policy.lifecycle`` decides and owns the worker's state."""

import dataclasses
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from datetime import UTC, datetime
from typing import Final, assert_never

import anyio
import msgspec
from anyio.abc import TaskGroup, TaskStatus
from msgspec.structs import replace

from transport.client import EngineClient
from workers.devices.device_health import DeviceHealth
from workers.engine.engine_owner import EngineOwner
from workers.engine.incarnation import Incarnation, Starter
from workers.engine.launch import command_for, starting_devices
from workers.engine.log_ring import LogRing
from workers.engine.span_incarnation import SpanIncarnation
from workers.engine.start_gate import StartGate
from workers.errors import StartFailed, StopTimedOut
from workers.log_context import Fields, about, of_worker
from workers.notifier import Notifier
from workers.policy import lifecycle
from workers.policy.lifecycle_state import Lifecycle, LifecycleLimits
from workers.process.handed_over import HeldEngine
from workers.process.identity import EngineExit
from workers.process.registry import ProcessRegistry
from workers.span_board import SpanBoard, SpanPart
from workers.spec import WorkerSpec
from workers.states import LASTING, Hold, WorkerState

KEPT: Final = 1000  # newest moves of one worker: an engine that dies once a minute is seen over four hours
ERROR_TAIL_LINES: Final = 20
logger = logging.getLogger(__name__)


class WorkerMove(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's change of state at ``at_utc``; ``model`` is the one that it serves."""

    at_utc: datetime
    model: str
    incarnation: int
    state: WorkerState
    because: str


class Moves:
    """The newest moves of one worker, in memory; written only by its supervisors."""

    def __init__(self) -> None:
        self._kept: deque[WorkerMove] = deque(maxlen=KEPT)

    def __repr__(self) -> str:
        return f"<Moves {len(self._kept)}>"

    def __iter__(self) -> Iterator[WorkerMove]:
        """Iterate from the oldest to the newest."""
        return iter(tuple(self._kept))

    def note(self, model: str, incarnation: int, state: WorkerState, because: str) -> None:
        """Record the worker's new state."""
        self._kept.append(
            WorkerMove(at_utc=datetime.now(UTC), model=model, incarnation=incarnation, state=state, because=because)
        )


class _Site(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks of a worker, and the objects that it shares with other workers of the machine."""

    tasks: TaskGroup
    registry: ProcessRegistry | None
    gate: StartGate


class Supervisor:
    """Starts, stops and replaces the engine of one worker.

    ``owner`` is notified of all events. ``run`` must be running before an event is posted.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what its engines are started with
        self,
        owner: EngineOwner,
        spec: WorkerSpec,
        environment: Mapping[str, str],
        client: EngineClient,
        log: LogRing,
        moves: Moves,
        health: DeviceHealth | None,
        spans: SpanBoard | None = None,
    ) -> None:
        self.log = log
        self._moves = moves
        self.running: Incarnation | None = None
        self.last_exit: EngineExit | None = None
        self._spec = spec
        self._environment = environment
        self._starter = Starter(
            spec=spec,
            command=command_for(spec, environment) if spec.owns_engine else None,
            devices=starting_devices(spec, environment),
            client=client,
            log=self.log,
            calibrate=owner.prepare_engine,
            health=health,
            spans=spans if spec.nodes > 1 else None,
        )
        self._owner = owner
        self._limits = LifecycleLimits(
            start_s=spec.timeouts.start_s,
            stop_grace_s=spec.timeouts.stop_grace_s,
            # An attached server is waited for, however often it goes away.
            restart=spec.restart if spec.owns_engine else dataclasses.replace(spec.restart, failures=None),
        )
        self._now = Lifecycle()
        self.remark: str | None = None  # its owner's remark, shown beside its state
        self._timer: tuple[int, float | None] = (-1, None)  # the last that was started, and when it elapses
        self._was_ready = False
        self._ready_incarnation = -1  # the newest engine that was ready
        self._last_words: str | None = None  # kept for an engine that never got ready
        self._held: HeldEngine | None = None  # the engine that the next start takes over
        self._site: _Site | None = None
        self._changed = Notifier()

    def __repr__(self) -> str:
        return f"<Supervisor {self._spec.id} {self._now.state} incarnation={self._now.incarnation}>"

    def _concerns(self) -> Fields:
        return of_worker(self._spec.id, self._now.incarnation)

    @property
    def now(self) -> Lifecycle:
        """The present state; advisory."""
        return self._now

    @property
    def root_pid(self) -> int | None:
        """The process above the tree of the present engine."""
        return self.running.root_pid if self.running else None

    @property
    def part(self) -> SpanPart | None:
        """Its part of a span that is formed or runs."""
        return self.running.part if self.running is not None else None

    @property
    def because(self) -> str:
        """Why it is in its state, with an unready engine's answer to the probe, its last words, its owner's remark."""
        fault = self.running.probe_fault if self.running is not None else None
        is_unready = self._now.state is WorkerState.STARTING and fault is not None
        reasons = (self._now.because, f"not ready: {fault}" if is_unready else None, self._last_words, self.remark)
        return "; ".join(reason for reason in reasons if reason is not None)

    @property
    def next_at(self) -> float | None:
        """When the timer of its state elapses, in monotonic seconds; None without one."""
        timer, at = self._timer
        return at if timer == self._now.timer else None

    async def run(
        self,
        registry: ProcessRegistry | None,
        gate: StartGate,
        *beside: Callable[[], Coroutine[object, object, None]],
        task_status: TaskStatus[None],
    ) -> None:
        """Own every task and process of the worker until cancelled, and run ``beside``.

        ``gate`` is shared with all other starts on the machine. A second ``run`` begins from scratch.
        """
        try:
            async with anyio.create_task_group() as tasks:
                self._site = _Site(tasks=tasks, registry=registry, gate=gate)
                with about(self._concerns):
                    for each in beside:
                        tasks.start_soon(each)
                task_status.started()
        finally:
            self._end("its supervision has ended")

    def post(self, event: lifecycle.Event) -> None:
        """Decide on ``event`` and act, without waiting.

        Its owner is notified last, since it may post again: by then the event has been handled as a whole.
        """
        before = self._now
        self._now, actions = lifecycle.decide(before, event, time.monotonic(), self._limits)
        has_moved = self._now.state is not before.state
        with about(self._concerns):  # the poster's own subject does not apply
            if has_moved:
                self._tell_move(before)
            for action in actions:
                self._act(action)
            if has_moved:
                self._changed.notify()
                self._owner.note_move()

    def equip(self, spec: WorkerSpec) -> None:
        """Start engines by this specification from now on; their address stays.

        Raises:
            InvalidSpec: they cannot be.
        """
        self._starter = replace(self._starter, command=command_for(spec, self._environment))

    def adopt(self, held: HeldEngine) -> None:
        """Take over a running engine at the next start, which must be the first."""
        self._held = held
        self._now = Lifecycle(
            incarnation=held.incarnation - 1,
            is_adopting=True,
            holds=frozenset(map(Hold, held.holds)),
            failed_at=tuple(held.failed_at),
            paused_at=tuple(held.paused_at),
        )
        self.last_exit = held.last_exit
        self.log.restore(held.log)

    def hand_over_engine(self) -> HeldEngine | None:
        """Return the engine for the next program of this process to adopt; None without one to keep."""
        now, running = self._now, self.running
        if now.state not in {WorkerState.STARTING, WorkerState.READY, WorkerState.DRAINING} or running is None:
            return None
        process = running.held_process()
        if process is None:
            return None
        return HeldEngine(
            incarnation=now.incarnation,
            process=process,
            key=running.key,
            was_ready=now.state is not WorkerState.STARTING,
            holds=sorted(str(hold) for hold in now.holds & LASTING),
            failed_at=list(now.failed_at),
            paused_at=list(now.paused_at),
            last_exit=self.last_exit,
            log=self.log.hand_over_lines(),
            generation=running.part.generation if running.part is not None else None,
        )

    async def wait_ready(self, *, first_try_only: bool = False) -> None:
        """Return when the engine is ready.

        Raises:
            StartFailed: only an operator can make it ready; or, with ``first_try_only``, its first start failed.
        """
        while self._now.state is not WorkerState.READY:
            gave_up = self._now.state in {WorkerState.FAILED, WorkerState.STOPPED}
            if gave_up or (first_try_only and not self._was_ready and self._now.state is WorkerState.BACKOFF):
                raise self.failure()
            await self._changed.wait()

    async def wait_stopped(self) -> None:
        """Return when the engine that is being stopped is gone; the supervision's own timers bound that.

        Raises:
            StopTimedOut: its processes do not die.
        """
        incarnation = self._now.incarnation
        while self._now.state not in {WorkerState.STOPPED, WorkerState.FAILED}:
            if self._now.incarnation != incarnation:
                return  # another start has begun meanwhile
            await self._changed.wait()
        if self._now.has_process:
            raise StopTimedOut(f"worker {self._spec.id}: {self._now.because}")

    def failure(self) -> StartFailed:
        """Return why there is no engine, with its last lines."""
        tail = self.log.tail(ERROR_TAIL_LINES, incarnation=self._now.incarnation)
        return StartFailed(self._spec.id, self._now.because, tuple(line.text for line in tail))

    def _tell_move(self, before: Lifecycle) -> None:
        now = self._now
        if now.state is WorkerState.READY:
            self._was_ready, self._ready_incarnation = True, now.incarnation
        self._last_words = None if now.incarnation == self._ready_incarnation else _words_of_failed_start(now, self.log)
        logger.info("worker %s: %s -> %s: %s", self._spec.id, before.state, now.state, now.because)
        self.log.add_note(f"{before.state} -> {now.state}: {now.because}")
        self._moves.note(self._spec.name, now.incarnation, now.state, now.because)
        if now.state in {WorkerState.BACKOFF, WorkerState.FAILED}:
            logger.warning("%s", self.failure())

    def _act(self, action: lifecycle.Action) -> None:
        site = self._site
        if site is None:
            raise RuntimeError(f"{self!r} is not running")
        match action:
            case lifecycle.SpawnEngine():
                held, self._held = self._held, None
                make = Incarnation if self._starter.spans is None else SpanIncarnation
                self.running = make(action.incarnation, self._starter, site.registry, site.gate, held)
                site.tasks.start_soon(self._run_incarnation, self.running)
            case lifecycle.TerminateEngine() | lifecycle.KillEngine() | lifecycle.KeepIncident():
                if self.running is not None:
                    self._act_on_engine(self.running, action, site)
            case lifecycle.StartTimer():
                self._timer = (action.timer, time.monotonic() + action.after_s)
                site.tasks.start_soon(self._run_timer, action.timer, action.after_s)
            case lifecycle.EndRequests():
                self._owner.end_with_engine(action)
            case _:
                assert_never(action)

    def _act_on_engine(
        self,
        engine: Incarnation,
        action: lifecycle.TerminateEngine | lifecycle.KillEngine | lifecycle.KeepIncident,
        site: _Site,
    ) -> None:
        match action:
            case lifecycle.TerminateEngine():
                site.tasks.start_soon(engine.terminate)
            case lifecycle.KillEngine():
                engine.kill()
            case lifecycle.KeepIncident():
                self._owner.keep_incident(engine, action.because)

    def _end(self, because: str) -> None:
        is_left = self.running is not None and not self.running.is_gone
        self._site, self.running = None, None
        if self._now.state is WorkerState.STOPPED:
            return
        self._now = Lifecycle(because=because, incarnation=self._now.incarnation, has_process=is_left)
        self._changed.notify()
        self._owner.note_move()

    async def _run_timer(self, timer: int, after_s: float) -> None:
        await anyio.sleep(after_s)
        self.post(lifecycle.TimerElapsed(timer=timer))

    async def _run_incarnation(self, incarnation: Incarnation) -> None:
        number = incarnation.number
        because = await incarnation.run(
            on_begun=lambda: self.post(lifecycle.EngineBegun(incarnation=number)),
            on_ready=lambda: self.post(lifecycle.EngineReady(incarnation=number)),
        )
        self.last_exit = incarnation.exit
        self.post(lifecycle.EngineExited(incarnation=number, because=because))
        if not incarnation.is_gone:
            # The supervision's own timer decides about the worker; no engine is started beside such a process.
            logger.error("worker %s: processes of engine %d cannot be killed", self._spec.id, number)
            await incarnation.wait_gone()
        self.running, part = None, incarnation.part
        self.post(
            lifecycle.EngineGone(
                incarnation=number,
                because=because,
                jitter=random.random(),  # noqa: S311
                is_outside=incarnation.died_of_outside,
                is_deferred=self._owner.has_suspects,
                is_elsewhere=part is not None and part.has_ended_elsewhere(incarnation.exit),
            )
        )

    def note_answer(self, incarnation: int) -> None:
        """Record an engine's answer: earlier failures no longer lengthen pauses."""
        if self._now.paused_at:
            self.post(lifecycle.EngineAnswered(incarnation=incarnation))


def _words_of_failed_start(now: Lifecycle, log: LogRing) -> str | None:
    """Return the last line of an engine that ended before it was ready; a line with an error comes first.

    One that was ready may have printed others' requests, and logs are only for operators.
    """
    is_over = now.state in {WorkerState.BACKOFF, WorkerState.FAILED}
    return log.words_of_failure(now.incarnation) if is_over else None
