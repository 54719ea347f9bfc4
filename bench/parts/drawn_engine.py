"""An engine whose turns take drawn times: lognormal, by conversation, agent and round.

It recognises turns by their prompts: ``TOPIC-<job>-<conversation>``, the agent's name, and the round. It speaks
llama-server's dialect with ``--parallel`` slots; further requests wait, as in the real one.

python -m bench.parts.drawn_engine --port P --parallel N --log FILE --seed N --scale SECONDS
"""

import argparse
import asyncio
import json
import math
import re
import time
from pathlib import Path
from random import Random

SIGMA = 0.8
SCALES = {"a0": 0.5, "a1": 1.0, "a2": 2.0}
_TOPIC = re.compile(r"TOPIC-([\w.]+)-([\w.]+)")
_AGENT = re.compile(r"You are (\w+)\.")
_ROUND = re.compile(r"\(Round (\d+) of")
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def duration(seed: int, scale: float, job: str, conversation: str, agent: str, number: int) -> float:
    """Return the seconds of a turn."""
    chance = Random(f"{seed}/{job}/{conversation}/{agent}/{number}")
    return scale * SCALES.get(agent, 1.0) * math.exp(SIGMA * chance.gauss(0, 1))


class Engine:
    """Answers requests, and logs the begin and end of each in seconds of the monotonic clock."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._free = asyncio.Semaphore(options.parallel)
        self._log = options.log.open("a", buffering=1)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
            body = await reader.readexactly(int(length[1])) if length else b""
            if "/chat/completions" in head.partition("\r\n")[0]:
                await self._chat(json.loads(body), writer)
            else:
                answer = b'{"data": []}' if "/models" in head else b"[]"
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer))
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _chat(self, request: dict[str, list[dict[str, str]]], writer: asyncio.StreamWriter) -> None:
        came_at = time.monotonic()
        text = "\n".join(message["content"] for message in request["messages"])
        topic, agent = _TOPIC.search(text), _AGENT.search(text)
        assert topic is not None
        assert agent is not None
        turn = (topic[1], topic[2], agent[1], int(_ROUND.findall(text)[-1]) - 1)
        async with self._free:
            took = duration(self._options.seed, self._options.scale, *turn)
            writer.write(_HEAD + _event({"delta": {"content": f"{'-'.join(map(str, turn))} "}}))
            await writer.drain()
            await asyncio.sleep(max(0.0, came_at + took - time.monotonic()))
            self._log.write(json.dumps({"turn": turn, "came": came_at, "end": time.monotonic(), "took": took}) + "\n")
            writer.write(_event({"delta": {}, "finish_reason": "stop"}) + b"data: [DONE]\n\n")


def _event(choice: dict[str, object]) -> bytes:
    chunk = {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, **choice}],
    }
    return b"data: %s\n\n" % json.dumps(chunk).encode()


async def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parallel", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=0.1)
    options, _ = parser.parse_known_args()
    server = await asyncio.start_server(Engine(options).serve, options.host, options.port, backlog=2048)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
