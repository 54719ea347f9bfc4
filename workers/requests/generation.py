"""The tokens of one request in flight so far, and the times of its signs.

Stands at the end of the token path: one call for each event, no task woken, nothing joined until it is read.
"""

from collections.abc import Callable

from transport.events import (
    Advance,
    Event,
    Finished,
    PromptProgress,
    ReasoningDelta,
    TextDelta,
    Timings,
    ToolCallDelta,
    Usage,
)


class Generation:
    """Accumulates the events of one request (a ``transport.exchange.Receiver``).

    ``clock`` gives monotonic seconds. Two facts are kept apart: ``last_byte_at`` moves with any byte of the body, a
    comment included (specification, "Progress"); ``last_progress_at`` only when the model has got further.
    """

    __slots__ = (
        "_clock",
        "_events",
        "_reasoning",
        "_text",
        "begun_at",
        "finish_reason",
        "first_token_at",
        "last_byte_at",
        "last_progress_at",
        "prompt_progress",
        "started_at",
        "timings",
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
        self.prompt_progress: PromptProgress | None = None
        self.tool_call_fragments: list[ToolCallDelta] = []
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self.timings: Timings | None = None

    def __repr__(self) -> str:
        return f"<Generation tokens={self.output_tokens} finish_reason={self.finish_reason}>"

    @property
    def output_tokens(self) -> int:
        """The tokens of the answer so far: as the engine counts, else a token an event."""
        return self._events if self.usage is None else self.usage.completion_tokens

    @property
    def seen(self) -> Usage:
        """The cost as far as it can be seen; the engine tells at the end, to which it may never come."""
        read = self.prompt_progress
        processed, cached = (read.processed, read.cached) if read is not None else (0, 0)
        return Usage(processed, self.output_tokens, min(cached, processed))

    @property
    def prompt_tokens(self) -> int | None:
        """The tokens of its prompt, once the engine has told."""
        if self.prompt_progress is not None:
            return self.prompt_progress.total
        return None if self.usage is None else self.usage.prompt_tokens

    @property
    def has_progressed(self) -> bool:
        """Whether the model has done anything yet."""
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
        """Return text and reasoning that came after the marks, and the marks of now."""
        text, reasoning = self._text[text_mark:], self._reasoning[reasoning_mark:]
        return "".join(text), "".join(reasoning), len(self._text), len(self._reasoning)

    @property
    def tokens_per_s(self) -> float:
        """The pace of the answer, from its first token to its last."""
        seconds = self.last_progress_at - self.first_token_at if self.first_token_at is not None else 0.0
        return (self.output_tokens - 1) / seconds if seconds > 0 else 0.0

    def begin_stream(self) -> None:
        """Record that the engine has taken the request up."""
        self.begun_at = self.last_byte_at = self._clock()

    def forgive(self) -> None:
        """Count the time without progress anew: until now the engine was told to stand still."""
        self.last_progress_at = self._clock()

    def touch(self) -> None:
        """Record the arrival of bytes."""
        self.last_byte_at = self._clock()

    def advance(self) -> None:
        """Record the arrival of a token, which is received later."""
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
        match event:
            case ReasoningDelta():
                self._reasoning.append(event.text)
                self._note_token()
            case ToolCallDelta():
                self.tool_call_fragments.append(event)
                self._note_token()
            case Advance():
                self._note_token()
            case PromptProgress():
                before, self.prompt_progress = self.prompt_progress, event
                if before is None or event.processed > before.processed:  # the same again is no progress
                    self.last_progress_at = self.last_byte_at
            case Finished():
                self.finish_reason = event.reason
            case Usage():
                self.usage = event
            case Timings():
                self.timings = event
            case TextDelta():
                raise AssertionError("text is taken on the fast path")

    def _note_token(self) -> None:
        self._events += 1
        self.last_progress_at = self.last_byte_at
        if self.first_token_at is None:
            self.first_token_at = self.last_byte_at
