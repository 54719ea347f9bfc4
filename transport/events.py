"""An engine's answer as semantic events.

These are msgspec structs and not dataclasses because one is made for every token: a frozen dataclass costs about a
microsecond, a struct a tenth of it, and the whole budget of a token is twelve (``bench/token_path.py``).
"""

from msgspec import Struct


class PromptProgress(Struct, frozen=True, gc=False):
    """The engine's progress with the prompt, in tokens; ``cached`` of them came from its prefix cache."""

    total: int
    cached: int
    processed: int
    elapsed_ms: float


class TextDelta(Struct, frozen=True, gc=False):
    """More of the answer's text."""

    text: str


class ReasoningDelta(Struct, frozen=True, gc=False):
    """More of the model's reasoning, which the engine has kept apart from the answer."""

    text: str


class ToolCallDelta(Struct, frozen=True, gc=False):
    """A fragment of the tool call ``index``; ``call_id`` and ``name`` come once, ``arguments`` in pieces."""

    index: int
    call_id: str | None
    name: str | None
    arguments: str


class Advance(Struct, frozen=True, gc=False):
    """The model has got further, in what is not looked at: another answer of the same request, say."""


class Finished(Struct, frozen=True, gc=False):
    """The model has stopped: ``stop``, ``length`` or ``tool_calls``, or another word of the engine's own."""

    reason: str


class Usage(Struct, frozen=True, gc=False):
    """The cost of a request, in tokens; ``cached_tokens`` of the prompt were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Timings(Struct, frozen=True, gc=False):
    """The engine's own account of its work, as llama-server gives it: tokens and milliseconds."""

    prompt_tokens: int
    prompt_ms: float
    cached_tokens: int
    completion_tokens: int
    completion_ms: float


Event = PromptProgress | TextDelta | ReasoningDelta | ToolCallDelta | Advance | Finished | Usage | Timings
