"""A process without a free descriptor: checks are repeated, and no process or device is reported as gone."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
import pytest

from tests.harness.waiting import is_alive, wait_until
from workers.devices.device_health import DeviceHealth
from workers.devices.readers import MachineReader
from workers.process import guardian, orphans
from workers.process.identity import ProcessId
from workers.process.orphans import children_now, end_orphans, patrol
from workers.process.registry import run_id


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Leave this process no descriptor for a block, as a tool does that leaks files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(int(each.name) for each in Path("/proc/self/fd").iterdir()) + 1, hard)
    )
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(2))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def orphan() -> Iterator[subprocess.Popen[bytes]]:
    """A child with our mark, as after the kill of its guardian."""
    environment = {**os.environ, guardian.MARK: run_id()}
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE, env=environment)
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        child.returncode = -signal.SIGKILL  # it may be collected already
        assert child.stdin is not None
        child.stdin.close()


async def test_a_patrol_without_descriptors_looks_again(
    orphan: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed patrol would end the service and all engines."""
    monkeypatch.setattr(orphans, "PATROL_S", 0.01)
    async with anyio.create_task_group() as tasks:
        with no_descriptors():
            tasks.start_soon(patrol)
            await anyio.wait_all_tasks_blocked()
        await wait_until(lambda: not is_alive(orphan.pid), "the orphan is found once there are descriptors again")
        tasks.cancel_scope.cancel()


async def test_a_check_without_descriptors_reports_no_orphan_as_gone(
    orphan: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine would count as ended although its processes still hold its memory and its port."""
    monkeypatch.setattr(orphans, "LIMIT_S", 0.05)
    with no_descriptors():
        assert not await end_orphans()
        assert not await end_orphans(orphan.pid)
    assert is_alive(orphan.pid)
    assert await end_orphans()
    assert not is_alive(orphan.pid)


def test_a_living_process_is_not_dead_for_lack_of_a_descriptor(orphan: subprocess.Popen[bytes]) -> None:
    """The registry would forget it, and the next start would not find what it leaves."""
    identity = ProcessId.of(orphan.pid)
    assert identity is not None
    with no_descriptors():
        assert identity.is_alive


def test_children_are_checked_again_without_descriptors() -> None:
    """An upgrade that finds none of them goes on; it ends no engine for it, and the patrol checks again."""
    with no_descriptors():
        children_now()


async def test_devices_are_read_again_without_descriptors() -> None:
    """Reading the host's memory opens a file; its failure is no reason to end the service."""
    health = DeviceHealth(MachineReader())
    with no_descriptors():
        await health.refresh()
    await health.refresh()
    assert health.memory
