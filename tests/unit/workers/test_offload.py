"""Calls that may take long run in other processes, which belong to this program and never outlive it."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import anyio
import psutil
import pytest

from tests.harness.waiting import LIMIT_S, is_alive, wait_for, wait_until
from workers.errors import OffloadCrowded
from workers.offload.pool import CROWD, Purpose, offload, offloading


def spin(seconds: float) -> float:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
    return seconds


def wait(path: str) -> str:
    Path(path).with_suffix(".begun").touch()
    wait_for(Path(path).exists, "it may go on", 600.0)
    return path


def wait_and_tell(path: str) -> int:
    wait(path)
    return os.getpid()


def note(path: str) -> None:
    """Wait for ever, and leave a mark on each run."""
    with Path(path).open("a") as file:
        file.write(".")
    signal.pause()


def die(path: str) -> str:
    """Kill the process that runs this, as the kernel does when memory is short, unless the path exists."""
    if not Path(path).exists():
        Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def die_always(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(text: str) -> None:
    raise ValueError(text)


async def test_a_result_and_an_error_come_back() -> None:
    """One process runs both, one after the other."""
    async with offloading():
        pids = {await offload(os.getpid, limit_s=LIMIT_S) for _ in range(3)}
        assert len(pids - {os.getpid()}) == 1
        with pytest.raises(ValueError, match="no such thing"):
            await offload(refuse, "no such thing", limit_s=LIMIT_S)
        assert await offload(os.getpid, limit_s=LIMIT_S) in pids
        with pytest.raises(TimeoutError):
            await offload(spin, 60.0, limit_s=0.05)
    assert not any(map(is_alive, pids))


async def test_without_a_pool_each_call_has_a_process_of_its_own() -> None:
    """Nothing is left of it afterwards."""
    pid = await offload(os.getpid, limit_s=LIMIT_S)
    assert not is_alive(pid)


async def test_a_process_that_dies_costs_one_more_try(tmp_path: Path) -> None:
    """A call whose process dies each time fails."""
    async with offloading():
        assert await offload(die, str(tmp_path / "died"), limit_s=LIMIT_S) == "alive"
        with pytest.raises(TimeoutError, match="died"):
            await offload(die_always, "", limit_s=LIMIT_S)


async def test_a_call_that_takes_too_long_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for a call that outruns its own time and for one that waits for ever; errors go to the caller."""
    async with offloading():
        await offload(spin, 0.0, limit_s=LIMIT_S)  # its process is there, and knows this file
        monkeypatch.setattr("workers.offload.pool.START_LIMIT_S", 1.5)
        with pytest.raises(TimeoutError):
            await offload(note, str(tmp_path / "begun"), limit_s=0.1)
        with pytest.raises(FileNotFoundError):
            await offload(os.stat, str(tmp_path / "nowhere"), limit_s=LIMIT_S)
    assert (tmp_path / "begun").read_text() == "."


async def test_answers_do_not_wait_for_documents(tmp_path: Path) -> None:
    """The number of waiting documents is bounded, so that callers need not wait too long."""
    async with offloading(), anyio.create_task_group() as tasks:
        go = str(tmp_path / "go")
        waiting: list[str] = []

        async def look_at_document() -> None:
            waiting.append(await offload(wait, go, limit_s=LIMIT_S, purpose=Purpose.DOCUMENTS))

        for _ in range(CROWD + 2):
            tasks.start_soon(look_at_document)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(OffloadCrowded):
            await offload(wait, go, limit_s=LIMIT_S, purpose=Purpose.DOCUMENTS)
        assert await offload(spin, 0.0, limit_s=LIMIT_S) == 0.0
        assert waiting == []
        (tmp_path / "go").touch()
    assert len(waiting) == CROWD + 2


SCRIPT = textwrap.dedent("""
    import asyncio, os, time
    from workers.offload.pool import offload, offloading

    print("the program runs", flush=True)

    async def main():
        async with offloading():
            print(await offload(os.getpid, limit_s=60), flush=True)
            await offload(time.sleep, 600, limit_s=600)

    asyncio.run(main())
""")


def test_a_killed_program_leaves_no_process_and_is_run_once(tmp_path: Path) -> None:
    """The program has no ``__main__`` guard, as people write them.

    Ctrl-C reaches only the program, and SIGKILL ends its processes.
    """
    (tmp_path / "program.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    program = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py")], stdout=subprocess.PIPE, text=True, env=environment
    )
    with program:
        assert program.stdout is not None
        assert program.stdout.readline() == "the program runs\n"
        helper = int(program.stdout.readline())
        assert os.getpgid(helper) != os.getpgid(program.pid)
        program.kill()
        assert program.stdout.read() == ""
    wait_for(lambda: not is_alive(helper), "its process is gone", 1.0)


async def test_a_call_that_outlives_its_pool_leaves_no_process(tmp_path: Path) -> None:
    """The call returns its result, and its process ends."""
    pids: list[int] = []

    async def call() -> None:
        pids.append(await offload(wait_and_tell, str(tmp_path / "go"), limit_s=LIMIT_S))

    async with anyio.create_task_group() as tasks:
        async with offloading():
            tasks.start_soon(call)
            await wait_until((tmp_path / "go.begun").exists, "it runs")
        (tmp_path / "go").touch()
    assert [is_alive(pid) for pid in pids] == [False]


async def test_a_cancelled_call_is_ended(tmp_path: Path) -> None:
    """Its process ends too."""
    async with offloading():
        pid = await offload(os.getpid, limit_s=LIMIT_S)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: offload(wait, str(tmp_path / "never"), limit_s=60.0))
            await wait_until((tmp_path / "never.begun").exists, "it runs")
            tasks.cancel_scope.cancel()
        assert not is_alive(pid)


def leave() -> None:
    raise SystemExit(0)


def print_in_a_process() -> int:
    subprocess.run([sys.executable, "-c", "print('noise')"], check=True)
    os.write(1, b"noise\n")
    return 3


def leave_a_process_behind(file: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(file).write_text(str(child.pid))
    signal.pause()


async def test_an_exit_of_a_function_is_no_exit_of_its_caller() -> None:
    """It comes back as any other error."""
    with pytest.raises(RuntimeError, match="SystemExit"):
        await offload(leave, limit_s=20)


async def test_what_a_process_of_a_function_prints_is_no_answer() -> None:
    """Its output goes to the standard error, with what the function writes itself."""
    assert await offload(print_in_a_process, limit_s=20) == 3


async def test_the_number_of_a_process_that_has_ended_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process group may have it by then, and is left alone."""
    killed: list[int] = []
    async with offloading():
        pid = await offload(os.getpid, limit_s=20)
        os.kill(pid, signal.SIGKILL)
        await wait_until(lambda: not psutil.pid_exists(pid), "it is waited for")
        with monkeypatch.context() as patch:
            patch.setattr(os, "killpg", lambda group, _signal: killed.append(group))
            assert await offload(os.getpid, limit_s=20) != pid
    assert killed == []


async def test_the_processes_of_a_function_end_with_it(tmp_path: Path) -> None:
    """The limit of a reward is of real time, and ends all that it has started."""
    file = tmp_path / "pid"
    with pytest.raises(TimeoutError):
        await offload(leave_a_process_behind, str(file), limit_s=1.0, purpose=Purpose.REWARDS)
    pid = int(file.read_text())
    await wait_until(lambda: not is_alive(pid), "it has ended")
