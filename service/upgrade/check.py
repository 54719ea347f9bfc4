"""Asks a child with the new code whether it can take over; both sides of that exchange.

The child runs the service's own command with one more flag: so it imports, reads the configuration and checks the
store just as the next program would. An older Roundhouse does not know the flag, and so refuses.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio
import msgspec
from anyio.abc import ByteReceiveStream

from service import __version__
from service.config.schema import Config
from service.errors import UpgradeRefused
from service.node.database_choice import schema_fault
from service.upgrade.verdict import Bounds, Facts, Plan, UpgradeVerdict, judge
from workers.fleet import Fleet
from workers.handover import hand_over_engines, launch_of_held, launches_of
from workers.process import guardian, handed_over
from workers.process.registry import run_id
from workers.spec import WorkerSpec

FLAG: Final = "--upgrade-check"
LIMIT_S: Final = 60.0  # imports take some seconds, and a missing model of our own is made again
TAIL_BYTES: Final = 1024 * 1024  # kept bytes of each of its streams
SAID_CHARS: Final = 2000  # shown characters of a failed child's output


def facts_of(config: Config, fleet: Fleet) -> Facts:
    """Return this program's fixed settings and its engines."""
    held = hand_over_engines(fleet)
    return Facts(
        handover=handed_over.VERSION,
        roundhouse=__version__,
        running=[launch_of_held(worker) for worker in held.workers],
        unloaded=held.unloaded,
        bounds=_bounds(config),
    )


async def ask_child(argv: Sequence[str], facts: Facts) -> UpgradeVerdict:
    """Return the verdict of a child that runs ``argv``.

    Raises:
        UpgradeRefused: it gave no verdict.
    """
    # A tether ends the check with this process, as it does with engines.
    tether = [sys.executable, "-I", "-S", str(Path(guardian.__file__)), guardian.TETHER, str(os.getpid())]
    command = [*tether, *argv, FLAG]
    environment = {**os.environ, guardian.MARK_TO_BE: run_id()}
    try:
        with anyio.fail_after(LIMIT_S):
            status, answer, said = await _run(command, environment, msgspec.json.encode(facts))
    except TimeoutError as error:
        raise UpgradeRefused(f"the new code gave no verdict within {LIMIT_S:g} s") from error
    except OSError as error:
        raise UpgradeRefused(f"no process can be started to look at the new code: {error}") from error
    if status:
        words = said.decode(errors="replace").strip()[-SAID_CHARS:]
        raise UpgradeRefused(f"the new code cannot start: {words or f'status {status}'}")
    try:
        return msgspec.json.decode(answer.splitlines()[-1], type=UpgradeVerdict)
    except (IndexError, msgspec.MsgspecError) as error:
        raise UpgradeRefused(f"the new code gives no verdict: {error}") from error


async def _run(command: Sequence[str], environment: Mapping[str, str], sent: bytes) -> tuple[int, bytes, bytes]:
    """Return a program's exit status, and the ends of its two output streams."""
    async with await anyio.open_process(command, env=dict(environment), start_new_session=True) as process:
        tails = [bytearray(), bytearray()]
        async with anyio.create_task_group() as tasks:
            for stream, tail in zip((process.stdout, process.stderr), tails, strict=True):
                assert stream is not None  # noqa: S101 - opened as a pipe
                tasks.start_soon(_keep_tail, stream, tail)
            assert process.stdin is not None  # noqa: S101
            with suppress(anyio.BrokenResourceError):  # it ended without reading; its status says more
                await process.stdin.send(sent)
            await process.stdin.aclose()
            await process.wait()
        return process.returncode or 0, bytes(tails[0]), bytes(tails[1])


async def _keep_tail(stream: ByteReceiveStream, tail: bytearray) -> None:
    async for chunk in stream:
        tail += chunk
        del tail[:-TAIL_BYTES]


def answer_check(config: Config, specs: Sequence[WorkerSpec]) -> bytes:
    """Return this code's verdict, as JSON, on the facts from standard input.

    Raises:
        UpgradeRefused: the facts cannot be read.
    """
    try:
        facts = msgspec.json.decode(sys.stdin.buffer.read(), type=Facts)
    except msgspec.MsgspecError as error:
        raise UpgradeRefused(f"what the running service tells of itself cannot be read: {error}") from error
    plan = Plan(
        handover=handed_over.VERSION,
        roundhouse=__version__,
        wanted=launches_of(specs, os.environ),
        schema=schema_fault(config.store, config.server.state_dir),
        bounds=_bounds(config),
    )
    return msgspec.json.encode(judge(facts, plan))


def _bounds(config: Config) -> Bounds:
    server = config.server
    state_dir = str(server.state_dir.resolve())
    return Bounds(host=server.host, port=server.port, store=config.store.url, state_dir=state_dir)
