"""What all tests share: a clean environment, the loop that we ship, limits instead of sleeps, ports, engines."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests.harness.ports import find_ports
from tests.harness.postgres import PostgresServer, running_postgres
from tests.harness.programs import PROGRAMS
from tests.harness.waiting import LIMIT_S, wait_for
from workers.devices.visible import DEVICE_VARIABLES
from workers.engine.embedded.tiny_model import ensure_tiny_model
from workers.spec import EngineKind, Flag, WorkerId, WorkerSpec, WorkerTimeouts

ENGINE_PROGRAM = PROGRAMS / "engine.py"
SHARED: set[int] = set()  # the processes that all tests of this process share; they end with it
SpecFactory = Callable[..., WorkerSpec]

# A machine that pauses is no finding of a test.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_configure() -> None:
    # A shell's background job is born deaf to SIGINT, and so would be every program that is started here.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="try random faults a thousand times, not a dozen")
    parser.addoption("--soak-minutes", type=float, default=60.0, help="how long a soak has everything at once")
    parser.addoption("--soak-kills", type=int, default=1000, help="how many kills of upgrades a soak tries")
    parser.addoption(
        "--soak-record", type=Path, help="a folder that keeps them; run again, the soak goes on from there"
    )
    parser.addoption("--llama-server", help="path of the real llama-server binary, for tests/engines")
    for name in ("vllm", "litellm", "trl", "trainers", "llama-cpp-python"):
        parser.addoption(f"--{name}-python", help=f"the Python of an environment that has {name}, for tests/engines")


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with running_postgres() as server:
        yield server


@pytest.fixture(autouse=True)
def clean_environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    names = set() if "engines" in request.path.parts else DEVICE_VARIABLES  # tests of engines use real GPUs
    for name in list(os.environ):
        if name.startswith("ROUNDHOUSE_") or name in names:
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def no_process_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process behind; a killed process has a second to die.

    Running engines makes this process a subreaper: it collects what a killed supervisor leaves.
    """
    if {"service", "cluster"} & {*request.fixturenames}:  # it outlives the test, and its own fixture sees to its end
        yield
        return
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield

    def left() -> list[psutil.Process]:
        found = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
        apart = [child for child in found if child.pid not in SHARED and not _is_of_postgres(child)]
        return [child for child in apart if not _collect(child)]

    wait_for(lambda: not left(), "no process of the test is left", limit_s=1.0)


def _is_of_postgres(child: psutil.Process) -> bool:
    """Whether it is of the server that all tests of this process share, and that ends with it."""
    try:
        return child.name() == "postgres"
    except psutil.NoSuchProcess:
        return True


def _collect(child: psutil.Process) -> bool:
    try:
        return child.status() == psutil.STATUS_ZOMBIE and os.waitpid(child.pid, os.WNOHANG)[0] == child.pid
    except (psutil.NoSuchProcess, ChildProcessError):
        return True


@pytest.fixture(scope="session")
def free_ports() -> Callable[[int], int]:
    return find_ports


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture
def scripted_spec(free_ports: Callable[[int], int]) -> SpecFactory:
    """Make the specification of a worker whose engine behaves as the given flags say."""

    def make(*, slots: int = 2, timeouts: WorkerTimeouts | None = None, port: int = 0, **flags: Flag) -> WorkerSpec:
        return WorkerSpec(
            id=WorkerId("scripted-0"),
            name="scripted",
            engine=EngineKind.LLAMA_SERVER,
            port=port or free_ports(1),
            slots=slots,
            command=(sys.executable, "-I", "-S", str(ENGINE_PROGRAM)),
            args=flags,
            timeouts=timeouts or WorkerTimeouts(start_s=LIMIT_S, stop_grace_s=LIMIT_S),
        )

    return make
