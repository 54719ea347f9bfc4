"""Recorded answers of real servers are read correctly, whole and cut at any point."""

import asyncio
import time

import pytest

from tests.harness.recordings import Recording, recordings
from transport.errors import ContextOverflow, EngineError, EngineRejected, UnreadableFrame
from transport.exchange import Exchange
from transport.stream import ChatStream
from workers.requests.generation import Generation
from workers.tools.call_parser import join_fragments

DIFFER = {"handwritten-03"}  # its two thoughts differ


class Wire(asyncio.Transport):
    """A connection that we only read from."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Drop the request."""

    def is_closing(self) -> bool:
        """Report an open connection."""
        return False

    def pause_reading(self) -> None:
        """Do nothing: all data has been sent."""

    def resume_reading(self) -> None:
        """Do nothing: all data has been sent."""


async def read(recording: Recording, cut: int) -> tuple[Generation, EngineError | None]:
    """Return the result of an answer in pieces of ``cut`` bytes, and its failure."""
    loop = asyncio.get_running_loop()
    generation, finished = Generation(time.monotonic), loop.create_future()
    exchange = Exchange(b"", generation, finished, stream=ChatStream(tells_reason=False))
    exchange.connection_made(Wire())
    body = recording.body.encode()
    head = [f"HTTP/1.1 {recording.status} X", f"Content-Length: {len(body)}"]
    head += [f"{name}: {value}" for name, value in recording.told_headers.items()]
    exchange.data_received(("\r\n".join(head) + "\r\n\r\n").encode())
    for at in range(0, len(body), cut):
        exchange.data_received(body[at : at + cut])
    error: EngineError | None = None
    try:
        await asyncio.wait_for(finished, 5)
    except EngineError as raised:
        error = raised
    exchange.connection_lost(None)
    return generation, error


@pytest.mark.parametrize("recording", recordings(), ids=lambda each: each.id)
@pytest.mark.parametrize("cut", [7, 16 * 1024])
async def test_an_answer_is_read_correctly(recording: Recording, cut: int) -> None:
    """Words, thoughts, calls, finish reason and cost; or the server's own message of an error."""
    generation, error = await read(recording, cut)
    expected = recording.expected
    assert generation.text == (expected.get("text") or "")
    if recording.id not in DIFFER:
        assert generation.reasoning == (expected.get("reasoning") or "")
    calls = [(call.name, call.arguments) for call in join_fragments(generation.tool_call_fragments)]
    assert calls == [(call["name"], call["arguments"]) for call in expected.get("tool_calls") or []]
    assert (generation.finish_reason or None) == (expected.get("finish_reason") or None)
    if expected.get("usage"):
        assert generation.usage is not None
        told = generation.usage.prompt_tokens, generation.usage.completion_tokens
        assert told == (expected["usage"]["prompt"], expected["usage"]["completion"])
    if recording.error is None:
        assert error is None
        return
    assert error is not None
    assert recording.error["message"] in str(error)
    if recording.error.get("overflow"):
        assert type(error) is ContextOverflow
    if recording.error.get("requests_own"):
        assert isinstance(error, EngineRejected)
        assert error.is_about_the_request
    if not isinstance(error, UnreadableFrame):
        assert isinstance(error, EngineRejected)
        status = recording.error.get("status") or error.status
        assert error.status == status or isinstance(error, ContextOverflow) or error.is_about_the_request
