"""Starts one program under a guardian, prints its pid, and waits to be killed."""

import os
import sys

import anyio

from workers.process.child import Command, run_engine


async def main() -> None:
    """Run argv as an engine for ever."""
    command = Command(argv=tuple(sys.argv[1:]), env=dict(os.environ))
    async with run_engine(command, lambda _stream, _data: None) as engine:
        print(engine.pid, flush=True)
        await anyio.sleep_forever()


anyio.run(main, backend_options={"use_uvloop": True})
