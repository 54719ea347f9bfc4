"""A timed SSE engine: every stream sends its tokens at a fixed rate, one or, as vLLM may, several per event.

As a program, it takes the number of tokens of a stream, prints its port, and serves until its standard input ends. The
second argument is the number of tokens in an event. With ``at-once`` the first token of a stream comes with its
request, so that the time to it is that of the program between. A request without a stream is answered at once, whole,
with one token. The events have the shape and the size of vLLM's and llama-server's (about 240 bytes), one HTTP chunk
and one write each, so that clients are compared on the wake-ups that a real engine causes.
"""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, cast

import uvloop

RATE_HZ: Final = 50.0
WORDS: Final = 997  # number of different words, so that no stream looks like a loop
_HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
_CLOSE: Final = b"Connection: close\r\n"


@contextmanager
def timed_engine(tokens: int, *more: object) -> Iterator[int]:
    """Run a timed engine for a block; yields its port."""
    argv = [sys.executable, __file__, str(tokens), *map(str, more)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        try:
            yield int(engine.stdout.readline())
            engine.communicate(timeout=30)
        finally:
            engine.kill()


def _chunk(payload: bytes) -> bytes:
    frame = b"data: " + payload + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(frame), frame)


def word_at(number: int) -> str:
    """Return the text of the n-th token of a stream."""
    return f" t{number % WORDS:04d}"


def _event(delta: dict[str, str], finish_reason: str | None = None, so_far: int | None = None) -> bytes:
    usage = {} if so_far is None else {"usage": {"prompt_tokens": 3, "completion_tokens": so_far}}
    return json.dumps(
        {
            **usage,
            "id": "chatcmpl-0123456789abcdef0123456789abcdef",
            "object": "chat.completion.chunk",
            "created": 1760000000,
            "model": "timed",
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}],
        }
    ).encode()


def frames_of(tokens: int, per_frame: int) -> list[bytes]:
    """Return the frames of a whole stream; frames of several tokens have a count, as vLLM's do."""
    frames = []
    for first in range(0, tokens, per_frame):
        numbers = range(first, min(first + per_frame, tokens))
        so_far = None if per_frame == 1 else numbers.stop
        frames.append(_chunk(_event({"content": "".join(map(word_at, numbers))}, so_far=so_far)))
    return frames


_MODELS: Final = b'{"object": "list", "data": [{"id": "timed", "object": "model"}]}'
_TOLD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
_WHOLE: Final = json.dumps(
    {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion",
        "created": 1760000000,
        "model": "timed",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Yes"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
    }
).encode()
_END: Final = _chunk(_event({}, "stop")) + _chunk(b"[DONE]") + b"0\r\n\r\n"


class TimedStream(asyncio.Protocol):
    """One connection: waits for a request, then streams by the clock, never early."""

    def __init__(self, frames: list[bytes], interval_s: float, *, at_once: bool = False) -> None:
        self._frames = frames
        self._interval_s = interval_s
        self._at_once = at_once
        self._sent = 0
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._started_at = 0.0
        self._closes = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Start when the whole request has come."""
        assert self._transport is not None
        self._received += data
        head, separator, body = bytes(self._received).partition(b"\r\n\r\n")
        if not separator:
            return
        if head.startswith(b"GET "):  # a probe, or the list of models
            self._received.clear()
            self._transport.write(_TOLD % (len(_MODELS), _MODELS))
            return
        lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if len(body) < int(lengths[0]):
            return
        self._received.clear()
        self._sent = 0
        self._closes = b"connection: close" in head.lower()  # as vLLM, llama-server and Ollama do
        if b'"stream": true' not in body and b'"stream":true' not in body:
            self._transport.write(_TOLD % (len(_WHOLE), _WHOLE))
            if self._closes:
                self._transport.close()
            return
        self._transport.write(_HEAD + (_CLOSE if self._closes else b"") + b"\r\n")
        loop = asyncio.get_running_loop()
        phase_s = 0.0 if self._at_once else random.random() * self._interval_s  # the streams' phases are spread evenly
        self._started_at = loop.time() + phase_s
        loop.call_at(self._started_at, self._tick)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop writing."""
        self._transport = None

    def _tick(self) -> None:
        if self._transport is None:
            return
        if self._sent == len(self._frames):
            self._transport.write(_END)
            if self._closes:
                self._transport.close()
            return
        self._transport.write(self._frames[self._sent])
        self._sent += 1
        asyncio.get_running_loop().call_at(self._started_at + self._sent * self._interval_s, self._tick)


async def _serve(tokens: int, per_frame: int, *, at_once: bool) -> None:
    loop, frames = asyncio.get_running_loop(), frames_of(tokens, per_frame)

    def accept() -> TimedStream:
        return TimedStream(frames, per_frame / RATE_HZ, at_once=at_once)

    server = await loop.create_server(accept, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:] if argument.isdecimal()]
    uvloop.run(_serve(numbers[0], numbers[1] if len(numbers) > 1 else 1, at_once="at-once" in sys.argv))
