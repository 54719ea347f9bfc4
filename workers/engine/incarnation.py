"""One incarnation of a worker's engine: from its start to its empty tree; or one attachment to a server."""

import contextlib
import logging
import secrets
import signal
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
from msgspec.structs import replace

from transport.client import EngineClient
from transport.errors import EngineError, EngineRejected, EngineUnreachable
from workers.devices.device_health import DeviceHealth
from workers.devices.oom_kills import count_oom_kills
from workers.engine.launch.engine_key import VARIABLES, operators_key
from workers.engine.log_ring import LogRing
from workers.engine.start_address import wait_address
from workers.engine.start_gate import StartGate
from workers.errors import WorkerError
from workers.process.child import Command, EngineProcess, adopt_engine, run_engine
from workers.process.handed_over import HeldEngine, HeldProcess
from workers.process.identity import EngineExit
from workers.process.listeners import WORKER
from workers.process.registry import ProcessRegistry
from workers.span_board import SpanBoard, SpanPart
from workers.spec import WorkerSpec

PROBE_FIRST_S: Final = 0.02  # the embedded engine is ready within a few of these
PROBE_LAST_S: Final = 0.5  # loading weights takes minutes, and probes take the engine's time
FAULT_CHARS: Final = 300
LOADING: Final = "Loading model"  # llama-server's words with 503
ANSWER_LIMIT_S: Final = 15.0  # for an idle engine that answered before; a machine may stand still for seconds
OUTSIDE_SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL})  # never an engine's
logger = logging.getLogger(__name__)


class Starter(msgspec.Struct, frozen=True, kw_only=True):
    """All that an engine is started with; the same for every incarnation of a worker.

    Without a ``command`` there is nothing to start: the engine is attached.
    """

    spec: WorkerSpec
    command: Command | None
    devices: frozenset[str]  # no other engine may start on them meanwhile
    client: EngineClient
    log: LogRing
    health: DeviceHealth | None  # watches the engine's device
    spans: SpanBoard | None  # for an engine that spans several nodes
    calibrate: Callable[[], Awaitable[None]]  # called before an engine is ready


