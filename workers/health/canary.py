"""The canary: a request of our own for one token, or for one vector from a model that makes no tokens."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import anyio
import msgspec

from transport.client import EngineClient
from transport.dialects.openai import COMPLETIONS_PATH, EMBEDDINGS_PATH
from transport.errors import UNDECODABLE, CannotAsk, EngineError, EngineOverloaded, EngineRejected
from transport.events import Event
from transport.relay import is_about_the_request
from transport.request import ChatRequest, Message

WORD: Final = "ping"
CANARY: Final = (Message(role="user", content=WORD),)


class CanaryResult(StrEnum):
    """The result of one canary."""

    HEARD = "heard"  # the engine makes tokens, or vectors
    BROKEN_OFF = "broken_off"  # a token came, and then an error: it lives, and serves no request
    REFUSED = "refused"  # an error, or a connection that broke
    UNFIT = "unfit"  # a refusal of the canary's own form, which shows only that the engine's front lives
    SILENT = "silent"  # nothing in time, which says little about a busy engine


class Listener:
    """Listens to a canary (a ``transport.exchange.Receiver``)."""

    def __init__(self) -> None:
        self.is_heard = False

    def begin_stream(self) -> None:
        """Ignore the start of a stream; it proves nothing yet."""

    def touch(self) -> None:
        """Ignore bytes; they prove nothing yet."""

    def advance(self) -> None:
        """Ignore a piece of a stream; its events follow."""

    def receive(self, _event: Event) -> None:
        """Take any event of the model's."""
        self.is_heard = True


class _Body(msgspec.Struct):
    choices: list[msgspec.Raw] = []
    data: list[msgspec.Raw] = []


class _CanaryAnswer:
    """Reads a canary that comes whole (a ``transport.relay.Passage``)."""

    def __init__(self) -> None:
        self.is_whole = False

    def pass_frames(self, _content_type: str, _frames: bytes) -> None:
        """Ignore a stream, which was not asked for: it proves nothing."""

    def pass_whole(self, _status: int, _content_type: str, body: bytes) -> None:
        """Take an answer; a choice or a vector in it makes it whole."""
        try:
            read = msgspec.json.decode(body, type=_Body)
        except UNDECODABLE:
            return
        self.is_whole = bool(read.choices or read.data)


async def ask_canary(client: EngineClient, model: str, params: Mapping[str, object], limit_s: float) -> CanaryResult:
    """Ask an engine for one token as a turn would; return the result within ``limit_s``."""
    listener = Listener()
    with anyio.move_on_after(limit_s):
        try:
            await _ask(client, model, params, listener)
        except CannotAsk:
            return CanaryResult.SILENT
        except EngineRejected as error:
            if error.is_about_the_request and not listener.is_heard:
                return CanaryResult.UNFIT
            return CanaryResult.BROKEN_OFF if listener.is_heard else CanaryResult.REFUSED
        except EngineError:
            return CanaryResult.BROKEN_OFF if listener.is_heard else CanaryResult.REFUSED
    return CanaryResult.HEARD if listener.is_heard else CanaryResult.SILENT


async def _ask(client: EngineClient, model: str, params: Mapping[str, object], listener: Listener) -> None:
    """Ask by a chat; if that is refused, by other requests that the engine may serve.

    A model that only embeds texts makes no token: llama.cpp refuses the chat with 500 then, vLLM with 404, and both
    make a vector. A template that wants other messages refuses with 400 whatever the engine's state, so a plain text is
    sent next.
    """
    asked = {**client.dialect.canary_params, **params}
    try:
        await client.stream(ChatRequest(model=model, messages=CANARY, params=asked), listener)
    except EngineRejected as error:
        if listener.is_heard or isinstance(error, EngineOverloaded):
            raise
        refusal = error
    else:
        return
    ways: list[tuple[str, Mapping[str, object]]] = [(EMBEDDINGS_PATH, {"model": model, "input": WORD})]
    if refusal.is_about_the_request:
        ways.insert(0, (COMPLETIONS_PATH, {**asked, "model": model, "prompt": WORD}))
    for path, body in ways:
        answer = _CanaryAnswer()
        try:
            await client.relay(path, msgspec.json.encode(body), Listener(), answer)
        except EngineRejected as error:
            refusal = refusal if is_about_the_request(error) else error
        listener.is_heard = answer.is_whole
        if answer.is_whole:
            return
    raise refusal
