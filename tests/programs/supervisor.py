"""A Roundhouse in little: starts one engine under its guardian, says where, and waits to be killed."""

import os
import sys

import anyio

from workers.process import Command, run_engine


async def main() -> None:
    """Run argv as an engine for ever."""
    async with run_engine(
        Command(argv=tuple(sys.argv[1:]), env=dict(os.environ)), lambda _stream, _data: None
    ) as engine:
        print(engine.pid, flush=True)
        await anyio.sleep_forever()


anyio.run(main, backend_options={"use_uvloop": True})
