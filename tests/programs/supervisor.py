"""A Roundhouse in little: keeps one worker in a state directory, says who is who, and waits to be killed.

supervisor.py STATE_DIR PORT ENGINE [ARGUMENT ...]
"""

import sys
from pathlib import Path

import anyio
import psutil

from workers import EngineKind, Worker, WorkerSpec


async def main() -> None:
    """Keep argv's engine running for ever."""
    state_dir, port, *command = sys.argv[1:]
    spec = WorkerSpec(
        engine=EngineKind.LLAMA_SERVER, port=int(port), command=command, state_dir=Path(state_dir), slots=1
    )
    async with Worker(spec) as worker:
        pid = worker.snapshot().pid
        assert pid is not None
        print(pid, psutil.Process(pid).ppid(), flush=True)
        await anyio.sleep_forever()


anyio.run(main, backend_options={"use_uvloop": True})
