"""The form of a dialect: the differences between engines on the wire."""

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import msgspec

from transport.counters import EngineCounters, KvCache
from transport.dialects.openai import MODELS_PATH, body_of, respond_in_format
from transport.request import ChatRequest, Constraint, Thought

T_co = TypeVar("T_co", covariant=True)
Params = Mapping[str, object]


class EngineQuery(msgspec.Struct, Generic[T_co], frozen=True, kw_only=True):
    """Something that an engine tells of itself: the paths that are asked, and what their bodies together say.

    ``decode`` takes one body a path, and raises ``MalformedFrame`` where they are not what they should be.
    """

    paths: tuple[str, ...]
    decode: Callable[..., T_co]


class ThoughtQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The question where a model's own thought stands.

    A prompt is rendered at ``render_path`` with those of a request's ``params`` that shape it; ``decode`` takes that
    answer and the one of ``path``, and raises ``MalformedFrame`` where they are not what they should be.
    """

    render_path: str
    path: str
    params: frozenset[str]
    decode: Callable[[bytes, bytes], Thought]


class CountQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The question for the tokens of a request's prompt: its path, and its answer.

    ``decode`` raises ``MalformedFrame`` where the answer is not what it should be.
    """

    path: str
    decode: Callable[[bytes], int]


def encode_plainly(request: ChatRequest) -> bytes:
    """Return the JSON body with nothing in it that only some engines know."""
    return msgspec.json.encode(body_of(request))


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's way to be asked; None is what it does not tell.

    An engine is ready when all ``ready_paths`` answer 200; ``canary_params`` make it write one token and keep nothing.
    ``constrain`` gives the parameters that hold a model to a constraint, None where there are none that say it;
    ``always_constrains`` says that such an engine keeps it or refuses it, and never passes over it. ``thoughts`` is for
    engines that hold an answer from its first token, and so have to be told of what stands before it. ``count`` is for
    engines that fail all requests when the cache that these share is full. One that ``keeps_connections`` waits on an
    idle connection with nothing of its own: llama.cpp's server with a thread of the few that it has.
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
    keeps_connections: bool = True


PLAIN = Dialect(name="openai", always_constrains=False)
