"""A request's answer so far, over all its generations; whole after any ending, and at any moment before."""

from collections.abc import Callable
from enum import StrEnum
from typing import Final

from anyio import CancelScope

from transport.events import Usage
from transport.request import Thought
from workers.policy.repetition import Repetition, RepetitionLimits
from workers.requests.generation import Generation
from workers.requests.prompts.stack import ToolExchange
from workers.tools.calls import Signal, ToolRecord

PIECE_CHARS: Final = 8  # that a piece of an answer counts as, beside its own
LETTERS_A_TOKEN: Final = 4  # of a prompt, where its engine has told nothing


class Phase(StrEnum):
    """Whom a request in flight waits for."""

    ENGINE = "engine"  # the engine is to say something
    TOOLS = "tools"  # its tools run
    US = "us"  # the engine has said its last word, and its silence means nothing


class Answer:
    """Written by the runner of the request, read by all."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended: list[Generation] = []
        self._words = ""  # of the newest message that was read and had any besides its calls
        self._is_read = False
        self._is_begun = False
        self._limits: RepetitionLimits | None = None
        self._loops: dict[str, Repetition] = {}  # of text, reasoning and arguments, as far as there were any
        self._marks = (0, 0)
        self._fragments_read = 0
        self.chars = 0  # of all generations, as far as they were looked at, with what each piece takes besides
        self.generation = Generation(clock)
        self.prompt_chars = 0
        self.prompt_tokens = 0  # what the newest prompt takes at most, where its engine's KV cache is shared
        self.counted_tokens: int | None = None  # what it takes, where the engine was asked to count it
        self.phase = Phase.US
        self.tool_calls: list[ToolRecord] = []
        self.signals: list[Signal] = []
        self.iterations_used = 0
        self.exchanges: list[ToolExchange] = []  # of messages with calls, as they stand in the prompt that followed
        self.constrained_by: str | None = None  # the parameter that held the newest generation to what was asked for
        self.thought = Thought.NONE  # what could stand before what it was held to
        self.own_tokens: int | None = (
            None  # of its first prompt that its own key had brought; None tells all that was cached
        )
        self.first_version: int | None = None  # of the weights that its first token was made with
        self.last_version: int | None = None  # and its last
        self.predicted_ms: float | None = None  # what it should have taken, once it is complete
        self.is_mute = False  # nothing is heard of it before it is whole
        self.deadline: CancelScope | None = None  # in which it is asked for

    def __repr__(self) -> str:
        return f"<Answer {self.phase} generations={len(self._ended) + 1} {self.generation!r}>"

    def begin_generation(self, limits: RepetitionLimits, prompt_chars: int) -> Generation:
        """Return where the engine's next answer goes; ``prompt_chars`` is how much it has to read for it."""
        if self._is_begun:
            self._ended.append(self.generation)
        self._is_begun, self._is_read = True, False
        self.prompt_tokens, self.counted_tokens = 0, None
        self.generation = Generation(self._clock)
        self.prompt_chars = prompt_chars
        self._limits, self._loops, self._marks = limits, {}, (0, 0)
        self._fragments_read = 0
        self.phase = Phase.ENGINE
        return self.generation

    @property
    def was_asked(self) -> bool:
        """Whether an engine was given anything of it."""
        return self._is_begun

    def find_loop(self, *, is_over: bool = False) -> str | None:
        """Return the words that the model repeats without end, or None; reads on from the last call."""
        if self._limits is None:
            return None
        text, reasoning, text_mark, reasoning_mark = self.generation.since(*self._marks)
        pieces = text_mark + reasoning_mark - sum(self._marks)
        self._marks = (text_mark, reasoning_mark)
        arguments = self._new_arguments()
        self.chars += len(text) + len(reasoning) + len(arguments) + PIECE_CHARS * pieces
        if is_over and not self._loops and len(text) + len(reasoning) + len(arguments) < self._limits.least_chars:
            return None
        for of, words in (("text", text), ("reasoning", reasoning), ("arguments", arguments)):
            if words and of not in self._loops:
                self._loops[of] = Repetition(self._limits)
            found = self._loops[of].feed(words) if words else None
            if found is None and is_over and of in self._loops:
                found = self._loops[of].end_text()
            if found is not None:
                return found
        return None

    def _new_arguments(self) -> str:
        """Return the new text of arguments since the last call; a line feed is two letters within a text of JSON."""
        fragments = self.generation.tool_call_fragments
        if len(fragments) == self._fragments_read:
            return ""
        new = "".join(piece.arguments for piece in fragments[self._fragments_read :])
        self._fragments_read = len(fragments)
        return new.replace("\\n", "\n")

    def take_words(self, words: str) -> None:
        """Take the words of the last message, without its calls."""
        self._is_read = True
        self._words = words or self._words

    @property
    def text(self) -> str:
        """The words of the newest message that has any; calls written into a text are none."""
        return self._words if self._is_read else self.generation.text or self._words

    @property
    def reasoning(self) -> str:
        """All reasoning so far."""
        return "\n\n".join(thought for thought in (each.reasoning for each in self._generations) if thought)

    @property
    def finish_reason(self) -> str | None:
        """Why the engine stopped, in its own word."""
        return self.generation.finish_reason

    @property
    def usage(self) -> Usage | None:
        """The cost of all generations, as far as the engine has told."""
        if not self._ended:
            return self.generation.usage
        known = [each.usage for each in self._generations if each.usage is not None]
        if not known:
            return None
        return Usage(
            sum(usage.prompt_tokens for usage in known),
            sum(usage.completion_tokens for usage in known),
            sum(usage.cached_tokens for usage in known),
        )

    @property
    def cost(self) -> Usage:
        """Tokens of all generations: reported, or estimated where the engine has not reported."""
        costs = [each.usage or each.seen for each in self._generations]
        return Usage(
            sum(cost.prompt_tokens for cost in costs),
            sum(cost.completion_tokens for cost in costs),
            sum(cost.cached_tokens for cost in costs),
        )

    @property
    def told_cost(self) -> Usage:
        """The cost as it is told: no more of a prompt was cached than its own key had brought."""
        own = self.own_tokens
        prompt = completion = cached = 0
        for each in self._generations:
            cost = each.usage or each.seen
            prompt, completion = prompt + cost.prompt_tokens, completion + cost.completion_tokens
            cached += cost.cached_tokens if own is None else min(own, cost.cached_tokens)
            own = None if own is None else cost.prompt_tokens + cost.completion_tokens
        return Usage(prompt, completion, cached)

    @property
    def is_told(self) -> bool:
        """Whether the engine has told the cost of all generations."""
        return self.generation.usage is not None and all(each.usage is not None for each in self._ended)

    @property
    def told_prompt_tokens(self) -> int | None:
        """The tokens of the newest prompt, as its engine has told; None until it has."""
        return self.generation.prompt_tokens or self.counted_tokens

    @property
    def context_tokens(self) -> int:
        """The tokens that the newest generation has put into its engine's cache; by letters until it tells."""
        usage = self.generation.usage
        if usage is not None:
            return usage.prompt_tokens + usage.completion_tokens
        told = self.told_prompt_tokens or self.prompt_chars // LETTERS_A_TOKEN
        return told + self.generation.output_tokens

    @property
    def held_tokens(self) -> int:
        """The tokens that the newest generation holds of a shared KV cache; 0 before it was let in, and after.

        A prompt that is being read counts as a whole.
        """
        if self.phase is not Phase.ENGINE or not self.prompt_tokens:
            return 0
        generation = self.generation
        return (generation.prompt_tokens or self.prompt_tokens) + generation.output_tokens

    @property
    def output_tokens(self) -> int:
        """The number of pieces of answers that have come: about as many as tokens."""
        return sum(each.output_tokens for each in self._generations)

    @property
    def tools_s(self) -> float:
        """The seconds that its tools ran; those of one message run beside each other."""
        longest: dict[int, float] = {}
        for call in self.tool_calls:
            longest[call.iteration] = max(longest.get(call.iteration, 0.0), call.duration_s)
        return sum(longest.values())

    @property
    def started_at(self) -> float:
        """When it was asked, in the clock's seconds."""
        return self._generations[0].started_at

    @property
    def first_token_at(self) -> float | None:
        """When the first token came, None where none did."""
        if not self._ended:
            return self.generation.first_token_at
        return next((each.first_token_at for each in self._generations if each.first_token_at is not None), None)

    @property
    def _generations(self) -> list[Generation]:
        return [*self._ended, self.generation]
