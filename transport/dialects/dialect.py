"""The form of a dialect: how engines differ on the wire."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Generic, TypeVar

import msgspec

from transport.counters import EngineCounters, KvCache
from transport.dialects.openai import MODELS_PATH, body_of, respond_in_format
from transport.dialects.recording import Post, Recording
from transport.request import BegunAnswer, ChatRequest, Constraint, Thought

T_co = TypeVar("T_co", covariant=True)
Params = Mapping[str, object]


class EngineQuery(msgspec.Struct, Generic[T_co], frozen=True, kw_only=True):
    """A query about the engine itself: the paths to ask, and a decoder of their bodies.

    ``decode`` takes one body per path and raises ``MalformedFrame`` for any it cannot read.
    """

    paths: tuple[str, ...]
    decode: Callable[..., T_co]


class ThoughtQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query for where a model's own thought stands.

    A prompt is rendered at ``render_path`` with those of a request's ``params`` that shape it. ``decode`` takes that
    answer and the one of ``path``, and raises ``MalformedFrame`` for any it cannot read.
    """

    render_path: str
    path: str
    params: frozenset[str]
    decode: Callable[[bytes, bytes], Thought]


class CountQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query for the tokens of a request's prompt: its path, and a decoder of its answer.

    ``decode`` raises ``MalformedFrame`` for an answer it cannot read.
    """

    path: str
    decode: Callable[[bytes], int]


class BegunReading(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's reading of the beginning of an answer: its tokens, or why it would not go on with these words."""

    tokens: int = 0
    fault: str | None = None


class BegunQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query for how an engine would read the beginning of an answer, before it is asked to go on with it.

    ``read`` takes the beginning and the bodies of a chat without it and with it. An engine that ``echoes`` sends the
    beginning before what follows. ``ask`` adds the fields that ask for it to those of a chat's body, ``asks`` to those
    of bodies for other paths. ``count`` gives the tokens of a text. ``read`` and ``count`` raise ``MalformedFrame`` for
    an answer that they cannot read.
    """

    ask: Callable[[dict[str, object], BegunAnswer], None]
    asks: Mapping[str, Callable[[dict[str, object], BegunAnswer], None]] = {}
    read: Callable[[Post, BegunAnswer, bytes, bytes], Awaitable[BegunReading]]
    count: Callable[[Post, object, str], Awaitable[int]]
    echoes: bool = False


REWRITTEN: Final = BegunReading(fault="its chat template writes the beginning of an answer in other words")


def encode_plainly(request: ChatRequest) -> bytes:
    """Return the JSON body without fields that only some engines know."""
    return msgspec.json.encode(body_of(request))


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """The way to ask one engine; None marks what it does not report.

    An engine is ready when all ``ready_paths`` answer 200; ``canary_params`` make it write one token and keep nothing.
    ``constrain`` gives the parameters that enforce a constraint, None if none can express it; an engine that
    ``always_constrains`` enforces or refuses a constraint and never ignores it. ``thoughts`` is for engines that
    constrain an answer from its first token, and so must know the text before it. ``count`` is for engines that fail
    all requests when their shared cache is full. ``begun`` is for engines that go on with half an answer, ``recording``
    for those that give token ids. An engine that ``keeps_connections`` ties up nothing for an idle connection;
    llama.cpp's server ties up one of its few threads. One that ``tells_reason`` gives a finish reason with each answer.
    """

    name: str
    ready_paths: tuple[str, ...] = (MODELS_PATH,)
    encode: Callable[[ChatRequest], bytes] = encode_plainly
    counters: EngineQuery[EngineCounters] | None = None
    capacity: EngineQuery[int | None] | None = None
    kv_cache: EngineQuery[KvCache | None] | None = None
    canary_params: Params = msgspec.field(default_factory=lambda: {"max_tokens": 1})
    constrain: Callable[[Constraint], Params | None] = respond_in_format
    always_constrains: bool = True
    thoughts: ThoughtQuery | None = None
    count: CountQuery | None = None
    begun: BegunQuery | None = None
    recording: Recording | None = None
    keeps_connections: bool = True
    tells_reason: bool = True


PLAIN = Dialect(name="openai", always_constrains=False, tells_reason=False)
