"""An engine's answer as semantic events.

These are msgspec structs, not dataclasses, because one is made for every token: a frozen dataclass costs about a
microsecond, a struct a tenth of that, and the budget of a token is twelve (``bench/token_path.py``).
"""

from msgspec import Struct


class PromptProgress(Struct, frozen=True, gc=False):
    """The engine's progress with the prompt in tokens; ``cached`` of them came from its prefix cache."""

    total: int
    cached: int
    processed: int
    elapsed_ms: float


class TextDelta(Struct, frozen=True, gc=False):
    """More of the answer's text."""

    text: str


class RefusalDelta(Struct, frozen=True, gc=False):
    """More of the text in which a model declines to answer."""

    text: str


class ReasoningDelta(Struct, frozen=True, gc=False):
    """More of the model's reasoning, which the engine keeps apart from the answer."""

    text: str


class ToolCallDelta(Struct, frozen=True, gc=False):
    """A fragment of the tool call ``index``; ``call_id`` and ``name`` come once, ``arguments`` in pieces."""

    index: int
    call_id: str | None
    name: str | None
    arguments: str


class Advance(Struct, frozen=True, gc=False):
    """Progress of the model in content that is not decoded, such as another answer of the same request."""


class Finished(Struct, frozen=True, gc=False):
    """The model has stopped: ``stop``, ``length``, ``tool_calls``, or a word of the engine's own."""

    reason: str


class Usage(Struct, frozen=True, gc=False):
    """The cost of a request in tokens; ``cached_tokens`` of the prompt came from the cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def __add__(self, other: "Usage") -> "Usage":
        """Return the cost of both."""
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
        )

    def __sub__(self, part: "Usage") -> "Usage":
        """Return the cost without a part of it; no number falls below 0."""
        return Usage(
            max(0, self.prompt_tokens - part.prompt_tokens),
            max(0, self.completion_tokens - part.completion_tokens),
            max(0, self.cached_tokens - part.cached_tokens),
        )


class PartialUsage(Struct, frozen=True, gc=False):
    """The cost of a prompt or of an answer, from an engine that reports them apart; the other is None.

    Source: Anthropic's Messages: ``message_start`` has the prompt's tokens, ``message_delta`` the answer's.
    """

    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int = 0


class PromptRendered(Struct, frozen=True, gc=False):
    """The token ids of the prompt as the engine has rendered it."""

    ids: list[int]


class TokensWritten(Struct, frozen=True, gc=False):
    """The ids of more of the answer's tokens; their text has come before.

    ``logprobs`` has a value a token, None where the engine gives none; it is None without any.
    ``texts`` holds the text of each token as the engine writes it, nothing if not all are known. ``stop_word`` is the
    stop word that ended the answer.
    """

    ids: list[int]
    logprobs: list[float | None] | None
    texts: list[str]
    stop_word: str | None = None


class Timings(Struct, frozen=True, gc=False):
    """The engine's own account of its work as llama-server reports it, in tokens and milliseconds."""

    prompt_tokens: int
    prompt_ms: float
    cached_tokens: int
    completion_tokens: int
    completion_ms: float


Event = (
    PromptProgress
    | TextDelta
    | RefusalDelta
    | ReasoningDelta
    | ToolCallDelta
    | Advance
    | Finished
    | Usage
    | PartialUsage
    | Timings
    | PromptRendered
    | TokensWritten
)
