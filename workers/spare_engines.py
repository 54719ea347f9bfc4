"""The spares of fixed models: workers whose engines are ready for the place of one that breaks."""

import contextlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import psutil

from workers.devices.discovery import MIB, host_free_mib, host_memory_mib
from workers.files.gguf_header import is_gguf
from workers.members import Family, RosterMember
from workers.notifier import Notifier
from workers.policy.spares import EngineMemory, HostMemory, SpareChange, auto_fault, decide_spares
from workers.states import HELD, Hold
from workers.supervised import SupervisedWorker

LOOK_S: Final = 10.0  # between two looks at the machine's memory
UNMEASURED: Final = "no engine of the model has been measured yet"
logger = logging.getLogger(__name__)


class SpareEngines:
    """Starts, holds and ends the spares of models; ``changed`` is notified when one may start or must end.

    With models on lanes no model gets a spare that its configuration does not ask for: lanes may need the memory.
    """

    def __init__(
        self,
        families: Callable[[], Iterable[Family]],
        start: Callable[[SupervisedWorker, str], None],
        changed: Notifier,
        *,
        has_lanes: bool,
    ) -> None:
        self._families = families
        self._start = start
        self._changed = changed
        self._has_lanes = has_lanes
        self._faults: dict[str, str | None] = {}  # why a model gets none, by the last look
        self._memory: dict[str, tuple[int, EngineMemory]] = {}  # by worker: its incarnation, and its engine's

    def __repr__(self) -> str:
        return f"<SpareEngines {self._faults}>"

    def assign(self) -> None:
        """Take the steps that are possible now; call again after every change of a worker."""
        for family in self._families():
            count, because = self._allowed(family)
            members = {each.number: each for each in family.members}
            for step in decide_spares([each.spare_view for each in family.members], family.replicas, count):
                self._act(members[step.number], step.change, because)
            for each in family.members:
                if because and each.is_spare and not each.worker.now.is_wanted:
                    each.worker.supervisor.remark = f"a spare without an engine: {because}"

    async def run(self) -> None:
        """Look at the memory of models that leave their spares to us, until cancelled: other programs may need it."""
        while True:
            changed = self._changed.next
            looked_at = [each for each in self._families() if each.is_auto and not self._has_lanes]
            for family in looked_at:
                await self._look(family)
            with anyio.move_on_after(LOOK_S if looked_at else None):
                await changed.wait()

    def _allowed(self, family: Family) -> tuple[int, str | None]:
        """Return how many spares a model may have, and why not more, unless its configuration says so."""
        spec = family.spec
        if spec.spares is not None:
            return spec.spares, None
        if self._has_lanes:
            return 0, "models on lanes may need its memory; give spares: 1 if not"
        if not family.is_auto:
            return 0, f"another process of {spec.engine} would load the weights a second time; give spares: 1 if it may"
        fault = self._faults.get(spec.name, UNMEASURED)
        return family.running if fault is UNMEASURED else int(fault is None), fault

    def _act(self, member: RosterMember, change: SpareChange, because: str | None) -> None:
        worker = member.worker
        # Without its tasks it cannot start yet, and one that an operator has drained starts when the operator says so.
        may_start = member.is_there.is_set() and Hold.OPERATOR not in worker.now.holds
        match change:
            case SpareChange.TAKE:
                logger.info("worker %s takes the place of one that is down", worker.spec.id)
                worker.resume_nowait("it takes the place of a worker that is down", Hold.SPARE)
                if may_start and not worker.now.is_wanted:
                    self._start(worker, "its model lacks a worker")
            case SpareChange.HOLD:
                worker.drain_nowait(HELD[Hold.SPARE], Hold.SPARE)
            case SpareChange.START if may_start:
                worker.supervisor.remark = None
                self._start(worker, "its model has room for a spare")
            case SpareChange.STOP:
                worker.stop_nowait(because or "its model has fewer spares")
            case _:
                pass

    async def _look(self, family: Family) -> None:
        name = family.spec.name
        try:
            fault = await self._fault_of(family)
        except psutil.NoSuchProcess:  # the engine has ended meanwhile, and the next one is measured
            return
        except (psutil.Error, OSError) as error:
            fault = f"the memory of its engine cannot be measured: {error}"
        before, self._faults[name] = self._faults.get(name, UNMEASURED), fault
        if (before is None) is not (fault is None):
            logger.info("model %s: %s", name, f"it gets no spare: {fault}" if fault else "its spare has room")
            self._changed.notify()

    async def _fault_of(self, family: Family) -> str | None:
        serving = [each.worker for each in family.members if not each.is_spare and each.worker.now.is_serving]
        root = serving[0].supervisor.root_pid if serving else None
        if root is None:
            return self._faults.get(family.spec.name, UNMEASURED)
        worker, incarnation = serving[0], serving[0].now.incarnation
        if worker.spec.on_cpu is not True:
            return "weights in the memory of a GPU are not shared with another process; give spares: 1 if both fit"
        measured_in, measured = self._memory.get(worker.spec.id, (None, None))
        if measured is None or measured_in != incarnation:
            measured = await anyio.to_thread.run_sync(engine_memory, root)
            self._memory[worker.spec.id] = incarnation, measured
        host = HostMemory(free_mib=host_free_mib(), total_mib=host_memory_mib())
        return auto_fault(measured, host, is_running=family.running > 0)


def engine_memory(root: int) -> EngineMemory:
    """Measure the memory of the processes below ``root``; a model's files are mapped ones that begin as GGUF files do.

    A hub's cache names them by their digests.

    Source: the kernel's Documentation/filesystems/proc, "smaps".

    Raises:
        psutil.Error: a process has ended.
        OSError: no descriptor is left.
    """
    own = mapped = 0
    files: set[str] = set()
    for process in psutil.Process(root).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            for part in process.memory_maps(grouped=True):
                own += part.anonymous
                if (file := Path(part.path)).is_file() and is_gguf(file):  # a device must not be opened
                    mapped += part.rss
                    files.add(part.path)
    weights = sum(Path(each).stat().st_size for each in files)
    return EngineMemory(own_mib=_mib(own), mapped_mib=_mib(mapped), weights_mib=_mib(weights))


def _mib(count: int) -> int:
    return -(-count // MIB)
