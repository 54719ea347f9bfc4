"""An OpenAI-compatible server that answers with real servers' recorded answers.

It imports nothing of ours. ``--answers`` is a JSON object: a text in a request's messages, and its answer as ``{status,
headers, body}``. Every other request gets "pong", as a stream or whole; with ``--rest TEXT`` it gets the answer of that
text. With ``--record`` each request's body is kept as a line.
"""

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

PONG: dict[str, Any] = {"id": "x", "object": "chat.completion.chunk", "model": "m", "created": 1}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--rest", help="the text whose answer everybody else gets")
    parser.add_argument("--record", type=Path)
    return parser.parse_known_args()[0]


class Server:
    """Answers one request a connection."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._answers: dict[str, dict[str, Any]] = json.loads(options.answers.read_text("utf-8"))
        self._rest = options.rest
        self._record = options.record

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read a request, answer it and close."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            sizes = [line.split(":")[1] for line in head.split("\r\n") if line.lower().startswith("content-length:")]
            body = await reader.readexactly(int(sizes[0])) if sizes else b""
            self._answer(head.split()[1], body, writer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if not body:
            is_known = path.split("?", maxsplit=1)[0] in ("/v1/models", "/health")
            return _send(writer, 200 if is_known else 404, b'{"object": "list", "data": [{"id": "m"}]}')
        request = json.loads(body)
        if self._record is not None:
            with self._record.open("a") as record:
                record.write(json.dumps(request) + "\n")
        said = json.dumps([message["content"] for message in request.get("messages", [])])
        key = next((text for text in self._answers if f"<{text}>" in said), self._rest)
        if key is not None:
            told = self._answers[key]
            return _send(writer, told["status"], told["body"].encode(), told.get("headers") or {})
        if not request.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": "pong"}, "finish_reason": "stop"}
            return _send(writer, 200, json.dumps({**PONG, "choices": [choice]}).encode())
        deltas: list[dict[str, Any]] = [{"delta": {"content": "pong"}}, {"delta": {}, "finish_reason": "stop"}]
        frames = [json.dumps({**PONG, "choices": [{"index": 0, **delta}]}) for delta in deltas]
        stream = "".join(f"data: {frame}\n\n" for frame in [*frames, "[DONE]"])
        return _send(writer, 200, stream.encode(), {"content-type": "text/event-stream"})


def _send(writer: asyncio.StreamWriter, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    told = {"content-type": "application/json", **(headers or {}), "content-length": str(len(body))}
    lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in told.items()), "connection: close"]
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + body)


async def _main() -> None:
    options = _options()
    server = await asyncio.start_server(Server(options).serve, options.host, options.port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
