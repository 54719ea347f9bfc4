"""The registry of processes that we have started, and the sweep of those that an earlier run of ours has left.

The third ring around an engine: the guardian outlives us, the kernel hands us processes that outlive a guardian
(``workers.process.orphans``), and the next start finds those that outlive both here. A process must prove to be ours:
by the same boot, pid and start time as recorded, or by the mark of a run of ours in its environment. A pid alone or a
name proves nothing.
"""

import json
import logging
import os
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Final

import anyio
import msgspec
import psutil

from workers.process.identity import ProcessId, kill_exactly, mark_of

SWEEP_LIMIT_S: Final = 5.0  # SIGKILL takes milliseconds; beyond it a process hangs in the kernel
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_POLL_S: Final = 0.005
_numbers: Final = count()
_run_ids: Final[dict[int, str]] = {}
logger = logging.getLogger(__name__)


def run_id() -> str:
    """Return this process's mark on its engines; a fork of it has another."""
    return _run_ids.setdefault(os.getpid(), uuid.uuid4().hex)


def continue_run(mark: str) -> None:
    """Go on with the run that another program in this process began: its engines carry that mark."""
    _run_ids[os.getpid()] = mark


class ProcessRegistry:
    """The processes that one run has started, in one file of ``folder``, written before the first one starts."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / f"{run_id()}.{next(_numbers)}.json"
        self._processes: dict[int, ProcessId] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._write()

    def __repr__(self) -> str:
        return f"<ProcessRegistry {self._file.name} processes={len(self._processes)}>"

    def note_started(self, *pids: int) -> None:
        """Register new processes; a full disk, or a lack of descriptors, keeps no engine from running."""
        self._processes = {pid: noted for pid, noted in self._processes.items() if noted.is_alive}
        try:
            for pid in pids:
                noted = ProcessId.of(pid)
                if noted is not None:
                    self._processes[pid] = noted
            self._write()
        except OSError:
            logger.exception("processes %s could not be noted; a sweep has only their mark to go by", pids)

    def close(self) -> None:
        """Forget the run: it has ended, and none of its processes is left."""
        self._file.unlink(missing_ok=True)

    def _write(self) -> None:
        own = ProcessId.of(os.getpid())
        assert own is not None  # noqa: S101 - we live
        document = {
            "boot_id": _boot_id(),
            "owner": [own.pid, own.started],
            "processes": [[noted.pid, noted.started] for noted in self._processes.values()],
        }
        half = self._file.with_suffix(".half")
        half.write_text(json.dumps(document), encoding="ascii")
        half.replace(self._file)


@asynccontextmanager
async def open_registry(state_dir: Path | None) -> AsyncIterator[ProcessRegistry | None]:
    """Sweep the processes of earlier runs, then keep a registry for a block; None without a state directory."""
    if state_dir is None:
        yield None
        return
    folder = state_dir / "processes"
    await sweep(folder)
    registry = ProcessRegistry(folder)
    try:
        yield registry
    finally:
        registry.close()


async def sweep(folder: Path) -> int:
    """Kill the processes of earlier runs, and forget them; return their number.

    Runs that still live are left alone, and so are those of another boot: they are gone.
    """
    left = [(file, run) for file, run in _runs(folder) if run is None or not run.is_alive]
    killed = await _kill_remains([run for _, run in left if run is not None and run.boot_id == _boot_id()])
    for file, run in left:
        if run is None or run.boot_id != _boot_id() or not any(each.is_alive for each in killed):
            file.unlink(missing_ok=True)
    if killed:
        logger.warning("an earlier run left %d processes; they are killed", len(killed))
    return len(killed)


async def _kill_remains(runs: Sequence["_Run"]) -> set[ProcessId]:
    """Kill remains of earlier runs until none is alive or the time is up; return those found."""
    killed: set[ProcessId] = set()
    if not runs:
        return killed
    with anyio.move_on_after(SWEEP_LIMIT_S):
        while found := {each for each in _remains(runs) if each.is_alive}:
            for process in found:
                kill_exactly(process)
            killed |= found
            await anyio.sleep(_POLL_S)
    return killed


class _Run(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str
    boot_id: str
    owner: ProcessId
    processes: tuple[ProcessId, ...]

    @property
    def is_alive(self) -> bool:
        return self.boot_id == _boot_id() and self.owner.is_alive


def _runs(folder: Path) -> list[tuple[Path, _Run | None]]:
    return [(file, _read(file)) for file in sorted(folder.glob("*.json"))] if folder.is_dir() else []


def _read(file: Path) -> _Run | None:
    try:
        document = json.loads(file.read_text(encoding="ascii"))
        owner, *processes = (
            ProcessId(pid=int(pid), started=int(started))
            for pid, started in (document["owner"], *document["processes"])
        )
        return _Run(
            run_id=file.name.partition(".")[0],
            boot_id=str(document["boot_id"]),
            owner=owner,
            processes=tuple(processes),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remains(runs: Sequence[_Run]) -> Iterator[ProcessId]:
    """Yield the processes of ended runs: recorded ones, all below them, and those that carry their mark."""
    marks = {run.run_id for run in runs}
    noted = {process for run in runs for process in run.processes if process.is_alive}
    for process in noted:
        yield process
        try:
            below = psutil.Process(process.pid).children(recursive=True)
        except psutil.Error:
            continue
        yield from (identity for identity in (ProcessId.of(child.pid) for child in below) if identity is not None)
    for pid in psutil.pids():
        if pid != os.getpid() and mark_of(pid) in marks:
            identity = ProcessId.of(pid)
            if identity is not None:
                yield identity


def _boot_id() -> str:
    return _BOOT_ID.read_text(encoding="ascii").strip()
