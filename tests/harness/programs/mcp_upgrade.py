"""A program that replaces itself by execve while its MCP server stays, as the service does, and reports what it saw.

``mcp_upgrade.py SCENARIO FOLDER COMMAND...``: the first program calls tools and hands its server over, and the second
one continues with it. Each prints one JSON line. Scenarios: ``counts``, ``late``, ``halves``, ``broken`` and ``pids``.
"""

import json
import logging
import math
import os
import sys
from pathlib import Path
from typing import Any

import anyio
import msgspec

from tests.harness.waiting import LIMIT_S, wait_until
from workers.process.handed_over import HeldServer
from workers.process.registry import continue_run, run_id
from workers.tools import mcp
from workers.tools.mcp import McpServer, McpTools
from workers.tools.runner import ToolUse

SCENARIO, FOLDER, COMMAND = sys.argv[1], Path(sys.argv[2]), tuple(sys.argv[3:])
LEFT = FOLDER / "left"
MORE_THAN_A_PIPE = 200_000
LATE = 8  # calls of the second program, so that their numbers would meet those of the first


async def call(tools: McpTools, name: str, **arguments: object) -> Any:  # noqa: ANN401 - whatever the server says
    return await tools.run(ToolUse(call_id="c", name=name, arguments=arguments, job_name="a job"))


async def begin(tools: McpTools) -> object:
    """Run the first program's part."""
    if SCENARIO == "pids":
        await call(tools, "learn", tool="later")
        return await call(tools, "own_pid")
    seen = [await call(tools, "count"), await call(tools, "count")]
    if SCENARIO in ("late", "halves"):
        with anyio.move_on_after(0.3):
            await call(tools, SCENARIO, n=-1)
        await wait_until(lambda: _is_cut_off(tools), "the call is cut off")
    if SCENARIO == "halves":
        vars(mcp)["PING_AFTER_S"] = math.inf  # it reads nothing, and would be taken for dead
        with anyio.move_on_after(0.3):
            await call(tools, "count", text="x" * MORE_THAN_A_PIPE)
        held = tools.hand_over_server("m")
        assert held is not None
        assert 0 < len(held.link.unsent) < MORE_THAN_A_PIPE
    return seen


async def go_on(tools: McpTools) -> object:
    """Run the second program's part."""
    if SCENARIO in ("pids", "counts"):
        vars(tools)["_list_due_at"] = 0.0
        await tools.list_again()
    if SCENARIO == "pids":
        return await call(tools, "own_pid")
    if SCENARIO == "halves":
        (FOLDER / "go").touch()
    if SCENARIO == "late":
        with anyio.move_on_after(0.3):
            await call(tools, "late", n=-2)
        told: dict[int, object] = {}

        async def ask(number: int) -> None:
            told[number] = await call(tools, "late", n=number)

        async with anyio.create_task_group() as tasks:
            for number in range(LATE):
                tasks.start_soon(ask, number)
            await wait_until(lambda: _asked() == LATE + 2, "all are asked for")
            (FOLDER / "go").touch()
        return [told[number] for number in range(LATE)]
    return [await call(tools, "count"), await call(tools, "count")]


def _is_cut_off(tools: McpTools) -> bool:
    held = tools.hand_over_server("m")
    assert held is not None
    if SCENARIO == "halves":
        return bool(held.link.received and held.link.said)
    return "notifications/cancelled" in (FOLDER / "record").read_text()


def _asked() -> int:
    return (FOLDER / "record").read_text().count('"late"')


async def live(left: HeldServer | None) -> None:
    """Run one of the two programs; the first one does not return."""
    server = McpServer(name="kept", command=COMMAND)
    tools = McpTools(server, dict(os.environ), left)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tools.run_connection)
        with anyio.fail_after(LIMIT_S):
            await tools.wait_settled()
            seen = await (begin(tools) if left is None else go_on(tools))
        state = tools.state
        print(json.dumps({"seen": seen, "tools": state.tools, "trouble": state.trouble}), flush=True)
        if left is None:
            hand_over(tools)
        tasks.cancel_scope.cancel()


def hand_over(tools: McpTools) -> None:
    """Start the second program."""
    held = tools.hand_over_server("m")
    assert held is not None
    if SCENARIO == "broken":
        held = msgspec.structs.replace(held, negotiated="{}")
    LEFT.write_bytes(msgspec.json.encode((run_id(), held)))
    for fd in held.link.descriptors:
        os.set_inheritable(fd, True)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - our own command


def main() -> None:
    """Run the part that is due."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    left = None
    if LEFT.exists():
        run, left = msgspec.json.decode(LEFT.read_bytes(), type=tuple[str, HeldServer])
        continue_run(run)
        for fd in left.link.descriptors:
            os.set_inheritable(fd, False)
    anyio.run(live, left)


if __name__ == "__main__":
    main()
