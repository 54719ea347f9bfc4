"""Which MCP servers of an earlier program are kept."""

import os

import msgspec
import pytest

from workers.process.handed_over import HeldLink, HeldServer, HeldTool
from workers.process.identity import ProcessId
from workers.tools.mcp import McpServer

SERVER = McpServer(name="s", command=("a", "b"), env={"X": "1", "Y": "2"})


def held(*, pid: int, started: int) -> HeldServer:
    link = HeldLink(pid=pid, started=started, stdin_fd=3, stdout_fd=4, stderr_fd=5, unsent=b"\xff", last_id=3)
    tool = HeldTool(name="t", description="d", parameters={"type": "object"})
    return HeldServer(
        model="m", name="s", launch=SERVER.launch, link=link, negotiated="{}", is_discovered=True, tools=[tool]
    )


def test_a_server_that_would_be_started_the_same_way_is_kept() -> None:
    """It is identified by its process, not by the number alone; its state survives the file."""
    own = ProcessId.of(os.getpid())
    assert own is not None
    kept = held(pid=own.pid, started=own.started)
    assert kept.fault(SERVER.launch) is None
    assert held(pid=own.pid, started=own.started + 1).fault(SERVER.launch) == "it has died"
    assert msgspec.json.decode(msgspec.json.encode(kept), type=HeldServer) == kept


@pytest.mark.parametrize(
    "other",
    [
        McpServer(name="s", command=("a", "c"), env={"X": "1", "Y": "2"}),
        McpServer(name="s", command=("a b",), env={"X": "1", "Y": "2"}),
        McpServer(name="s", command=("a", "b"), env={"X": "1", "Y": "3"}),
        McpServer(name="s", command=("a", "b"), env={"X": "1"}),
    ],
)
def test_another_program_or_environment_is_another_server(other: McpServer) -> None:
    """The server is started again."""
    own = ProcessId.of(os.getpid())
    assert own is not None
    assert held(pid=own.pid, started=own.started).fault(other.launch) == "it would be started differently"


def test_the_order_of_variables_does_not_count() -> None:
    """A file may list them in any order."""
    assert McpServer(name="s", command=("a", "b"), env={"Y": "2", "X": "1"}).launch == SERVER.launch
