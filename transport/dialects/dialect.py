"""What a dialect is: where an engine differs from the others on the wire."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from transport.counters import EngineCounters
from transport.dialects.openai import MODELS_PATH, body_of
from transport.request import ChatRequest

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineQuery(Generic[T_co]):
    """Something that an engine tells of itself: the paths that are asked, and what their bodies together say.

    ``decode`` takes one body a path, and raises ``MalformedFrame`` where they are not what they should be.
    """

    paths: tuple[str, ...]
    decode: Callable[..., T_co]


def encode_plainly(request: ChatRequest) -> bytes:
    """Return the JSON body with nothing in it that only some engines know."""
    return msgspec.json.encode(body_of(request))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One engine's way to be asked; None is what it does not tell.

    An engine is ready when all ``ready_paths`` answer 200; ``canary_params`` make it write one token and keep nothing.
    """

    name: str
    ready_paths: tuple[str, ...] = (MODELS_PATH,)
    encode: Callable[[ChatRequest], bytes] = encode_plainly
    counters: EngineQuery[EngineCounters] | None = None
    capacity: EngineQuery[int | None] | None = None
    canary_params: Mapping[str, object] = field(default_factory=lambda: {"max_tokens": 1})
    tells_timings: bool = False  # how long it read, with each answer


PLAIN = Dialect(name="openai")
