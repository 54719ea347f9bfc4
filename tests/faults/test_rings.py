"""The three rings around an engine: the guardian, Roundhouse as subreaper, and the sweep of the next start."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import anyio
import psutil
import pytest

from tests.conftest import ENGINE_PROGRAM, SpecFactory
from tests.harness.processes import running_program
from tests.harness.programs import PROGRAMS
from tests.harness.waiting import LIMIT_S, is_alive, wait_for, wait_until
from tests.harness.working import ask, wait_incident, working
from workers.engine import incarnation
from workers.outcome import FailureReason
from workers.process import child as engine_process
from workers.process import guardian, orphans
from workers.process.child import Command, run_engine
from workers.process.identity import ProcessId
from workers.process.registry import ProcessRegistry, sweep
from workers.states import WorkerState

SUPERVISOR = PROGRAMS / "supervisor.py"
ROOT = Path(__file__).parents[2]
WITHIN_S = 1.0


def processes_of(folder: Path) -> list[int]:
    """Return the processes whose command names the folder: supervisor, guardian, engine and their children."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@contextmanager
def supervising(folder: Path, port: int, *flags: str, is_forking: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Run a supervisor over a double-forking engine for a block; it is killed at the end if it still runs."""
    engine = [sys.executable, "-I", "-S", str(ENGINE_PROGRAM), "--daemon", str(folder / "daemon"), *flags]
    fork = ["--fork"] if is_forking else []
    command = [sys.executable, str(SUPERVISOR), str(folder), str(port), *fork, *engine]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with running_program(command, stdout=subprocess.PIPE, text=True, env=environment) as supervisor:
        yield supervisor


def engine_and_guardian(supervisor: subprocess.Popen[str]) -> tuple[int, int]:
    assert supervisor.stdout is not None
    engine, above, _ = supervisor.stdout.readline().split()
    return int(engine), int(above)


@pytest.fixture
def times(request: pytest.FixtureRequest) -> int:
    """Return how often a random kill is tried: few times in a test run, a thousand in a soak."""
    return 1000 if request.config.getoption("--soak") else 12


@pytest.mark.system
def test_a_sigkill_at_any_moment_leaves_nothing_within_a_second(
    tmp_path: Path, free_ports: Callable[[int], int], times: int
) -> None:
    """The whole tree is dead, including double-forked and setsid'ed descendants and half-started processes."""
    port = free_ports(1)
    slowest = 0.0
    for attempt in range(times):
        folder = tmp_path / f"run-{attempt}"
        folder.mkdir()
        moment_s = random.uniform(0.2, 0.9)  # noqa: S311
        with supervising(folder, port) as supervisor:
            started_at = time.monotonic()
            wait_for(lambda: time.monotonic() - started_at > moment_s, "a random moment")  # noqa: B023
            supervisor.kill()
        slowest = max(slowest, wait_for(lambda: not processes_of(folder), "nothing is left", WITHIN_S))  # noqa: B023
    print(f"{times} kills, the slowest tree was gone after {slowest * 1000:.0f} ms")


def test_a_fork_of_the_supervisor_keeps_no_engine_alive(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """It inherited the lifeline, whose end therefore proves nothing."""
    with supervising(tmp_path, free_ports(1), is_forking=True) as supervisor:
        assert supervisor.stdout is not None
        engine, above, helper = map(int, supervisor.stdout.readline().split())
        try:
            supervisor.kill()
            wait_for(lambda: not is_alive(engine) and not is_alive(above), "the engine is gone", WITHIN_S)
            assert is_alive(helper)
        finally:
            os.kill(helper, signal.SIGKILL)


def test_processes_that_outlive_supervisor_and_guardian_are_swept_by_the_next_start(
    tmp_path: Path, free_ports: Callable[[int], int], times: int
) -> None:
    """Both are killed at once. PDEATHSIG ends the engine, and the mark finds the rest in less than a second."""
    port = free_ports(1)
    slowest = 0.0
    for attempt in range(max(2, times // 20)):
        folder = tmp_path / f"run-{attempt}"
        folder.mkdir()
        with supervising(folder, port) as supervisor:
            engine, above = engine_and_guardian(supervisor)
            wait_for(partial(has_content, folder / "daemon"), "the daemon has forked")
            for pid in (supervisor.pid, above):
                os.kill(pid, signal.SIGSTOP)
            for pid in (supervisor.pid, above):
                os.kill(pid, signal.SIGKILL)
        daemon = int((folder / "daemon").read_text())
        wait_for(lambda: not is_alive(engine), "PDEATHSIG has taken the engine", WITHIN_S)  # noqa: B023
        assert is_alive(daemon)
        began_at = time.monotonic()
        assert anyio.run(sweep, folder / "processes") == 1
        slowest = max(slowest, time.monotonic() - began_at)
        assert processes_of(folder) == []
        assert list((folder / "processes").iterdir()) == []
    assert slowest < WITHIN_S
    print(f"the slowest sweep took {slowest * 1000:.0f} ms")


def has_content(file: Path) -> bool:
    return file.exists() and bool(file.read_text())


def test_the_next_start_sweeps_before_it_starts_anything(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """The daemon of the first run is dead when the engine of the second starts."""
    port = free_ports(1)
    with supervising(tmp_path, port) as first:
        _, above = engine_and_guardian(first)
        wait_for(partial(has_content, tmp_path / "daemon"), "the daemon has forked")
        daemon = int((tmp_path / "daemon").read_text())
        os.kill(first.pid, signal.SIGSTOP)
        os.kill(above, signal.SIGKILL)
    assert is_alive(daemon)
    with supervising(tmp_path, port) as second:
        engine_and_guardian(second)
        assert not is_alive(daemon)
    wait_for(lambda: not processes_of(tmp_path), "nothing is left", WITHIN_S)


async def test_a_killed_guardian_costs_an_engine_and_leaves_nothing(scripted_spec: SpecFactory, tmp_path: Path) -> None:
    """Roundhouse is a subreaper: it kills and reaps a dying guardian's orphans, and the worker goes on."""
    async with working(scripted_spec(daemon=str(tmp_path / "daemon"))) as worker:
        pid = worker.snapshot().pid
        assert pid is not None
        await wait_until(partial(has_content, tmp_path / "daemon"), "the daemon has forked")
        daemon = int((tmp_path / "daemon").read_text())
        os.kill(psutil.Process(pid).ppid(), signal.SIGKILL)
        await wait_until(lambda: worker.now.incarnation == 2, "the engine is replaced")
        assert not is_alive(pid)
        assert not is_alive(daemon)
        assert (await wait_incident(worker)).incarnation == 1
        await worker.supervisor.wait_ready()
        assert (await ask(worker)).text == "word0 word1 word2 "


async def test_a_guardian_is_killed_repeatedly_and_not_even_zombies_stay(times: int) -> None:
    """Its pipes close before the kernel gives us its children.

    A process without environment is known by its session.
    """
    code = (
        "import os, subprocess, sys, time\n"
        "if os.fork() == 0: os._exit(0)\n"  # a zombie that the engine never collects
        "bare = subprocess.Popen(['sleep', '60'], env={})\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    command = Command(argv=(sys.executable, "-I", "-S", "-c", code), env=dict(os.environ))
    for _ in range(max(10, times // 20)):
        await _kill_guardian_of(command)


async def _kill_guardian_of(command: Command) -> None:
    ready = anyio.Event()
    with anyio.fail_after(LIMIT_S):
        async with run_engine(command, lambda _stream, _data: ready.set()) as engine:
            await ready.wait()
            os.kill(engine.guardian_pid, signal.SIGKILL)
            await engine.wait_gone()
            left = psutil.Process().children(recursive=True)
            assert [child for child in left if child.name() == "sleep" or _is_zombie(child)] == []


def _is_zombie(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_ZOMBIE


async def test_a_tree_that_dies_late_costs_time_and_not_the_worker(
    scripted_spec: SpecFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process hangs in the kernel: no engine starts beside it, and the worker goes on once it is gone."""
    may_die = anyio.Event()
    real = orphans.end_orphans

    async def stuck(session: int | None = None) -> bool:
        if session is None:
            return await real()
        await may_die.wait()
        return await real(session)

    monkeypatch.setattr(engine_process, "end_orphans", stuck)
    monkeypatch.setattr(engine_process, "LAST_LIMIT_S", 0.1)
    spec = scripted_spec()
    monkeypatch.setattr(incarnation, "run_engine", partial(run_engine, leave_limit_s=0.1))
    async with working(spec) as worker:
        guardian_pid = psutil.Process(worker.snapshot().pid).ppid()
        os.kill(guardian_pid, signal.SIGKILL)
        await wait_until(lambda: not is_alive(guardian_pid), "the guardian is dead")
        worker.break_engine(FailureReason.ENGINE_UNREACHABLE, "a test", {})
        assert (await wait_incident(worker)).incarnation == 1
        assert (worker.now.incarnation, worker.now.state) == (1, WorkerState.STOPPING)
        may_die.set()
        await wait_until(lambda: worker.now.incarnation == 2, "the engine is replaced")
        await worker.supervisor.wait_ready()
        assert (await ask(worker)).text == "word0 word1 word2 "


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


class TestSweep:
    """Processes that a sweep must not touch."""

    async def test_a_running_run_is_left_alone(self, tmp_path: Path) -> None:
        """It belongs to another Roundhouse, or to us."""
        process = await anyio.open_process([sys.executable, "-c", "import time; time.sleep(60)"])
        try:
            ProcessRegistry(tmp_path).note_started(process.pid)
            assert await sweep(tmp_path) == 0
            assert is_alive(process.pid)
            assert len(files(tmp_path)) == 1
        finally:
            process.kill()
            await process.aclose()

    @pytest.mark.parametrize("lie", ["start time", "boot"])
    async def test_a_pid_alone_proves_nothing(self, tmp_path: Path, lie: str) -> None:
        """Pids are reused: the process must have the recorded start time and boot."""
        process = await anyio.open_process([sys.executable, "-c", "import time; time.sleep(60)"])
        try:
            (tmp_path / "ended.0.json").write_text(_ledger_of(process.pid, lie))
            assert await sweep(tmp_path) == 0
            assert is_alive(process.pid)
            assert files(tmp_path) == []
        finally:
            process.kill()
            await process.aclose()

    async def test_a_recorded_process_is_killed_with_all_its_descendants(self, tmp_path: Path) -> None:
        """The same record with nothing wrong in it."""
        code = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
        process = await anyio.open_process([sys.executable, "-c", code])
        assert process.stdout is not None
        below = int(await process.stdout.receive())
        (tmp_path / "ended.0.json").write_text(_ledger_of(process.pid, ""))
        assert await sweep(tmp_path) == 2
        assert not is_alive(process.pid)
        assert not is_alive(below)
        await process.aclose()

    async def test_an_unreadable_ledger_does_not_prevent_a_start(self, tmp_path: Path) -> None:
        """It is half a file after a power failure."""
        (tmp_path / "half.0.json").write_text('{"boot_id": ')
        assert await sweep(tmp_path) == 0
        assert files(tmp_path) == []
        assert await sweep(tmp_path / "nowhere") == 0


def _ledger_of(pid: int, lie: str) -> str:
    noted = ProcessId.of(pid)
    assert noted is not None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    started = noted.started + (1 if lie == "start time" else 0)
    return json.dumps(
        {"boot_id": "another" if lie == "boot" else boot, "owner": [2**22, 1], "processes": [[pid, started]]}
    )


def test_a_tether_holds_its_child() -> None:
    """A tool server dies with us in any case, with the processes it has started."""
    tethered = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "print(os.getpid(), child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = (
        "import os, subprocess, sys, time\n"
        f"command = [sys.executable, '-I', '-S', {guardian.__file__!r}, '--tether', str(os.getpid())]\n"
        f"subprocess.Popen([*command, sys.executable, '-c', {tethered!r}])\n"
        "time.sleep(60)\n"
    )
    with running_program([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
    wait_for(lambda: not any(map(is_alive, pids)), "both are dead", WITHIN_S)
    command = [sys.executable, "-I", "-S", guardian.__file__, "--tether", str(os.getpid())]
    assert subprocess.run([*command, "sh", "-c", "cat; exit 7"], input=b"", check=False).returncode == 7
    assert subprocess.run([*command, "/nowhere"], stderr=subprocess.DEVNULL, check=False).returncode == 127
    with running_program([*command, "sleep", "60"]) as process:
        wait_for(lambda: psutil.Process(process.pid).children(), "it has started")
        process.terminate()
        assert process.wait(LIMIT_S) == 128 + signal.SIGKILL
