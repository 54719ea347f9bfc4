"""Records which lines of the program run for a request: a job, a fork, a caller's words, a completion.

Requests arrive as bytes at a connection. A job and a fork are recorded up to their transcripts. All four are recorded
on one node that has answered a request of each kind before, so that lines needed only at a start do not count.
"""

import asyncio
import http.client
import inspect
import io
import json
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

from uvicorn.server import ServerState

from service.api.app import Front, build_app
from service.api.door.connections import Door
from service.api.door.http_server import server_config
from service.config.source import LoadedConfig
from service.node.node import Node
from service.node.reloader import Reloader
from service.upgrade.upgrader import Upgrader
from tests.harness.quiet_node import on_node
from tests.harness.virtual import pass_time
from tests.harness.virtual_loop import MemoryTransport, VirtualLoop

ROOT = Path(__file__).parents[2]
OURS = tuple(f"{ROOT / name}/" for name in ("service", "workers", "transport", "client/roundhouse_client"))
LONG_ENOUGH_S = 5.0  # a job of four turns ends within
IDLE_S = 120.0  # every tick of the node has come by then
Lines = frozenset[tuple[str, int]]
Trace = Any  # what ``sys.settrace`` takes and a trace function returns


class Recorder:
    """Lines of our functions; lines run by an import do not count."""

    def __init__(self) -> None:
        self._lines: set[tuple[str, int]] | None = None

    def note(self, frame: FrameType, event: str, _argument: object) -> Trace:
        code = frame.f_code
        if self._lines is None:
            return None
        if event == "call" and not (code.co_filename.startswith(OURS) and code.co_flags & inspect.CO_OPTIMIZED):
            return None
        self._lines.add((code.co_filename, frame.f_lineno))
        return self.note

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch this thread, and those that begin in the block: the store's."""
        before = sys.gettrace()
        sys.settrace(self.note)
        threading.settrace(self.note)
        try:
            yield
        finally:
            threading.settrace(cast("Trace", None))
            sys.settrace(before)

    @contextmanager
    def recording(self) -> Iterator[set[tuple[str, int]]]:
        """Fill a set in this block."""
        lines: set[tuple[str, int]] = set()
        self._lines = lines
        try:
            yield lines
        finally:
            self._lines = None


class Surface:
    """The HTTP surface of a node, each request on a connection of its own."""

    def __init__(self, node: Node, loaded: LoadedConfig) -> None:
        reloader, upgrader = Reloader(node, loaded, lambda: loaded), Upgrader(node, listener_fd=0)
        self._config = server_config(Front(build_app(node, loaded.config, [], {}, reloader, upgrader)), 100)
        self._config.load()
        self._state = ServerState()

    async def ask(self, method: str, path: str, document: object = None) -> Any:  # noqa: ANN401 - JSON
        """Return the answer's document."""
        body = b"" if document is None else json.dumps(document).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
        reader, transport = self._connect()
        transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.read()
        transport.close()
        read = http.client.HTTPResponse(cast("Any", _Received(answer)))
        read.begin()
        text = read.read()
        assert read.status < 300, text
        return json.loads(text)

    def _connect(self) -> tuple[asyncio.StreamReader, MemoryTransport]:
        loop = cast("VirtualLoop", asyncio.get_running_loop())
        reader = asyncio.StreamReader(loop=loop)
        theirs = asyncio.StreamReaderProtocol(reader, loop=loop)
        door = Door(config=self._config, server_state=self._state, app_state={}, _loop=loop)
        client, server = MemoryTransport(loop.network, theirs), MemoryTransport(loop.network, door)
        client.peer, server.peer = server, client
        theirs.connection_made(client)
        door.connection_made(server)
        return reader, client


class _Received:
    """Bytes as the standard library reads them from a socket."""

    def __init__(self, received: bytes) -> None:
        self._received = received

    def makefile(self, *_arguments: object) -> io.BytesIO:
        return io.BytesIO(self._received)


