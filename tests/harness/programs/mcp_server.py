"""An MCP server of the SDK's own making, for tests: ``stdio``, or a port for streamable HTTP.

``leave`` leaves a child that ignores SIGTERM in a session of its own, ``end`` ends the server in the middle of a call,
``learn`` gives it one more tool.
"""

import os
import signal
import subprocess
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tests")


@server.tool()
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Fail as tools do."""
    raise ToolError("the cupboard is bare")


@server.tool()
def leave() -> int:
    """Leave a child behind, and return its pid."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", code], start_new_session=True).pid


@server.tool()
def wait() -> str:
    """Take very long."""
    time.sleep(300)
    return "done"


@server.tool()
def own_pid() -> int:
    """Return the server's pid."""
    return os.getpid()


@server.tool()
def learn(tool: str) -> str:
    """Have one more tool from now on."""
    server.add_tool(own_pid, name=tool)
    return tool


@server.tool()
def end() -> str:
    """End the server in the middle of the call."""
    os.kill(os.getpid(), signal.SIGKILL)
    return "unreachable"


if sys.argv[1] == "stdio":
    server.run("stdio")
else:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
