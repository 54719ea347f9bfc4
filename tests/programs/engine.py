"""A scripted engine: takes llama-server's flags and speaks its chat API, in the way that a test asks for.

Standard library only, so that it starts quickly and under any interpreter. Each fault is one flag; what is not asked
for behaves as a healthy engine does.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--record", type=Path, help="append one JSON line a request: when it came, and its body")
    parser.add_argument("--echo", help="answer with what this pattern finds in the messages, instead of counting")
    parser.add_argument("--tokens", type=int, default=3, help="tokens of an answer")
    parser.add_argument("--interval", type=float, default=0.0, help="seconds between tokens")
    parser.add_argument("--prefill", type=float, default=0.0, help="seconds before the first token, with no byte sent")
    parser.add_argument("--load", type=float, default=0.0, help="seconds of 503 before it is ready")
    parser.add_argument("--exit-at-once", type=int, help="exit with this status before anything is served")
    parser.add_argument(
        "--exit-if", type=Path, help="exit with status 3 before anything is served if this file is there"
    )
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument(
        "--daemon", type=Path, help="double-fork a setsid child that holds the output; its pid goes here"
    )
    parser.add_argument("--flood", type=int, default=0, help="bytes of log at the start")
    parser.add_argument("--die-after", type=int, help="exit with status 0 after so many tokens of any answer")
    parser.add_argument("--die-on", help="exit when a prompt holds this text")
    parser.add_argument("--die-once", type=Path, help="with --die-on or --die-after: only while this file is not there")
    parser.add_argument("--stall-after", type=int, help="send so many tokens and then nothing more")
    parser.add_argument("--cut-after", type=int, help="send so many tokens and then half a frame, and close")
    parser.add_argument("--error-after", type=int, help="send so many tokens and then an error inside the stream")
    parser.add_argument("--reject", type=int, help="answer every request with this status")
    parser.add_argument("--reject-body", default='{"error": {"code": 500, "message": "no", "type": "server_error"}}')
    parser.add_argument("--deaf-after", type=int, help="live on and listen no more after so many answers")
    parser.add_argument("--html", action="store_true", help="answer requests with a 200 of HTML")
    return parser.parse_known_args()[0]


class Engine:
    """Serves one connection a request."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ready_at = time.monotonic() + options.load
        self.requests = 0
        self.deaf = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request and close."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            length = re.search(r"(?i)content-length: (\d+)", head)
            body = await reader.readexactly(int(length[1])) if length else b""
            await self._answer(head.split()[1], body, writer)
        writer.close()
        if self.requests == self.options.deaf_after:
            self.deaf.set()

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        options = self.options
        if time.monotonic() < self.ready_at:
            _send(writer, 503, b'{"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}')
        elif path == "/v1/models":
            _send(writer, 200, b'{"object": "list", "data": []}')
        elif path != "/v1/chat/completions":
            _send(writer, 404, b"{}")
        elif options.reject:
            _send(writer, options.reject, options.reject_body.encode())
        elif options.html:
            _send(writer, 200, b"<html>Welcome</html>", "text/html")
        else:
            await self._stream(json.loads(body), writer)
        await writer.drain()

    async def _stream(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        options = self.options
        self.requests += 1
        if options.record:
            entry = {"at": time.time(), "pid": os.getpid(), "request": request}
            with options.record.open("a") as file:
                file.write(json.dumps(entry) + "\n")
        if options.die_on and options.die_on in json.dumps(request["messages"]) and self._may_die():
            os._exit(1)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(options.prefill)
        words = self._words(request)
        for number, word in enumerate(words):
            await self._maybe_fail(number, writer)
            _event(writer, {"choices": [{"index": 0, "delta": {"content": word}}]})
            await writer.drain()
            await asyncio.sleep(options.interval)
        await self._maybe_fail(len(words), writer)
        _event(writer, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        _event(writer, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": len(words)}})
        writer.write(b"data: [DONE]\n\n")

    async def _maybe_fail(self, number: int, writer: asyncio.StreamWriter) -> None:
        options = self.options
        if number == options.die_after and self._may_die():
            os._exit(0)
        if number == options.stall_after:
            await asyncio.Event().wait()
        if number == options.cut_after:
            writer.write(b'data: {"choices": [{"del')
            raise ConnectionError
        if number == options.error_after:
            _event(writer, {"error": {"code": 500, "message": "Compute error.", "type": "server_error"}})
            raise ConnectionError

    def _may_die(self) -> bool:
        marker: Path | None = self.options.die_once
        if marker is None:
            return True
        if marker.exists():
            return False
        marker.touch()
        return True

    def _words(self, request: dict[str, Any]) -> list[str]:
        if self.options.echo:
            text = json.dumps(request["messages"])
            found = list(dict.fromkeys(re.findall(self.options.echo, text)))
            return [f"{word} " for word in found]
        return [f"word{number} " for number in range(self.options.tokens)]


def _send(writer: asyncio.StreamWriter, status: int, body: bytes, content_type: str = "application/json") -> None:
    writer.write(
        b"HTTP/1.1 %d X\r\nContent-Type: %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
        % (status, content_type.encode(), len(body), body)
    )


def _event(writer: asyncio.StreamWriter, document: dict[str, Any]) -> None:
    writer.write(b"data: " + json.dumps(document).encode() + b"\n\n")


def _leave_daemon(pid_file: Path) -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            pid_file.write_text(str(os.getpid()))
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(300)
        os._exit(0)
    os.wait()


async def _main(options: argparse.Namespace) -> None:
    engine = Engine(options)
    server = await asyncio.start_server(engine.serve, options.host, options.port)
    stop = asyncio.Event()
    if options.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print(f"scripted engine: listening on port {options.port}", flush=True)
    async with server:
        ends = [asyncio.ensure_future(event.wait()) for event in (stop, engine.deaf)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    await stop.wait()
    os._exit(0)


def main() -> None:
    """Fail at once, or serve."""
    options = _arguments()
    if options.exit_if and options.exit_if.exists():
        options.exit_at_once = 3
    if options.exit_at_once is not None:
        print("scripted engine: cannot allocate the universe", flush=True)
        sys.exit(options.exit_at_once)
    for start in range(0, options.flood, 100):
        print(f"{start:099d}")
    if options.daemon:
        _leave_daemon(options.daemon)
    asyncio.run(_main(options))


if __name__ == "__main__":
    main()
