"""The tokens of one request so far, and the times of its signs of life.

This is the end of the token path: one call per event, no task woken, nothing joined before it is read.
"""

from collections.abc import Callable
from typing import Final

from typing_extensions import override

from transport.events import (
    Advance,
    Event,
    Finished,
    PartialUsage,
    PromptProgress,
    PromptRendered,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    Timings,
    TokensWritten,
    ToolCallDelta,
    Usage,
)
from transport.request import BegunAnswer
from workers.requests.tokens import TokenRecord

PIECES: Final = (TextDelta, ReasoningDelta, RefusalDelta, ToolCallDelta, Advance)  # each of a token or more


class Generation:
    """Accumulates the events of one request (a ``transport.exchange.Receiver``).

    ``clock`` gives monotonic seconds. Two times are kept apart: ``last_byte_at`` moves with any byte of the body, a
    comment included (specification, "Progress"); ``last_progress_at`` only with progress of the model.
    """

    __slots__ = (
        "_clock",
        "_events",
        "_reasoning",
        "_reported_prompt",
        "_text",
        "begun_at",
        "carried",
        "finish_reason",
        "first_token_at",
        "has_strayed",
        "is_in_doubt",
        "is_refusal",
        "last_byte_at",
        "last_progress_at",
        "prompt_progress",
        "rewritten",
        "started_at",
        "timings",
        "tokens",
        "tool_call_fragments",
        "usage",
    )

    def __init__(self, clock: Callable[[], float]) -> None:
        now = clock()
        self._clock = clock
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self.started_at = now
        self.last_byte_at = now
        self.last_progress_at = now
        self.begun_at: float | None = None
        self.first_token_at: float | None = None
        self._events = 0
        self.carried = 0  # tokens of its beginning, which an earlier request has generated
        self.rewritten = 0  # tokens of that beginning that its engine has generated once more
        self.has_strayed = False  # its engine has not gone on with that beginning
        self.is_in_doubt = False  # whether its engine would go on with another beginning
        self.prompt_progress: PromptProgress | None = None
        self.tool_call_fragments: list[ToolCallDelta] = []
        self.finish_reason: str | None = None
        self.is_refusal = False  # its text declines to answer, as the server marks it
        self.usage: Usage | None = None
        self._reported_prompt: PartialUsage | None = None
        self.timings: Timings | None = None
        self.tokens: TokenRecord | None = None  # if its ids are recorded

    def __repr__(self) -> str:
        return f"<Generation tokens={self.output_tokens} finish_reason={self.finish_reason}>"

    @property
    def output_tokens(self) -> int:
        """The tokens of the answer so far, as the engine counts them, else one per event."""
        return self._events if self.usage is None else self.usage.completion_tokens

    @property
    def seen(self) -> Usage:
        """The cost seen so far; the engine reports it only at the end, which may never come."""
        read = self.prompt_progress
        processed, cached = (read.processed, read.cached) if read is not None else (0, 0)
        if (usage := self._reported_prompt) is not None:
            processed, cached = usage.prompt_tokens or 0, usage.cached_tokens
        return Usage(processed, self.output_tokens, min(cached, processed))

    @property
    def prompt_tokens(self) -> int | None:
        """The tokens of its prompt, once the engine has reported them."""
        if self.prompt_progress is not None:
            return self.prompt_progress.total
        if self._reported_prompt is not None:
            return self._reported_prompt.prompt_tokens
        return None if self.usage is None else self.usage.prompt_tokens

    @property
    def has_progressed(self) -> bool:
        """Whether the model has shown any progress."""
        return self.first_token_at is not None or self.prompt_progress is not None

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._reasoning)

    def since(self, text_mark: int, reasoning_mark: int) -> tuple[str, str, int, int]:
        """Return the text and reasoning after the marks, and the new marks."""
        text, reasoning = self._text[text_mark:], self._reasoning[reasoning_mark:]
        return "".join(text), "".join(reasoning), len(self._text), len(self._reasoning)

    @property
    def pieces(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The pieces of the text and of the reasoning, each of one token or more."""
        return tuple(self._text), tuple(self._reasoning)

    @property
    def word_tokens(self) -> int:
        """The tokens of the answer so far, without pieces that hold no words, such as a role."""
        if self.usage is not None:
            return self.usage.completion_tokens
        return len(self._text) + len(self._reasoning) + len(self.tool_call_fragments)

    @property
    def tokens_per_s(self) -> float:
        """The pace of the answer, from its first token to its last."""
        seconds = self.last_progress_at - self.first_token_at if self.first_token_at is not None else 0.0
        return (self.output_tokens - (self.carried - self.rewritten) - 1) / seconds if seconds > 0 else 0.0

    def without_words(self) -> "Generation":
        """Return a generation that has only the cost of this one: its words are not used."""
        empty = Generation(self._clock)
        empty.has_strayed = True
        empty.usage = (self.usage or self.seen) - Usage(0, self.carried, 0)
        return empty

    def begin_stream(self) -> None:
        """Record that the engine has accepted the request."""
        self.begun_at = self.last_byte_at = self._clock()

    def forgive(self) -> None:
        """Restart the time without progress: the engine was paused until now."""
        self.last_progress_at = self._clock()

    def touch(self) -> None:
        """Record the arrival of bytes."""
        self.last_byte_at = self._clock()

    def advance(self) -> None:
        """Record the arrival of a token whose event follows later."""
        self.last_byte_at = self.last_progress_at = self._clock()
        if self.first_token_at is None:
            self.first_token_at = self.last_byte_at

    def receive(self, event: Event) -> None:
        """Take one event."""
        if type(event) is TextDelta:
            self._text.append(event.text)
            self._events += 1
            self.last_progress_at = self.last_byte_at
            if self.first_token_at is None:
                self.first_token_at = self.last_byte_at
        else:
            self._receive_rarer(event)

    def _receive_rarer(self, event: Event) -> None:
        if isinstance(event, TokensWritten | PromptRendered):  # one for each token, where they are recorded
            self._take_tokens(event)
            return
        match event:
            case ReasoningDelta():
                self._reasoning.append(event.text)
                self._note_token()
            case RefusalDelta() | ToolCallDelta() | Advance():
                self._receive_piece(event)
            case PromptProgress():
                before, self.prompt_progress = self.prompt_progress, event
                if before is None or event.processed > before.processed:  # a repeated count is no progress
                    self.last_progress_at = self.last_byte_at
            case Finished():
                self.finish_reason = event.reason
            case Timings():
                self.timings = event
            case Usage() | PartialUsage():
                self._take_usage(event)
            case TextDelta():
                raise AssertionError("text is taken on the fast path")

    def _take_tokens(self, event: PromptRendered | TokensWritten) -> None:
        """Record tokens; those without a text of their own, such as half of a call, are progress too."""
        if isinstance(event, TokensWritten):
            self.last_progress_at = self.last_byte_at
        if self.tokens is not None:
            self.tokens.add(event)

    def _receive_piece(self, event: RefusalDelta | ToolCallDelta | Advance) -> None:
        if isinstance(event, RefusalDelta):
            self._text.append(event.text)
            self.is_refusal = True
        elif isinstance(event, ToolCallDelta):
            self.tool_call_fragments.append(event)
        self._note_token()

    def _take_usage(self, reported: Usage | PartialUsage) -> None:
        """Keep a prompt's usage until its answer's comes; until then the answer counts by its events."""
        if isinstance(reported, Usage):
            self.usage = reported
        elif reported.completion_tokens is None:
            self._reported_prompt = reported
        else:
            seen = self.seen
            self.usage = Usage(seen.prompt_tokens, reported.completion_tokens, seen.cached_tokens)

    def _note_token(self) -> None:
        self._events += 1
        self.last_progress_at = self.last_byte_at
        if self.first_token_at is None:
            self.first_token_at = self.last_byte_at


class EndedGeneration(Generation):
    """A generation of an earlier life of the service."""

    __slots__ = ()

    def __init__(self, clock: Callable[[], float], text: str, reasoning: str, usage: Usage) -> None:
        super().__init__(clock)
        self._text, self._reasoning, self.usage = [text], [reasoning], usage
        self.finish_reason = "tool_calls"  # only messages with answered calls are kept as ended


class ContinuedGeneration(Generation):
    """A generation that goes on with the beginning of an answer; the engine counts that as part of its prompt.

    ``carried`` are the tokens of the beginning. The engine sends ``unheard``, text and reasoning, before anything new.
    """

    __slots__ = ("_begun", "_in_prompt", "_unheard")

    def __init__(self, clock: Callable[[], float], begun: BegunAnswer, carried: int, unheard: tuple[str, str]) -> None:
        super().__init__(clock)
        self._begun = begun
        self._text, self._reasoning = ([words] if words else [] for words in (begun.text, begun.reasoning))
        self.carried = self._events = self._in_prompt = carried
        self._unheard = dict(zip((TextDelta, ReasoningDelta), unheard, strict=True))

    @property
    @override
    def seen(self) -> Usage:
        seen = super().seen
        return Usage(max(0, seen.prompt_tokens - self._in_prompt), seen.completion_tokens, seen.cached_tokens)

    @property
    @override
    def prompt_tokens(self) -> int | None:
        tokens = super().prompt_tokens
        return tokens if tokens is None or self.usage is not None else max(0, tokens - self._in_prompt)

    @property
    @override
    def word_tokens(self) -> int:
        if self.usage is not None:
            return self.usage.completion_tokens
        return super().word_tokens + self.carried - bool(self._begun.text) - bool(self._begun.reasoning)

    @override
    def receive(self, event: Event) -> None:
        if isinstance(event, TextDelta | ReasoningDelta):
            said = self._unheard.pop(type(event), "")
            if said:
                rest = self._without_echo(event.text, said)
                if rest is None:
                    self._unheard[type(event)] = said.removeprefix(event.text)
                elif rest:
                    super().receive(type(event)(rest))
                return
            if self.first_token_at is None:  # a thought after words, or words in a thought: they are read wrongly
                is_text, was_text = isinstance(event, TextDelta), bool(self._begun.text)
                self.has_strayed |= is_text is not was_text
                self.is_in_doubt = is_text and not was_text  # the thought may have been whole
        super().receive(event)

    def _without_echo(self, text: str, said: str) -> str | None:
        """Return the text of a piece after the echo; None while the echo goes on."""
        if text.startswith(said):
            return text.removeprefix(said)
        if said.startswith(text):
            return None
        self.has_strayed = True
        return text

    @override
    def _take_usage(self, reported: Usage | PartialUsage) -> None:
        super()._take_usage(reported)
        if reported.completion_tokens is not None:
            prompt = self.seen.prompt_tokens
            if isinstance(reported, Usage):
                prompt = max(0, reported.prompt_tokens - self._in_prompt)
            cached = min(reported.cached_tokens if isinstance(reported, Usage) else self.seen.cached_tokens, prompt)
            self.usage = Usage(prompt, reported.completion_tokens + self._in_prompt, cached)


class RepeatedGeneration(ContinuedGeneration):
    """A generation whose engine writes an answer again from its first token, beginning with words that are known."""

    __slots__ = ()

    def __init__(self, clock: Callable[[], float], begun: BegunAnswer, carried: int, unheard: tuple[str, str]) -> None:
        super().__init__(clock, begun, carried, unheard)
        self._in_prompt = 0

    @override
    def receive(self, event: Event) -> None:
        before, is_piece = self._events, isinstance(event, PIECES)
        if is_piece:
            self.advance()
        super().receive(event)
        if is_piece and self.rewritten < self.carried:
            self.rewritten, self._events = self.rewritten + 1, before

    @override
    def _take_usage(self, reported: Usage | PartialUsage) -> None:
        super()._take_usage(reported)
        if self.usage is not None:
            self.rewritten = min(self.carried, self.usage.completion_tokens)
