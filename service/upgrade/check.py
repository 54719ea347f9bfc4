"""A child with the new code says whether it can go on where this program stops: asked here, answered here too.

The child runs the very command that the service runs, with one more flag: so it imports all, reads the configuration
and looks at the store as the next program would. An older Roundhouse does not know the flag, and so refuses.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import anyio
import msgspec

from service import __version__
from service.config.schema import Config
from service.errors import UpgradeRefused
from service.node.database_choice import schema_fault
from service.upgrade import handover
from service.upgrade.verdict import Bounds, Facts, Plan, UpgradeVerdict, judge
from workers.fleet import Fleet
from workers.handover import launch_of_held, launches_of
from workers.process import guardian
from workers.process.registry import run_id
from workers.spec import WorkerSpec

FLAG: Final = "--upgrade-check"
LIMIT_S: Final = 60.0  # imports take a second or several; a model of our own that is gone is made again
SAID_CHARS: Final = 2000  # of what a child that failed has printed


def facts_of(config: Config, fleet: Fleet) -> Facts:
    """Return what this program is bound to, and its engines."""
    return Facts(
        handover=handover.VERSION,
        roundhouse=__version__,
        running=[launch_of_held(worker) for worker in fleet.held().workers],
        bounds=_bounds(config),
    )


async def ask_child(argv: Sequence[str], facts: Facts) -> UpgradeVerdict:
    """Return the verdict of a child that runs ``argv``.

    Raises:
        UpgradeRefused: it gave none.
    """
    # On a tether: a check must not outlive us any more than an engine.
    tether = [sys.executable, "-I", "-S", str(Path(guardian.__file__)), guardian.TETHER, str(os.getpid())]
    command = [*tether, *argv, FLAG]
    environment = {**os.environ, guardian.MARK_TO_BE: run_id()}
    try:
        with anyio.fail_after(LIMIT_S):
            ended = await anyio.run_process(
                command, input=msgspec.json.encode(facts), check=False, env=environment, start_new_session=True
            )
    except TimeoutError as error:
        raise UpgradeRefused(f"the new code gave no verdict within {LIMIT_S:g} s") from error
    except OSError as error:
        raise UpgradeRefused(f"no process can be started to look at the new code: {error}") from error
    if ended.returncode:
        said = ended.stderr.decode(errors="replace").strip()[-SAID_CHARS:]
        raise UpgradeRefused(f"the new code cannot start: {said or f'status {ended.returncode}'}")
    try:
        return msgspec.json.decode(ended.stdout.splitlines()[-1], type=UpgradeVerdict)
    except (IndexError, msgspec.MsgspecError) as error:
        raise UpgradeRefused(f"the new code gives no verdict: {error}") from error


def answer_check(config: Config, specs: Sequence[WorkerSpec]) -> bytes:
    """Return this code's verdict on the facts that standard input brings, as JSON.

    Raises:
        UpgradeRefused: they cannot be read.
    """
    try:
        facts = msgspec.json.decode(sys.stdin.buffer.read(), type=Facts)
    except msgspec.MsgspecError as error:
        raise UpgradeRefused(f"what the running service tells of itself cannot be read: {error}") from error
    plan = Plan(
        handover=handover.VERSION,
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
