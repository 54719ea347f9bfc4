"""A program that ends by an exception, without ``stop`` or ``shutdown``, shows its traceback at once."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ENGINE_PROGRAM
from tests.harness.processes import running_program
from tests.harness.waiting import LIMIT_S, is_alive, wait_for

ROOT = Path(__file__).parents[2]
COMMAND = f"({sys.executable!r}, '-I', '-S', {str(ENGINE_PROGRAM)!r})"
WORKER = """
import asyncio
from workers import Worker, WorkerSpec
from workers.spec import EngineKind

async def main():
    worker = Worker(WorkerSpec(engine=EngineKind.LLAMA_SERVER, command={command}, port={port}))
    await worker.start()
    print(worker.snapshot().pid, flush=True)
    raise RuntimeError("a defect of the program")

asyncio.run(main())
"""
AGENTS = """
import asyncio
import psutil
from roundhouse import EngineKind, InferenceEngine, WorkerSpec

async def main():
    spec = WorkerSpec(engine=EngineKind.LLAMA_SERVER, command={command})
    game = InferenceEngine(spec, max_agents_per_gpu=1, ports=({port}, {port}))
    await game.register_agent(agent_id="a", model_ckpt="town")
    await game.run("a", "Who?", step="act", max_tokens=3)
    print(*(each.pid for each in psutil.Process().children(recursive=True)), flush=True)
    raise RuntimeError("a defect of the program")

asyncio.run(main())
"""


@pytest.mark.system
@pytest.mark.parametrize("program", [WORKER, AGENTS], ids=["Worker", "InferenceEngine"])
def test_a_program_that_ends_by_an_exception_does_so_at_once(free_ports: Callable[[int], int], program: str) -> None:
    """Its author sees the traceback instead of a hang; no process is left."""
    code = program.format(command=COMMAND, port=free_ports(1))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    argv = [sys.executable, "-c", code]
    with running_program(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        pids = [int(pid) for pid in running.stdout.readline().split()]
        assert pids, running.stderr.read()
        wait_for(lambda: running.poll() is not None, "the program ends", LIMIT_S / 4)  # it used to take 31 s
        assert "RuntimeError: a defect of the program" in running.stderr.read()
    wait_for(lambda: not any(map(is_alive, pids)), "nothing of it is left")
