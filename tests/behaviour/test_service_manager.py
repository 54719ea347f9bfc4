"""Notifications to systemd: the service is ready, it stops, and its event loop runs."""

import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import pytest

from service.systemd import ServiceManager
from tests.harness.service import Service, scripted_model, serving
from tests.harness.waiting import LIMIT_S, is_alive, wait_for, wait_until

PERIOD_S = 0.3


class Manager:
    """The socket of a service manager, and the messages it got."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.setblocking(False)
        self.heard: list[str] = []

    def close(self) -> None:
        self._socket.close()

    def says(self, line: str) -> int:
        """Return how often a message was sent so far."""
        while True:
            try:
                self.heard += self._socket.recv(4096).decode().splitlines()
            except BlockingIOError:
                return self.heard.count(line)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(str(tmp_path / "notify"))
    yield made
    made.close()


def test_a_service_reports_its_start_and_stop_and_feeds_its_watchdog(
    tmp_path: Path, free_ports: Callable[[int], int], manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """READY comes with HTTP and not with the first slow engine; the watchdog is fed until the end.

    Source: specification, "Service manager".
    """
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", str(int(PERIOD_S * 1_000_000)))
    models = {"m": scripted_model(free_ports(1), load=60)}
    with serving(tmp_path / "s", free_ports(1), models, ready=False) as service:
        wait_for(lambda: manager.says("READY=1"), "it has said that it serves")
        assert service.http.get("/readyz").status_code == 503
        fed = manager.says("WATCHDOG=1")
        wait_for(lambda: manager.says("WATCHDOG=1") >= fed + 3, "the watchdog is fed", 10 * PERIOD_S)
        assert not manager.says("STOPPING=1")
        assert service.stop() == 0
        assert manager.says("STOPPING=1") == 1
    assert f"STATUS=serving at {service.url}" in manager.heard
    assert manager.heard.index("READY=1") < manager.heard.index("STOPPING=1")


def test_a_service_killed_by_the_watchdog_logs_its_stacks_and_leaves_no_process(
    tmp_path: Path, free_ports: Callable[[int], int], manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Systemd sends SIGABRT: the stacks are in the log, and the guardians end the engines."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    service = Service(tmp_path / "s", free_ports(1), {"m": scripted_model(free_ports(1))})
    service.start()
    tree = service.tree()
    assert len(tree) == 2
    assert service.process is not None
    assert manager.says("WATCHDOG=1")
    service.process.send_signal(signal.SIGABRT)
    assert service.process.wait(LIMIT_S) == -signal.SIGABRT
    wait_for(lambda: not any(map(is_alive, tree)), "its guardian and its engine have ended")
    assert "Fatal Python error: Aborted" in service.log()
    assert 'File "' in service.log()
    service.http.close()


async def test_a_loop_that_hangs_feeds_no_watchdog(tmp_path: Path, manager: Manager) -> None:
    """Only the loop may feed it: a thread would report a dead loop as alive."""
    environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "60000", "WATCHDOG_PID": ""}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ServiceManager.of(environment).feed_watchdog)
        await wait_until(lambda: manager.says("WATCHDOG=1") >= 2, "it is fed")
        fed = manager.says("WATCHDOG=1")
        with pytest.raises(AssertionError, match="never"):
            wait_for(lambda: manager.says("WATCHDOG=1") > fed, "never, while this loop stands", 0.3)
        await wait_until(lambda: manager.says("WATCHDOG=1") > fed, "it is fed again")
        tasks.cancel_scope.cancel()


def test_a_reload_is_notified_at_its_beginning_and_end(tmp_path: Path, manager: Manager) -> None:
    """Systemd waits for the second message, also if the reload has failed."""
    told = ServiceManager.of({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    with pytest.raises(KeyError), told.reloading("serving"):
        assert manager.says("RELOADING=1") == 1
        assert [line for line in manager.heard if line.startswith("MONOTONIC_USEC=")]
        assert not manager.says("READY=1")
        raise KeyError
    assert manager.says("READY=1") == 1


async def test_a_name_of_the_abstract_namespace_works(tmp_path: Path) -> None:
    """Podman and user managers use such names."""
    name = f"roundhouse-{tmp_path.name}-{id(tmp_path)}"
    listener = Manager(f"\0{name}")
    ServiceManager.of({"NOTIFY_SOCKET": f"@{name}"}).tell_ready("here")
    assert listener.says("READY=1") == 1
    listener.close()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WATCHDOG_USEC": "1000"},
        {"NOTIFY_SOCKET": "/nowhere/at/all"},
        {"NOTIFY_SOCKET": "/nowhere/at/all", "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"},
        {"NOTIFY_SOCKET": "/nowhere/at/all", "WATCHDOG_USEC": "soon"},
    ],
    ids=["no manager", "no socket", "no watchdog", "of another process", "no number"],
)
async def test_a_service_without_a_watchdog_feeds_none(environment: dict[str, str]) -> None:
    """It returns at once, and a manager that does not answer costs one line in the log."""
    manager = ServiceManager.of(environment)
    with anyio.fail_after(5):
        await manager.feed_watchdog()
    manager.tell_ready("nobody hears")
