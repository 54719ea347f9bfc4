"""A row of configurations laid out on this machine: its file, its tools, its attached servers, and the expectations.

Each model has an engine that answers with its own name and the question, and that keeps two files: its requests, and
its starts and ends.
"""

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import yaml

from tests.conftest import ENGINE_PROGRAM
from tests.harness.configurations import Row
from tests.harness.programs import PROGRAMS
from tests.harness.service import Document, recorded
from workers.requests.constraints import TRIAL_WORDS

PYTHON: Final = [sys.executable, "-I", "-S"]
LANES: Final = 2
PORTS: Final = 3  # each model's
KEYS: Final = {name: f"{name}-{'k' * 24}" for name in ("reader", "poster", "root")}
SCOPES: Final = {"reader": ["read"], "poster": ["read", "submit"], "root": ["admin"]}
TOOL: Final = {
    "type": "function",
    "function": {
        "name": "late",
        "description": "Say a number again.",
        "parameters": {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]},
    },
}
MODULE: Final = "def late(n: float) -> dict[str, float]:\n    return {'n': n}\n"
CACHE: Final = (
    'vllm:cache_config_info{engine="0",kv_cache_size_tokens="10000",block_size="16",'
    'kv_cache_max_concurrency="8.0"} 1.0\n'
    'vllm:kv_cache_usage_perc{engine="0"} 0.0\nvllm:num_preemptions_total{engine="0"} 0\n'
)
INVENTORY: Final = {
    "devices": [
        {"index": number, "uuid": f"GPU-{number}", "name": "NVIDIA H100", "memory_mib": 80_000} for number in range(2)
    ]
}
PARAMS: Final[Document] = {"temperature": 0.25, "max_tokens": 77}
OTHER_PARAMS: Final[Document] = {"temperature": 0.75, "max_tokens": 55}
OTHER_SLOTS: Final = 3
OTHER_REPLICAS: Final = {1: 2, 2: 1}
OTHER_PROMPT: Final = 9  # tokens that an engine with other args says its prompts have


def ports_of(row: Row) -> int:
    """Return how many successive ports it needs.

    It has a service, two replicas and a spare of each model and one more, and lanes.
    """
    return 1 + PORTS * (row.models + 1) + LANES


