"""Plays vLLM's control endpoints, and misbehaves in the phase that a file names.

The file is a list of {"port", "phase", "do": stall | hold | fail | end | absent | wait}; port 0 is every engine,
``hold`` goes on when the file says so no more, ``wait`` is a thread of the extension that does not get on, and the
phase ``begin`` is the program's own start. Its weights are a word: the name of the checkpoint that it was started from,
or got last; its answers say it. With ``--record`` it notes its start, every POST and SIGTERM in a file, a line of JSON
each: {"pid", "model", "asked", "asleep"}, the last as it was when it was asked.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

HOLD_POLL_S = 0.02
PHASES = {
    "/pause": "pause",
    "/resume": "resume",
    "/update_weight_version": "finish",
    "/start_weight_update": "start",
    "/update_weights": "receive",
    "/finish_weight_update": "finish",
    "roundhouse_reload": "receive",
    "roundhouse_state": "start",
    "roundhouse_receive": "receive",
    "roundhouse_apply": "finish",
    "roundhouse_join": "join",
    "roundhouse_keep": "keep",
    "/v1/load_lora_adapter": "load",
    "/v1/unload_lora_adapter": "unload",
    "/sleep": "sleep",
    "/wake_up": "wake",
}


REFUSALS = {
    "absent": (404, {"detail": "Not Found"}),
    "fail": (500, {"error": {"message": "as it was told", "type": "InternalServerError", "code": 500}}),
}


class Engine:
    """One engine's weights, and whether it stands still."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.weights = Path(options.model).name
        self.sent = ""
        self.going = asyncio.Event()
        self.going.set()
        self.is_asleep = False
        self.receiver = {"key": "", "group": "none", "stage": "idle", "update": 0, "received": 0, "total": 0}
        self.file: Path | None = None
        self.adapters = [given.split("=")[0] for given in options.lora_modules]
        self.in_memory = set(range(1, len(self.adapters) + 1))
        self.numbers = dict(zip(self.adapters, self.in_memory, strict=True))

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = head.split("\r\n")
        method, path, _ = lines[0].split(" ")
        sizes = [int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length:")]
        body = json.loads(await reader.readexactly(sizes[0])) if sizes and sizes[0] else {}
        if method == "POST":
            self.record(path)
        path = path.split("?")[0]
        if path == "/v1/chat/completions":
            await self._talk(writer, body["model"])
        elif path == "/metrics" and self.options.metrics is not None:
            _send(writer, 200, self.options.metrics.read_text())
        else:
            status, document = await self._control(method, path, body)
            _send(writer, status, document)
        await writer.drain()
        writer.close()

    def record(self, asked: str) -> None:
        if self.options.record is None:
            return
        told = {"pid": os.getpid(), "model": self.options.served_model_name, "asked": asked, "asleep": self.is_asleep}
        with self.options.record.open("a") as file:  # several engines share it: one write is one line
            file.write(json.dumps(told) + "\n")

    def end(self) -> None:
        self.record("SIGTERM")
        os._exit(0)

    async def _talk(self, writer: asyncio.StreamWriter, model: str) -> None:
        if model in self.adapters:
            said = f"{self.weights}+{model}"
        elif model == self.options.served_model_name:
            said = self.weights
        else:
            _send(writer, 404, {"error": {"message": f"there is no {model}", "type": "NotFoundError", "code": 404}})
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        await self.going.wait()
        delta = {"choices": [{"delta": {"content": said}, "finish_reason": "stop"}]}
        writer.write(b"data: " + json.dumps(delta).encode() + b"\n\ndata: [DONE]\n\n")

    async def _control(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, object]:
        name = body.get("method", path)
        fault = await self._suffer(PHASES.get(name, ""))
        if fault == "end":
            os._exit(1)
        if fault in REFUSALS:
            return REFUSALS[fault]
        if method == "GET":
            return 200, {"world_size": 1, "data": [{"id": "m", "max_model_len": 4096}]}
        if path == "/collective_rpc":
            return 200, {"results": [self._call(name, body.get("kwargs", {}))]}
        if path in {"/pause", "/resume"}:
            (self.going.clear if path == "/pause" else self.going.set)()
        elif path in {"/sleep", "/wake_up"}:
            self.is_asleep = path == "/sleep"
        elif path.endswith("load_lora_adapter"):
            self._adapt(path, body["lora_name"])
        elif path == "/finish_weight_update":
            self.weights = self.sent
        elif path == "/update_weights":
            self.sent = body["update_info"]["names"][0]
        return 200, {}

    async def _suffer(self, phase: str) -> str | None:
        """Stand still as long as the file says; return what else it says."""
        if self._fault(phase) == "stall":
            await asyncio.Event().wait()
        while self._fault(phase) == "hold":  # noqa: ASYNC110 - a file tells of no change
            await asyncio.sleep(HOLD_POLL_S)
        return self._fault(phase)

    def _adapt(self, path: str, name: str) -> None:
        if path == "/v1/unload_lora_adapter":  # the name alone, as vLLM does
            self.adapters.remove(name)
        else:
            self.adapters.append(name)
            self.numbers[name] = 1 + max(self.numbers.values(), default=0)
            self.in_memory.add(self.numbers[name])

    def _call(self, name: str, told: dict[str, Any]) -> object:
        if name == "list_loras":
            return str(self.in_memory)
        if name == "remove_lora":
            self.in_memory.remove(told["lora_id"])
            return None
        if name == "roundhouse_reload":
            self.weights = Path(told["weights_path"]).name
        match name.removeprefix("roundhouse_"):
            case "join":
                self.file = Path(f"{told['file']}.0")
                group = "joining" if self._fault("join") == "wait" else "ready"
                self.receiver |= {"key": told["place"]["key"], "group": group}
            case "receive":
                self.sent = told["tensors"][0]["name"]
                self.receiver |= {"stage": "received", "update": told["update"], "received": 1, "total": 1}
            case "apply":
                self.weights = self.sent
                self.receiver["stage"] = "applied"
            case "keep":
                self._keep(Path(told["folder"]))
            case "drop":
                self.receiver |= {"stage": "idle", "group": "none"}
            case _:
                pass
        if self.file is not None:
            half = self.file.with_suffix(".half")
            half.write_text(json.dumps(self.receiver))
            half.replace(self.file)
        return json.dumps(self.receiver)

    def _keep(self, folder: Path) -> None:
        self.receiver["stage"] = "keeping"
        if self._fault("keep") != "wait":
            shutil.copytree(self.options.model, folder)
            self.receiver["stage"] = "kept"

    def is_held(self) -> bool:
        return self._fault("begin") == "stall"

    def _fault(self, phase: str) -> str | None:
        try:
            told = json.loads(self.options.fault_file.read_text())
        except FileNotFoundError:
            return None
        mine = (each["do"] for each in told if each["phase"] == phase and self._is_meant(each))
        return next(mine, None)

    def _is_meant(self, fault: dict[str, Any]) -> bool:
        return fault["port"] in {0, self.options.port} and fault.get("pid", os.getpid()) == os.getpid()


def _send(writer: asyncio.StreamWriter, status: int, document: object) -> None:
    body = (document if isinstance(document, str) else json.dumps(document)).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)


async def serve(options: argparse.Namespace) -> None:
    engine = Engine(options)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, engine.end)
    if options.uds is None:
        server = await asyncio.start_server(engine.handle, "127.0.0.1", options.port)
    else:
        server = await asyncio.start_unix_server(engine.handle, options.uds)
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--uds")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--metrics", type=Path, help="GET /metrics answers with what is in this file")
    parser.add_argument("--model")
    parser.add_argument("--fault-file", type=Path, default=Path("/nonexistent"))
    parser.add_argument("--served-model-name")
    parser.add_argument("--lora-modules", nargs="*", default=[])
    options, _ = parser.parse_known_args()
    Engine(options).record("begin")
    while Engine(options).is_held():
        time.sleep(0.02)
    asyncio.run(serve(options))


if __name__ == "__main__":
    main()
