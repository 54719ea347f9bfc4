"""Engines that sleep: their weights wait in the host's memory while another model has their lane.

A swap then moves weights instead of starting an engine. Only vLLM can sleep, if it was started with
``enable-sleep-mode`` and listens on its own socket. Level 1: level 2 drops the weights, which would have to be loaded
again.

Source: vLLM's documentation, "Sleep Mode"; specification, "Sleep".
"""

import logging
from collections.abc import Callable, Mapping
from typing import Final

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from transport.control import EngineControl
from transport.errors import EngineError
from workers.devices.device_health import DeviceHealth
from workers.devices.discovery import host_free_mib
from workers.engine.launch import starting_devices
from workers.engine.launch.flags import named
from workers.engine.start_gate import StartGate
from workers.files.model_memory import model_memory
from workers.lanes.lane_workers import LaneWorkers
from workers.log_context import line_about, of_worker
from workers.spec import EngineKind, WorkerSpec
from workers.states import SERVING, Hold
from workers.supervised import SupervisedWorker

FLAG: Final = "enable-sleep-mode"
MIB: Final = 1024 * 1024
HOST_RESERVE_MIB: Final = 2048  # host memory that sleeping weights leave to all others
SLEEP_S: Final = 60.0
FREE_S: Final = 10.0  # how long a device may take to free its memory once the engine sleeps
POLL_S: Final = 0.1
logger = logging.getLogger(__name__)


def can_sleep(spec: WorkerSpec) -> bool:
    """Whether an engine was started so that it can sleep while another uses its lane."""
    return spec.engine is EngineKind.VLLM and named(spec.args).get(FLAG) is True and spec.socket is not None


def is_as_wanted(worker: SupervisedWorker) -> bool:
    """Whether a sleeping engine would wake with its model's present weights and adapters."""
    return worker.now.holds == {Hold.ASLEEP} and worker.adapters.loaded == worker.adapters.wanted


class Sleep:
    """Puts engines to sleep and wakes them in ``tasks``, never while a neighbour on the device starts.

    ``on_turned`` is called after each, however it went.
    """

    def __init__(
        self,
        tasks: TaskGroup,
        gate: StartGate,
        environment: Mapping[str, str],
        health: DeviceHealth | None,
        on_turned: Callable[[], None],
    ) -> None:
        self._tasks = tasks
        self._gate = gate
        self._environment = environment
        self._health = health
        self._on_turned = on_turned
        self._host_mib: dict[str, int | None] = {}  # size of each model's weights

    def __repr__(self) -> str:
        return f"<Sleep {self._host_mib}>"

    def lull_nowait(self, lane: LaneWorkers) -> None:
        """Put the engine of a lane to sleep."""
        lane.turning = lane.current
        self._tasks.start_soon(self._lull, lane, lane.current)

    def wake_nowait(self, lane: LaneWorkers) -> None:
        """Wake the engine of a lane; one that does not wake, or was changed meanwhile, is ended."""
        lane.turning = lane.current
        self._tasks.start_soon(self._wake, lane, lane.current)

    async def _lull(self, lane: LaneWorkers, worker: SupervisedWorker) -> None:
        because = lane.left_because
        worker.drain_nowait(because, Hold.ASLEEP)  # from here on no other request reaches it
        is_sleeping = await self._put(worker)
        lane.end_turning(worker)
        if is_sleeping:  # else its lane continues with its end
            worker.resume_nowait(because, Hold.SWAP)
        self._on_turned()

    async def _wake(self, lane: LaneWorkers, worker: SupervisedWorker) -> None:
        is_awake = await self._tell(worker, worker.spec.timeouts.start_s, is_wake=True)
        if is_awake:
            worker.watch.unpause()
        lane.end_turning(worker)
        if is_awake and is_as_wanted(worker):
            worker.resume_nowait(f"{worker.spec.name} has woken", Hold.ASLEEP)
        elif worker.now.state in SERVING and Hold.ASLEEP in worker.now.holds:  # its turns start it again
            worker.stop_nowait(f"{worker.spec.name} {'was changed while it woke' if is_awake else 'did not wake'}")
        self._on_turned()

    async def _put(self, worker: SupervisedWorker) -> bool:
        """Put an engine to sleep, unless the host has no room for its weights; return whether it sleeps."""
        spec = worker.spec
        weights_mib, free_mib = await self._weights_mib(spec), _host_free_mib()
        if weights_mib is None or free_mib is None or weights_mib + HOST_RESERVE_MIB > free_mib:
            return False
        worker.watch.pause()
        before = await self._used_mib(spec)
        is_done = await self._tell(worker, SLEEP_S, is_wake=False)
        if is_done and before is not None:
            await self._wait_free(spec, before - weights_mib // 2)
        return is_done

    async def _tell(self, worker: SupervisedWorker, limit_s: float | None, *, is_wake: bool) -> bool:
        control, incarnation = EngineControl(worker.endpoint), worker.now.incarnation
        turn = await self._gate.enter(starting_devices(worker.spec, self._environment))
        try:
            with anyio.fail_after(limit_s):
                await (control.wake() if is_wake else control.sleep())
        except (EngineError, TimeoutError) as error:
            word = "wake" if is_wake else "sleep"
            lane, line = worker.spec.id, line_about(of_worker(worker.spec.id, incarnation))
            logger.warning("%s: %s does not %s, and is ended: %s", lane, worker.spec.name, word, error, extra=line)
            return False
        finally:
            turn.release()
        return worker.now.incarnation == incarnation and worker.now.state in SERVING

    async def _weights_mib(self, spec: WorkerSpec) -> int | None:
        if spec.name not in self._host_mib:
            known = await anyio.to_thread.run_sync(model_memory, spec.model) if spec.model else None
            self._host_mib[spec.name] = known.weights_mib if known is not None else None
        return self._host_mib[spec.name]

    async def _used_mib(self, spec: WorkerSpec) -> int | None:
        """Measure the used memory of a device now: the last sample may be older than the engine."""
        if self._health is None or spec.lane is None or spec.lane.device.is_cpu:
            return None
        await self._health.refresh()
        memory = self._health.memory.get(spec.lane.device.uuid)
        return None if memory is None else memory.used_mib

    async def _wait_free(self, spec: WorkerSpec, most_mib: int) -> None:
        with anyio.move_on_after(FREE_S):
            while (await self._used_mib(spec) or 0) > most_mib:  # noqa: ASYNC110 - a driver gives no signal
                await anyio.sleep(POLL_S)


def _host_free_mib() -> int | None:
    try:
        return host_free_mib()
    except OSError:  # no descriptor is left
        return None