def agent(name: str, **more: object) -> dict[str, Any]:
    return {"id": name, "model": "m0", "system": f"You are agent={name}.", "params": {"max_tokens": 4}, **more}


TALK = {"id": "c", "prompt": "Talk of topic=c0."}
CAST = [agent("a"), agent("b", speak_after_within_round=["a"])]
JOB = {"agents": CAST, "rounds": 2, "conversations": [TALK]}
WITH_CALLER = {"agents": [agent("a"), {"id": "guest", "by": "caller", "speak_after_within_round": ["a"]}]}
COMPLETION = {"model": "m0", "messages": [{"role": "user", "content": "agent=a. topic=c0"}], "max_tokens": 4}


async def _job(surface: Surface, document: object) -> str:
    """Post a job and read its transcript once it has ended."""
    job_id: str = (await surface.ask("POST", "/v1/jobs", document))["id"]
    await pass_time(LONG_ENOUGH_S)
    turns = (await surface.ask("GET", f"/v1/jobs/{job_id}/result"))["conversations"][0]["turns"]
    assert {turn["state"] for turn in turns} == {"completed"}
    return job_id


async def _awaited(surface: Surface) -> str:
    """Post a job whose last turn waits for a caller; return the place of that turn."""
    job_id = (await surface.ask("POST", "/v1/jobs", {**WITH_CALLER, "conversations": [TALK]}))["id"]
    await pass_time(LONG_ENOUGH_S)
    assert (await surface.ask("GET", f"/v1/jobs/{job_id}"))["progress"]["turns"]["awaited"] == 1
    return f"/v1/jobs/{job_id}/conversations/c/turns/guest/0"


async def _say(surface: Surface, place: str) -> None:
    """Speak for the caller; the conversation and its job end with that."""
    assert (await surface.ask("POST", place, {"text": "Yes."}))["state"] == "completed"
    await pass_time(1.0)


async def _complete(surface: Surface) -> None:
    assert (await surface.ask("POST", "/v1/chat/completions", COMPLETION))["choices"]


def recorded_walks() -> dict[str, Lines]:
    """Return the lines that run in each walk, without those that run on an idle node as well."""
    recorder = Recorder()

    async def scenario(node: Node, loaded: LoadedConfig) -> dict[str, Lines]:
        surface = Surface(node, loaded)
        source = await _job(surface, JOB)
        before = {"job": source, "conversation": "c", "before": {"agent": "b", "round": 1}}
        fork = {"agents": CAST, "rounds": 2, "conversations": [{"id": "c", "from": before}]}
        await _job(surface, fork)
        await _say(surface, await _awaited(surface))
        await _complete(surface)
        place = await _awaited(surface)
        walks: dict[str, Callable[[], Awaitable[object]]] = {
            "idle": lambda: pass_time(IDLE_S),
            "job": lambda: _job(surface, JOB),
            "fork": lambda: _job(surface, fork),
            "say": lambda: _say(surface, place),
            "door": lambda: _complete(surface),
        }
        found: dict[str, Lines] = {}
        for name, walk in walks.items():
            with recorder.recording() as lines:
                await walk()
            found[name] = frozenset(lines)
        idle = found.pop("idle")
        return {name: lines - idle for name, lines in found.items()}

    with recorder.installed():
        return on_node(scenario)


def files_of(lines: Lines) -> list[str]:
    """Return the files of lines, from the repository's root."""
    return sorted({str(Path(name).relative_to(ROOT)) for name, _ in lines})


def walks_as_files() -> dict[str, list[str]]:
    """Return the files of each walk; with ``_own``, those with lines that run in no plain job."""
    walks = recorded_walks()
    own = {f"{name}_own": files_of(walks[name] - walks["job"]) for name in ("fork", "say")}
    return {name: files_of(lines) for name, lines in walks.items()} | own
