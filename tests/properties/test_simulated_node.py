"""One whole node under a seed: engines die, hang and refuse, commits fail, jobs are cancelled, the node is killed."""

import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random
from unittest.mock import patch

import anyio
import pytest

from tests.conftest import ENGINE_PROGRAM
from tests.harness.frozen import digests_of, frozen, run_seeds
from tests.harness.simulated_node import simulate
from tests.harness.virtual_loop import VirtualLoop
from tests.harness.virtual_machine import EngineProcess, Machine, ScriptedEngine
from tests.harness.waiting import LIMIT_S
from workers.process import child
from workers.process.child import Command, run_engine
from workers.process.identity import EngineExit

QUICK, CHUNKS = 1, 10  # the others take too long for every run of the tests
SEEDS, SOAK_SEEDS = 5, 500  # seeds in a chunk


@pytest.mark.parametrize(
    "chunk", [*range(QUICK), *(pytest.param(chunk, marks=pytest.mark.system) for chunk in range(QUICK, CHUNKS))]
)
def test_no_event_of_a_node_loses_or_doubles_work(chunk: int, request: pytest.FixtureRequest) -> None:
    """All jobs end, each turn is recorded once as an engine said it, and the core's tables agree after each event.

    No innocent turn fails, no turn runs on two engines at once, and no process is left. Fifty seeds; thousands in a
    soak.
    """
    count = SOAK_SEEDS if request.config.getoption("--soak") else SEEDS
    ran = run_seeds("simulated_node", range(chunk * count, (chunk + 1) * count))
    faults = [line for line in ran.stdout.splitlines() if line.startswith("  seed ")]
    replay = "PYTHONHASHSEED=0 python -m tests.harness.simulated_node --trace SEED"
    assert (faults, ran.returncode) == ([], 0), f"{ran.stderr[-2000:]}\nagain: {replay}"
    assert len(ran.stdout.splitlines()) == count
    if count == SEEDS:
        assert digests_of(ran) == frozen("simulated_node", digests_of(ran)), "events, actions and records as before"


def test_one_seed_gives_one_run() -> None:
    """A failure that its seed does not reproduce cannot be repaired."""
    first, second = simulate(4), simulate(4)
    assert first.faults == []
    assert len(first.trace) > 100
    assert first.trace == second.trace


# A scripted process under a scripted guardian ends as a real one does


Contract = Callable[[Command], Awaitable[None]]
Run = Callable[[Contract, int], None]


def run_really(contract: Contract, port: int) -> None:
    argv = (sys.executable, "-I", "-S", str(ENGINE_PROGRAM), "--port", str(port))

    async def bounded() -> None:
        with anyio.fail_after(LIMIT_S):
            await contract(Command(argv=argv, env={}))

    anyio.run(bounded)


def run_scripted(contract: Contract, port: int) -> None:
    chance = Random(1)  # noqa: S311
    loop = VirtualLoop(chance)
    chance.random = lambda: 0.0  # type: ignore[method-assign] # one that obeys SIGTERM

    def make(process: EngineProcess, options: Namespace) -> ScriptedEngine:
        return ScriptedEngine(process, options)

    machine = Machine(loop, chance, make)
    command = Command(argv=("engine", "--port", str(port)), env={})

    async def bounded() -> None:
        with anyio.fail_after(LIMIT_S):
            await contract(command)

    with patch.object(child, "GuardianLink", machine.guardian_type()):
        anyio.run(bounded, backend_options={"loop_factory": lambda: loop})
    assert machine.running == []


@asynccontextmanager
async def answering(command: Command) -> AsyncIterator[child.EngineProcess]:
    """Run an engine for a block, which begins when it answers."""
    port = int(command.argv[command.argv.index("--port") + 1])
    async with run_engine(command, lambda *_: None) as engine:
        while True:
            try:
                stream = await anyio.connect_tcp("127.0.0.1", port)
            except OSError:
                continue
            await stream.aclose()
            break
        yield engine


@pytest.mark.parametrize("run", [run_really, run_scripted])
def test_an_engine_that_is_asked_to_end_ends_with_a_status(run: Run, free_ports: Callable[[int], int]) -> None:
    """This is a guardian's contract, for real processes and for those of a virtual machine."""

    async def contract(command: Command) -> None:
        async with answering(command) as engine:
            assert engine.pid > 0
            assert not engine.is_gone
            await engine.terminate()
            ended = await engine.wait_gone()
        assert (ended.status, ended.signal) == (0, None)

    run(contract, free_ports(1))


@pytest.mark.parametrize("run", [run_really, run_scripted])
def test_an_engine_whose_block_is_left_is_killed(run: Run, free_ports: Callable[[int], int]) -> None:
    """This is a guardian's contract, for real processes and for those of a virtual machine."""

    async def contract(command: Command) -> None:
        async with answering(command) as engine:
            pass
        assert engine.is_gone
        assert isinstance(engine.exit, EngineExit)
        assert (engine.exit.status, engine.exit.signal) == (None, 9)
        with pytest.raises(OSError, match="All connection attempts failed"):
            await (await anyio.connect_tcp("127.0.0.1", int(command.argv[-1]))).aclose()

    run(contract, free_ports(1))