class LaidOut:
    """One row with its files below ``folder``; ``stack`` ends the programs started beside it, ``url`` runs tools."""

    def __init__(self, row: Row, folder: Path, first_port: int, database: str, stack: ExitStack) -> None:
        self.row, self.folder, self.port, self.url = row, folder, first_port, ""
        self.attached: dict[str, subprocess.Popen[bytes]] = {}
        self._database, self._stack = database, stack
        folder.mkdir(exist_ok=True)
        (folder / "weights").mkdir(exist_ok=True)
        (folder / "cache").write_text(CACHE)
        (folder / "row_tools.py").write_text(MODULE)
        (folder / "go").touch()  # the MCP server holds nothing back
        (folder / "inventory.yaml").write_text(yaml.safe_dump(INVENTORY))
        hashed = [
            {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), "scopes": SCOPES[name]}
            for name, key in KEYS.items()
        ]
        (folder / "keys.yaml").write_text(yaml.safe_dump(hashed))
        (folder / "keys.yaml").chmod(0o600)
        if row.tools == "http":
            self.url = stack.enter_context(_tools_over_http())
        self.names = [f"m{index}" for index in range(row.models)]
        self.models = {name: self.model(name) for name in self.names}

    @property
    def key(self) -> str | None:
        """The key with all scopes, if keys are required."""
        return None if self.row.keys == "none" else KEYS["root"]

    def server(self) -> Document:
        """Return the ``server`` section."""
        server: Document = {"address": "127.0.0.1"} if self.row.store == "cluster" else {}
        if self.row.keys == "file":
            return {**server, "keys_file": "keys.yaml"}
        if self.row.keys == "list":
            keys = [{"name": name, "key": key, "scopes": SCOPES[name]} for name, key in KEYS.items()]
            return {**server, "keys": keys}
        return server

    def sections(self) -> dict[str, Document]:
        """Return the sections beside server and models."""
        lanes = self.port + ports_of(self.row) - LANES
        each = LANES if self.row.devices == "none" else 1  # on each of two GPUs
        gpus: Document = {"ports": [lanes, lanes + LANES - 1], "max_agents_per_gpu": each}
        if self.row.devices == "inventory":
            gpus["inventory"] = "inventory.yaml"
        return {"gpus": gpus, "store": {"url": self._database or self.row.store}}

    def kind(self, name: str) -> str:
        """Return the kind of a model's engine."""
        return self.row.kind if name == "m0" else self.row.beside

    def is_on_lanes(self, name: str) -> bool:
        return self.row.placement == "lanes" or (self.row.placement == "mixed" and name == "m0")

    def model(self, name: str) -> Document:
        """Return a model of the configuration; an attached server is started."""
        row, kind, index = self.row, self.kind(name), int(name[1:])
        model: Document = {"engine": kind, "slots": 2}
        if kind == "attached":
            port = self.port + 1 + PORTS * index
            self._attach(name, port)
            model["url"] = f"http://127.0.0.1:{port}"
        else:
            model |= {"command": [*PYTHON, str(ENGINE_PROGRAM)], "args": self._flags(name)}
        if kind == "vllm":
            model["model"] = str(self.folder / "weights")
        if self.is_on_lanes(name):
            model["placement"] = "lanes"
        elif kind != "attached" and (kind != "vllm" or row.address == "port"):
            model["port"] = self.port + 1 + PORTS * index
        # A setting that a lane or an attached server refuses is left out beside it, and given otherwise.
        if not (row.placement == "mixed" and self.is_on_lanes(name)):
            numbers = {"replicas": (row.replicas, 1), "spares": (row.spares, 0)}
            model |= {key: number for key, (number, default) in numbers.items() if number != default}
        if row.devices == "listed" and not (row.placement == "mixed" and self.is_on_lanes(name)):
            model["devices"] = [0, "GPU-1"]
        if row.address != "default":
            model["socket_dir"] = False if row.address == "port" else "s"
        if row.capacity != "default":
            model["capacity"] = row.capacity
        if row.params == "some":
            model["params"] = dict(PARAMS)
        return {**model, **self._tools()}

    def job(self, names: list[str], topic: int) -> Document:
        """Return a job in which an agent of each of these models speaks twice."""
        tools = {"tools": [TOOL]} if self.row.tools != "none" else {}
        agents = [{"id": f"of-{name}", "model": name, "system": f"I-am-{name}.", **tools} for name in names]
        return {"rounds": 2, "agents": agents, "conversations": [{"id": "q", "prompt": f"TOPIC-{topic}."}]}

    def answer(self, name: str, topic: int) -> str:
        """Return that model's answer to that job, or at the door."""
        return f"I-am-{name} TOPIC-{topic} "

    def number(self, name: str) -> int:
        """Return the argument with which that model's engine calls the tool."""
        return 40 + int(name[1:])

    def heard(self, name: str) -> list[Document]:
        """Return the requests to that model's engines; a server that is not ours gets trials as well."""
        requests = recorded(self.folder / f"{name}.heard")
        if self.kind(name) != "attached":
            return requests
        return [request for request in requests if request["messages"][-1]["content"] != TRIAL_WORDS]

    def lives(self, name: str, what: str) -> list[int]:
        """Return the pids of that model's engines that have started, or that SIGTERM has ended."""
        file = self.folder / f"{name}.lives"
        lines = file.read_text().splitlines() if file.exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith(what)]

    def _flags(self, name: str) -> Document:
        call = {"name": "late", "arguments": json.dumps({"n": self.number(name)})}
        flags: Document = {
            "record": str(self.folder / f"{name}.heard"),
            "lives": str(self.folder / f"{name}.lives"),
            "echo": rf"I-am-{name}|TOPIC-\d+",
            "calls": json.dumps(call),
        }
        if self.kind(name) == "vllm":
            flags |= {"enable-auto-tool-choice": True, "cache-metrics": str(self.folder / "cache")}
        return flags

    def _attach(self, name: str, port: int) -> None:
        flags = [part for flag, value in self._flags(name).items() for part in (f"--{flag}", str(value))]
        server = subprocess.Popen([*PYTHON, str(ENGINE_PROGRAM), "--port", str(port), *flags])
        self._stack.callback(server.wait)
        self._stack.callback(server.kill)
        self.attached[name] = server

    def _tools(self) -> Document:
        if self.row.tools == "python":
            return {"tools": {"python": {"late": "row_tools:late"}}}
        if self.row.tools == "http":
            return {"tools": {"http": {"url": self.url}}}
        if self.row.tools == "mcp":
            command = [*PYTHON, str(PROGRAMS / "mcp_counter.py"), str(self.folder)]
            return {"tools": {"mcp": {"counter": {"command": command}}}}
        return {}


class _Tools(BaseHTTPRequestHandler):
    """Runs the tool."""

    def do_POST(self) -> None:
        asked: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"n": asked["arguments"]["n"]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@contextmanager
def _tools_over_http() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Tools) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def change_last(laid: LaidOut, document: Document) -> None:
    """Change a configuration in the way that the row says."""
    models: dict[str, Document] = document["models"]
    last, change = laid.names[-1], laid.row.change
    if change == "add":
        name = f"m{len(laid.names)}"
        models[name] = laid.model(name)
    elif change == "remove":
        del models[last]
    elif change == "params":
        models[last]["params"] = dict(OTHER_PARAMS)
    elif change == "slots":
        models[last]["slots"] = OTHER_SLOTS
    elif change == "resize":
        models[last]["replicas"] = OTHER_REPLICAS[laid.row.replicas]
    elif change == "args":
        models[last]["args"] = {**models[last].get("args", {}), "prompt-tokens": OTHER_PROMPT}
