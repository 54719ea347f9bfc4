"""A minimal Roundhouse: keeps one worker in a state directory, prints its processes, and waits to be killed.

supervisor.py STATE_DIR PORT [--fork] ENGINE [ARGUMENT ...] --fork: it forks a helper, as a pool of the operator's tools
would, which outlives it and keeps its pipes open.
"""

import multiprocessing
import sys
import time
from pathlib import Path

import anyio
import psutil

from workers import EngineKind, Worker, WorkerSpec


def _hold_on() -> None:
    time.sleep(60)


async def main() -> None:
    """Keep argv's engine running for ever."""
    state_dir, port, *command = sys.argv[1:]
    is_forking = command[0] == "--fork"
    command = command[is_forking:]
    spec = WorkerSpec(
        engine=EngineKind.LLAMA_SERVER, port=int(port), command=command, state_dir=Path(state_dir), slots=1
    )
    async with Worker(spec) as worker:
        pid = worker.snapshot().pid
        assert pid is not None
        helper = multiprocessing.get_context("fork").Process(target=_hold_on, daemon=True)
        if is_forking:
            helper.start()
        print(pid, psutil.Process(pid).ppid(), helper.pid or 0, flush=True)
        await anyio.sleep_forever()


anyio.run(main, backend_options={"use_uvloop": True})