class Incarnation:
    """The n-th engine process of a worker; run once."""

    def __init__(
        self,
        number: int,
        starter: Starter,
        registry: ProcessRegistry | None,
        gate: StartGate,
        held: HeldEngine | None = None,
    ) -> None:
        self.number = number
        self._held = held  # a running engine that an earlier program in this process started
        self._starter = starter
        self._spec = starter.spec
        self._client = starter.client
        self._log = starter.log
        self._registry = registry
        self._gate = gate
        self.key = held.key if held is not None else None  # the key that the engine requires
        self.capacity: int | None = None  # how many requests it reports it can hold, once it is ready
        self._fault: str | None = None  # why its last readiness probe failed, until one succeeds
        self._fault_since = datetime.now(UTC)
        self._scope = anyio.CancelScope()
        self._engine: EngineProcess | None = None
        self._is_ending = False  # asked to end
        self.part: SpanPart | None = None  # its part of a span
        self._oom_kills: int | None = None  # count of the machine or our cgroup when it was started

    def __repr__(self) -> str:
        return f"<Incarnation {self.number} {self._engine!r}>"

    @property
    def pid(self) -> int | None:
        """The engine's main process, and the leader of its group."""
        return self._engine.pid if self._engine is not None else None

    @property
    def root_pid(self) -> int | None:
        """The process above the engine's whole tree."""
        return self._engine.guardian_pid if self._engine is not None else None

    @property
    def exit(self) -> EngineExit | None:
        """The end of the main process; None if there was none."""
        return self._engine.exit if self._engine is not None else None

    @property
    def died_of_outside(self) -> bool:
        """Whether a signal ended it that neither we nor the kernel's OOM killer sent."""
        ended = self.exit
        return (
            ended is not None
            and ended.signal in OUTSIDE_SIGNALS
            and not self._is_ending
            and (ended.signal != signal.SIGKILL or count_oom_kills() == self._oom_kills)
        )

    @property
    def probe_fault(self) -> str | None:
        """Why its last readiness probe failed, and since when they fail; None once one has succeeded."""
        return None if self._fault is None else f"{self._fault} since {self._fault_since:%Y-%m-%d %H:%M:%S} UTC"

    @property
    def was_ready(self) -> bool:
        """Whether an earlier program handed it over ready: it answers in a moment, or has died."""
        return self._held is not None and self._held.was_ready

    @property
    def is_gone(self) -> bool:
        """Whether no process of it is left, or ever was."""
        return self._engine is None or self._engine.is_gone

    async def run(self, on_begun: Callable[[], None], on_ready: Callable[[], None]) -> str:
        """Run the engine, call ``on_begun`` when its start begins, ``on_ready`` once it answers; return why it ended.

        When this returns, its whole tree is gone, unless ``is_gone`` says that it cannot be killed.
        """
        if self._held is None:
            self._log.begin_incarnation(self.number)
        because = "killed"
        with self._scope:
            await anyio.lowlevel.checkpoint()  # it may have been killed before its first turn
            try:
                if self._starter.command is None:
                    await self._attach(on_ready)
                else:
                    because = await self._run(self._starter.command, on_begun, on_ready)
            except WorkerError as error:
                because = str(error)
        return because

    async def wait_gone(self) -> None:
        """Return when no process of it is left, if it could not be killed in time."""
        if self._engine is not None and not self._engine.is_gone:
            await self._engine.end_without_guardian()

    def kill(self) -> None:
        """Kill the whole tree, by leaving ``run_engine``."""
        self._is_ending = True
        self._scope.cancel()

    async def terminate(self) -> None:
        """Send SIGTERM to the engine's group; kill if there is no engine yet."""
        self._is_ending = True
        if self._engine is None or self._engine.is_gone:  # none yet, or that of an earlier generation
            self.kill()
        else:
            await self._engine.terminate()

    async def _attach(self, on_ready: Callable[[], None]) -> None:
        """Wait for an attached server, however long that takes; the watch reports its loss."""
        await self._probe(on_ready)
        await anyio.sleep_forever()

    def _note_fault(self, fault: str) -> None:
        """Keep why a probe failed, and log it for an attached engine: nothing else would report it."""
        if fault != self._fault and self._starter.command is None:
            at = self._client.endpoint
            logger.warning("worker %s: the server at %s is not ready: %s", self._spec.id, at, fault)
        if fault != self._fault:
            self._fault, self._fault_since = fault, datetime.now(UTC)

    def held_process(self) -> HeldProcess | None:
        """Return the engine's processes for another program in this process to adopt."""
        return self._engine.hand_over_process() if self._engine is not None and not self._is_ending else None

    async def _adopt(self, held: HeldEngine, on_begun: Callable[[], None], on_ready: Callable[[], None]) -> str:
        """Go on with a running engine, which must answer, and within a limit if it has done so before."""
        on_begun()
        if held.key is not None:
            self._client.use_key(held.key)
        self._oom_kills = count_oom_kills()
        with self._device_noted():
            async with adopt_engine(held.process, self._log.add_output) as self._engine:
                limit_s = ANSWER_LIMIT_S if held.was_ready else None
                ended = await self._watch(self._engine, on_ready, limit_s)
        return (
            described(ended, self.part)
            if ended
            else f"the engine that was taken over has not answered in {limit_s:g} s"
        )

    async def _run(self, command: Command, on_begun: Callable[[], None], on_ready: Callable[[], None]) -> str:
        if self._held is not None:
            return await self._adopt(self._held, on_begun, on_ready)
        return await self._start(self._keyed(command), on_begun, on_ready)

    def _note_started(self, engine: EngineProcess) -> None:
        logger.info("worker %s: engine %d is process %d", self._spec.id, self.number, engine.pid)
        if self._registry is not None:
            self._registry.note_started(engine.guardian_pid, engine.pid)

    async def _start(self, command: Command, on_begun: Callable[[], None], on_ready: Callable[[], None]) -> str:
        turn = await self._gate.enter(self._starter.devices)

        def ready() -> None:
            turn.release()
            on_ready()

        try:
            await wait_address(self._client.endpoint, self._spec.name)
            with await self._on_device():
                on_begun()
                self._oom_kills = count_oom_kills()
                async with run_engine(command, self._log.add_output) as self._engine:
                    ended = await self._watch(self._engine, ready) or EngineExit()
        finally:
            turn.release()
        return described(ended, self.part)

    async def _watch(
        self, engine: EngineProcess, on_ready: Callable[[], None], answer_limit_s: float | None = None
    ) -> EngineExit | None:
        """Probe an engine until it answers, and return its end; None if it does not answer within the limit."""
        self._note_started(engine)
        ended: EngineExit | None = None
        async with anyio.create_task_group() as watching:

            async def probe() -> None:
                with anyio.move_on_after(answer_limit_s) as patience:
                    await self._probe(on_ready)
                if patience.cancelled_caught:
                    watching.cancel_scope.cancel()

            watching.start_soon(probe)
            ended = await engine.wait_gone()
            watching.cancel_scope.cancel()
        return ended

    async def _on_device(self) -> contextlib.AbstractContextManager[None]:
        """Wait until the lane's device may get an engine; return a context in which it counts as having one.

        Raises:
            WorkerError: no engine may start there.
        """
        health, lane = self._starter.health, self._spec.lane
        if health is None or lane is None:
            return contextlib.nullcontext()
        await health.wait_free(lane.device)
        await health.check_slice(lane.device)
        return self._device_noted()

    def _device_noted(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the lane's device counts as having an engine."""
        health, lane = self._starter.health, self._spec.lane
        return contextlib.nullcontext() if health is None or lane is None else health.engine_on(lane.device.uuid)

    def _keyed(self, command: Command) -> Command:
        """Give the engine a key to require, and use it; an operator's own key stays."""
        self.key = key = operators_key(self._spec) or secrets.token_hex(16)
        self._client.use_key(key)
        return replace(command, env={**command.env, VARIABLES[self._spec.engine]: key, WORKER: str(self._spec.id)})

    async def _probe(self, on_ready: Callable[[], None]) -> None:
        pause_s = PROBE_FIRST_S
        while (fault := await _fault_of(self._client)) is not None:
            self._note_fault(fault)
            await anyio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, PROBE_LAST_S)
        self._fault = None
        with contextlib.suppress(EngineError):  # it may not report one
            self.capacity = await self._client.read_capacity()
        if self.capacity is not None or self._spec.lane is not None:
            await self._starter.calibrate()
        on_ready()


async def _fault_of(client: EngineClient) -> str | None:
    """Return why the engine does not answer a readiness probe now; None if it does."""
    try:
        await client.probe_ready()
    except EngineUnreachable as error:
        return f"{client.endpoint} refuses connections" if error.is_refused else str(error)[:FAULT_CHARS]
    except EngineRejected as error:
        loads = error.status == HTTPStatus.SERVICE_UNAVAILABLE and LOADING in error.message
        return f"{client.endpoint} loads its model" if loads else str(error)[:FAULT_CHARS]
    except EngineError as error:
        return str(error)[:FAULT_CHARS]
    return None


def described(ended: EngineExit, part: SpanPart | None) -> str:
    """Describe the end of an engine, or of its span, in words."""
    if ended.parted is not None and part is not None:
        return f"{part.generation.name_of(ended.parted.member)}: {ended.parted.because}"
    return f"the engine {'was ' if ended.signal is not None else ''}{ended}"
