"""An MCP server of revision 2025-11-25 in plain JSON lines, for tests: it keeps a count, and a record of what it read.

``mcp_counter.py FOLDER``: each line that is read is appended to FOLDER/record. ``count`` counts up, in memory alone.
``late`` is answered, with its argument, once FOLDER/go is there; a cancel does not change that. ``halves`` begins a
line on both outputs, which ends when FOLDER/go is there; nothing is read before that. With STUBBORN in the environment
the end of standard input and SIGTERM end nothing.
"""

import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[1])
POLL_S = 0.02
NUMBER = {"type": "object", "properties": {"n": {"type": "number"}}}
TOOLS = [{"name": name, "inputSchema": NUMBER} for name in ("count", "late", "halves")]


class Counter:
    """All of its state."""

    def __init__(self) -> None:
        self.count = 0
        self.late: list[tuple[object, object]] = []
        self.rests: list[tuple[int, bytes]] = []

    def take(self, message: dict[str, Any]) -> None:
        """Answer, now or later."""
        number, method = message.get("id"), message["method"]
        if number is None:
            return
        if method == "initialize":
            about = {"name": "counter", "version": "1"}
            capabilities: dict[str, object] = {"tools": {}}
            say(number, protocolVersion="2025-11-25", capabilities=capabilities, serverInfo=about)
        elif method == "tools/list":
            say(number, tools=TOOLS)
        elif method == "ping":
            say(number)
        elif method == "tools/call":
            self.call(number, message["params"]["name"], message["params"].get("arguments", {}))
        else:
            put(1, {"jsonrpc": "2.0", "id": number, "error": {"code": -32601, "message": "no such method"}})

    def call(self, number: object, name: str, arguments: dict[str, object]) -> None:
        """Do what a tool does."""
        if name == "late":
            self.late.append((number, arguments["n"]))
            return
        self.count += 1
        if name == "halves":
            line = json.dumps(answer(number, {"count": self.count, "pid": os.getpid()})).encode() + b"\n"
            for fd, whole in ((1, line), (2, b"a word in two halves\n")):
                os.write(fd, whole[:10])
                self.rests.append((fd, whole[10:]))
            return
        put(1, answer(number, {"count": self.count, "pid": os.getpid()}))

    def go(self) -> None:
        """Send the messages that were held back."""
        for fd, rest in self.rests:
            os.write(fd, rest)
        for number, n in self.late:
            put(1, answer(number, {"n": n}))
        self.rests, self.late = [], []


def answer(number: object, value: dict[str, object]) -> dict[str, object]:
    """Return the message that answers a call."""
    content = [{"type": "text", "text": json.dumps(value)}]
    return {"jsonrpc": "2.0", "id": number, "result": {"content": content}}


def say(number: object, **result: object) -> None:
    put(1, {"jsonrpc": "2.0", "id": number, "result": result})


def put(fd: int, message: dict[str, object]) -> None:
    os.write(fd, json.dumps(message).encode() + b"\n")


def main() -> None:
    """Serve until standard input ends."""
    counter, half = Counter(), b""
    if "STUBBORN" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("counting", file=sys.stderr, flush=True)
    while True:
        if (FOLDER / "go").exists():
            counter.go()
        if not select.select([] if counter.rests else [0], [], [], POLL_S)[0]:
            continue
        data = os.read(0, 65536)
        while not data:
            if "STUBBORN" not in os.environ:
                return
            select.select([], [], [], POLL_S)
        *lines, half = (half + data).split(b"\n")
        with (FOLDER / "record").open("ab") as record:
            record.writelines(line + b"\n" for line in lines)
        for line in lines:
            counter.take(json.loads(line))


if __name__ == "__main__":
    main()
