"""Facts of the kernel: real processes, real signals, real pipes."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec
import psutil
import pytest

from tests.conftest import ENGINE_PROGRAM
from tests.harness.programs import PROGRAMS
from tests.harness.waiting import LIMIT_S, is_alive, wait_for, wait_until
from workers.errors import SpawnFailed
from workers.process import guardian
from workers.process.child import Command, OnOutput, run_engine
from workers.process.identity import EngineExit

HOLDER = PROGRAMS / "holder.py"
ROOT = Path(__file__).parents[2]
PYTHON = (sys.executable, "-I", "-S")


def ignore(_stream: int, _data: bytes) -> None:
    """Read output and drop it."""


def collect(into: bytearray) -> OnOutput:
    def take(_stream: int, data: bytes) -> None:
        into.extend(data)

    return take


def command(*argv: str) -> Command:
    return Command(argv=argv, env=dict(os.environ))


def python(code: str) -> Command:
    return command(*PYTHON, "-c", code)


def start_holder(*engine: str) -> tuple[subprocess.Popen[bytes], int]:
    supervisor = subprocess.Popen(
        [sys.executable, str(HOLDER), *engine],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert supervisor.stdout is not None
    return supervisor, int(supervisor.stdout.readline())


def _ignored_signals(pid: int) -> set[int]:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn")), 16)
    return {number for number in range(1, 65) if mask & (1 << (number - 1))}


def _has_content(file: Path) -> bool:
    return file.exists() and bool(file.read_text())


def kill(supervisor: subprocess.Popen[bytes]) -> None:
    supervisor.kill()
    supervisor.communicate(timeout=LIMIT_S)


def test_an_engine_that_ignores_sigterm_is_killed_all_the_same() -> None:
    """SIGKILL cannot be ignored."""
    code = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)"
    supervisor, pid = start_holder(*PYTHON, "-c", code)
    wait_for(lambda: signal.SIGTERM in _ignored_signals(pid), "the engine ignores SIGTERM")
    os.kill(pid, signal.SIGTERM)
    kill(supervisor)
    wait_for(lambda: not is_alive(pid), "the engine is dead", limit_s=1.0)


async def test_the_engine_leads_its_own_group_and_gets_no_signal_of_ours() -> None:
    """There is one process group per engine, with default signal handlers, whatever its guardian ignores."""
    with anyio.fail_after(LIMIT_S):
        async with run_engine(command("sleep", "60"), ignore) as engine:
            assert os.getpgid(engine.pid) == os.getsid(engine.pid) == engine.pid
            assert not _ignored_signals(engine.pid) & {*guardian.IGNORED, signal.SIGCHLD, signal.SIGXFSZ}
            await engine.terminate()
            assert await engine.wait_gone() == EngineExit(signal=signal.SIGTERM)


async def test_leaving_the_block_kills_the_tree(tmp_path: Path) -> None:
    """However the block is left, no process of it is left."""
    pid_file = tmp_path / "pid"
    code = (
        "import os, time, signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        f"        open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n"
        "        time.sleep(60)\n"
        "    os._exit(0)\n"
        "time.sleep(60)\n"
    )
    with anyio.fail_after(LIMIT_S):
        with pytest.raises(ExceptionGroup) as caught:
            async with run_engine(python(code), ignore) as engine:
                await wait_until(lambda: pid_file.exists() and pid_file.read_text(), "the grandchild runs")
                raise ZeroDivisionError
        assert caught.group_contains(ZeroDivisionError)
        assert not is_alive(engine.pid)
        assert not is_alive(int(pid_file.read_text()))
        with anyio.move_on_after(0.2) as scope:
            async with run_engine(command("sleep", "60"), ignore) as engine:
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert not is_alive(engine.pid)


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("import sys; sys.exit(0)", EngineExit(status=0)),
        ("import sys; sys.exit(3)", EngineExit(status=3)),
        ("import os; os.kill(os.getpid(), 11)", EngineExit(signal=signal.SIGSEGV)),
    ],
    ids=["0", "3", "SIGSEGV"],
)
async def test_an_exit_is_reported_unchanged(code: str, ending: EngineExit) -> None:
    """A status is a status and a signal is a signal."""
    with anyio.fail_after(LIMIT_S):
        async with run_engine(python(code), ignore) as engine:
            assert await engine.wait_gone() == ending


async def test_an_engine_starts_in_its_folder(tmp_path: Path) -> None:
    """Its program and its PWD variable agree; a missing folder is reported before anything runs elsewhere."""
    told = tmp_path / "told"
    code = f"import os; open({str(told)!r}, 'w').write(os.getcwd() + ' ' + os.environ['PWD'] + str(dict(os.environ)))"
    folder = tmp_path / "with a blank"
    folder.mkdir()
    given = msgspec.structs.replace(python(code), folder=str(folder))
    with anyio.fail_after(LIMIT_S):
        async with run_engine(given, ignore) as engine:
            assert await engine.wait_gone() == EngineExit(status=0)
        assert told.read_text().startswith(f"{folder} {folder}")
        assert guardian.FOLDER not in told.read_text()
        folder.rmdir()
        with pytest.raises(SpawnFailed, match=r"cannot be run: .*No such file"):
            async with run_engine(given, ignore):
                pass


async def test_an_engine_that_ends_takes_its_descendants_with_it(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """A remaining process would hold the device, and the engine's output."""
    daemon = tmp_path / "daemon"
    output = bytearray()
    argv = (*PYTHON, str(ENGINE_PROGRAM), "--port", str(free_ports(1)), "--daemon", str(daemon))
    with anyio.fail_after(LIMIT_S):
        async with run_engine(command(*argv), collect(output)) as engine:
            await wait_until(lambda: b"listening" in output, "the engine listens")
            await wait_until(lambda: _has_content(daemon), "its daemon runs")
            await engine.terminate()
            assert await engine.wait_gone() == EngineExit(status=0)
            assert not is_alive(int(daemon.read_text()))


