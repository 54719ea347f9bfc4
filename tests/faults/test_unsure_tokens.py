"""Engines that cannot say what their ids stand for (specification, "Recorded tokens")."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from transport.client import EngineClient
from transport.dialects.llama_server import LLAMA_SERVER
from transport.dialects.vllm import VLLM
from transport.endpoint import Endpoint
from transport.request import ChatRequest, Message, TokenDetail
from workers.outcome import EngineFailed, FailureReason
from workers.policy.repetition import RepetitionLimits
from workers.requests.answer import Answer
from workers.requests.recording import begin_record, record_tokens
from workers.requests.tokens import Lacking

STREAM = (Path(__file__).parents[1] / "data" / "recording" / "vllm.sse").read_bytes()
UNSURE = STREAM.replace(
    b'"token":"y","logprob":-0.65', b'"token":"z","logprob":-0.65'
)  # another text than the answer's
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s"


@asynccontextmanager
async def engine(answers: list[bytes]) -> AsyncIterator[EngineClient]:
    """Run a server that gives these answers, one for each request; an empty one ends the connection."""
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):  # an idle connection ends with the client
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                size = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("Content-Length"))
                await reader.readexactly(size)
                if not (answer := left.pop(0)):
                    break
                writer.write(answer)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = EngineClient(Endpoint(host="127.0.0.1", port=port), VLLM)
    try:
        yield client
    finally:
        client.close_idle()
        server.close()


async def record(client: EngineClient) -> tuple[Answer, object]:
    chat = ChatRequest(
        model="m", messages=(Message(role="user", content="hi"),), params={"seed": 1}, records=TokenDetail.LOGPROBS
    )
    answer = Answer(time.monotonic)
    answer.asked = chat
    await client.stream(chat, answer.begin_generation(RepetitionLimits(), 2))
    return answer, await record_tokens(client, chat, answer, 0)


def plain(body: bytes) -> bytes:
    return HEAD % (b"application/json", len(body), body)


STREAMED = HEAD % (b"text/event-stream", len(STREAM), STREAM)
ASKED = HEAD % (b"text/event-stream", len(UNSURE), UNSURE)
REFUSED = b'HTTP/1.1 404 Not Found\r\nContent-Length: 22\r\n\r\n{"detail":"Not Found"}'


async def test_an_answer_whose_tokens_are_its_text_asks_nothing_more() -> None:
    """Nearly all do."""
    async with engine([STREAMED]) as client:
        answer, ending = await record(client)
        assert (ending, answer.recorded[0].partial) == (None, ())


@pytest.mark.parametrize(
    ("answers", "partial"),
    [
        ([plain(b'{"prompt": "y(Fy"}'), plain(b'{"prompt": "y(F"}')], ()),
        ([plain(b'{"prompt": "other"}'), plain(b'{"prompt": "othe"}')], (Lacking.IDS,)),
        ([REFUSED], (Lacking.IDS,)),
        ([plain(b"[]")], (Lacking.IDS,)),
        ([plain(b'{"prompt": 5}')], (Lacking.IDS,)),
    ],
)
async def test_the_engine_says_whether_ids_are_the_text(answers: list[bytes], partial: tuple[Lacking, ...]) -> None:
    """One that refuses, or answers in another form, leaves the record partial, and the turn completes."""
    async with engine([ASKED, *answers]) as client:
        answer, ending = await record(client)
        assert (ending, answer.recorded[0].partial) == (None, partial)


async def test_an_engine_that_dies_before_it_has_answered_has_not_completed_the_turn() -> None:
    """The turn runs again, and its record is whole."""
    async with engine([ASKED, b"", b""]) as client:
        answer, ending = await record(client)
        assert isinstance(ending, EngineFailed)
        assert (ending.reason, answer.recorded) == (FailureReason.ENGINE_UNREACHABLE, [])


@pytest.mark.parametrize(("second", "lacking"), [("[user] 12:00", ()), ("[user] 12:01", (Lacking.PROMPT,))])
async def test_a_prompt_that_changes_meanwhile_is_not_known(second: str, lacking: tuple[Lacking, ...]) -> None:
    """A template may show the time: what llama.cpp renders after the answer is then another prompt."""
    whole = {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 1},
        "__verbose": {"tokens": [7]},
    }
    told: list[object] = [{"prompt": "[user] 12:00"}, whole, {"prompt": second}]
    told += [{"tokens": [1, 2]}] * (not lacking) + [{"content": "hi"}, {"content": ""}]
    bodies = [json.dumps(each).encode() for each in told]
    answers = [HEAD % (b"application/json", len(body), body) for body in bodies]
    async with engine(answers) as vllm:
        client = EngineClient(vllm.endpoint, LLAMA_SERVER)
        chat = ChatRequest(model="m", messages=(Message(role="user", content="hi"),), records=TokenDetail.IDS)
        answer = Answer(time.monotonic)
        answer.asked = chat
        answer.begin_generation(RepetitionLimits(), 2)
        await begin_record(client, chat, answer)
        await client.stream(chat, answer.generation)
        assert await record_tokens(client, chat, answer, None) is None
    assert answer.recorded[0].partial == lacking