@pytest.mark.parametrize("program", ["/no/such/program", __file__], ids=["missing", "not executable"])
async def test_a_program_that_cannot_be_executed_is_reported(program: str) -> None:
    """The reason is the kernel's, in words."""
    with anyio.fail_after(LIMIT_S), pytest.raises(SpawnFailed, match=r"No such file|Permission denied"):
        async with run_engine(command(program), ignore):
            pass


async def test_a_flood_of_output_blocks_no_process_and_the_last_words_arrive() -> None:
    """Output is always drained. What does not fit is dropped and counted, and the end is kept."""
    output = bytearray()
    code = (
        "print('x' * 99 + '\\n', end='', flush=False)\nfor n in range(200_000): print(f'{n:099d}')\nprint('last words')"
    )
    with anyio.fail_after(LIMIT_S):
        async with run_engine(python(code), collect(output)) as engine:
            assert await engine.wait_gone() == EngineExit(status=0)
            await wait_until(lambda: output.endswith(b"last words\n"), "the last words have come")


async def test_an_engine_is_never_blocked_by_a_supervisor_that_does_not_read() -> None:
    """A full pipe would stop an engine in write(): the guardian drops output instead, and reports how much."""
    code = "import sys\nfor n in range(100_000): print(f'{n:099d}')\nprint('last words')"
    with anyio.fail_after(LIMIT_S):
        argv = [*PYTHON, str(Path(guardian.__file__)), guardian.GUARD, str(os.getpid()), *python(code).argv]
        process = await anyio.open_process(argv)
        assert process.stderr is not None
        assert process.stdout is not None
        assert process.stdin is not None
        reports = b""
        while b'"empty"' not in reports:
            reports += await process.stderr.receive()
        output = b"".join([chunk async for chunk in process.stdout])
        assert b"bytes of output dropped here]" in output
        assert output.endswith(b"last words\n")
        assert len(output) < 3 * 1024 * 1024
        await process.stdin.aclose()
        assert await process.wait() == 0
        await process.aclose()


async def test_a_guardian_that_hangs_is_killed_and_the_engine_with_it() -> None:
    """Even the last wait has a bound, and happens once."""
    with anyio.fail_after(LIMIT_S):
        async with run_engine(command("sleep", "60"), ignore, leave_limit_s=0.2) as engine:
            parent = psutil.Process(engine.pid).parent()
            assert parent is not None
            parent.suspend()
        await wait_until(lambda: not is_alive(engine.pid), "the engine is dead")
        assert not is_alive(parent.pid)


def test_the_guardian_reaps_orphans_while_the_engine_runs() -> None:
    """Short-lived helpers must not pile up as zombies under the guardian."""
    code = (
        "import os, time\n"
        "for _ in range(20):\n"
        "    if os.fork() == 0:\n"
        "        os.fork()\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
        "print('forked', flush=True)\n"
        "time.sleep(60)\n"
    )
    supervisor, pid = start_holder(*PYTHON, "-c", code)
    try:
        parent = psutil.Process(pid).parent()
        assert parent is not None
        wait_for(lambda: not psutil.Process(pid).children(), "the engine's children have ended")
        wait_for(lambda: [child.pid for child in parent.children()] == [pid], "the orphans are reaped")
    finally:
        kill(supervisor)
