"""A request's answer so far, over all its generations; readable at any moment, whole after any ending."""

from collections.abc import Callable
from enum import Enum, StrEnum, auto
from typing import Final, NamedTuple

from anyio import CancelScope
from msgspec.structs import replace

from transport.events import Usage
from transport.request import ChatRequest, Thought
from workers.policy.repetition import Repetition, RepetitionLimits
from workers.requests.generation import ContinuedGeneration, Generation, RepeatedGeneration
from workers.requests.halves import GoingOn, HalfAnswer, constraint_in
from workers.requests.prompts.stack import ToolExchange
from workers.requests.tokens import RecordedTokens, TokenRecord
from workers.tools.calls import Signal, ToolRecord

PIECE_CHARS: Final = 8  # added for each piece of an answer to its characters
NOTHING: Final = Usage(0, 0, 0)
LETTERS_A_TOKEN: Final = 4  # letters per prompt token, if the engine has reported none


class Phase(StrEnum):
    """The party that a request in flight waits for."""

    ENGINE = "engine"  # the engine must answer
    TOOLS = "tools"  # its tools run
    US = "us"  # the engine has finished, and its silence means nothing


class Finish(Enum):
    """The engine's reason for the end of a message, in one form for all servers."""

    WHOLE = auto()
    CUT_OFF = auto()  # at its bound of tokens
    FILTERED = auto()  # by a filter of the server
    UNKNOWN = auto()  # or no reason: a call without an end is no call


FINISHES: Final = {
    **dict.fromkeys(
        ("stop", "tool_calls", "function_call", "eos", "eos_token", "end_turn", "stop_sequence"), Finish.WHOLE
    ),
    **dict.fromkeys(("length", "max_tokens", "max_output_tokens", "model_length"), Finish.CUT_OFF),
    **dict.fromkeys(
        ("content_filter", "safety", "sensitive", "prohibited_content", "blocklist", "recitation"), Finish.FILTERED
    ),
}


class LoopSearch:
    """Searches the newest generation of an answer for endless repetition; each search reads on from the last one."""

    def __init__(self) -> None:
        self._generation: Generation | None = None
        self.chars = 0  # letters read of all generations, with the extra for each piece

    def __repr__(self) -> str:
        return f"<LoopSearch {self.chars} chars>"

    def begin_search(self, generation: Generation, limits: RepetitionLimits) -> None:
        """Search another generation from here on."""
        self._generation, self._limits = generation, limits
        self._loops: dict[str, Repetition] = {}  # one for text, reasoning and arguments each, once there is any
        self._marks = (0, 0)
        self._fragments_read = 0

    def find_loop(self, *, is_over: bool = False) -> str | None:
        """Return the words that the model repeats without end, or None."""
        generation = self._generation
        if generation is None:
            return None
        text, reasoning, text_mark, reasoning_mark = generation.since(*self._marks)
        pieces = text_mark + reasoning_mark - sum(self._marks)
        self._marks = (text_mark, reasoning_mark)
        fragments = generation.tool_call_fragments[self._fragments_read :]
        arguments = ""
        if fragments:
            self._fragments_read += len(fragments)
            arguments = "".join(piece.arguments for piece in fragments).replace("\\n", "\n")  # line feeds of JSON
        chars = len(text) + len(reasoning) + len(arguments)
        self.chars += chars + PIECE_CHARS * pieces
        if is_over and not self._loops and chars < self._limits.least_chars:
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


class CostParts(NamedTuple):
    """The parts of an answer's cost that are not its own.

    ``earlier`` is an earlier attempt's, as far as some usage has it, ``strayed`` that of words that are not used,
    ``rewritten`` the tokens that were generated once more, ``at_tokens`` the tokens that it goes on from, and
    ``dropped`` those of a half that some usage has although its message was written from its beginning.
    """

    earlier: Usage
    strayed: Usage
    rewritten: int
    at_tokens: int
    dropped: int


class Answer:
    """The answer of one request: written by its runner, read by all."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended: list[Generation] = []
        self._words = ""  # text, without calls, of the newest message read that has any
        self._is_read = False
        self.was_asked = False  # an engine was asked for a part of it
        self.loops = LoopSearch()
        self.generation = Generation(clock)
        self.prompt_chars = 0
        self.prompt_tokens = 0  # most tokens that the newest prompt may take of a shared KV cache
        self.counted_tokens: int | None = None  # its exact tokens, if the engine counted them
        self.phase = Phase.US
        self.tool_calls: list[ToolRecord] = []
        self.signals: list[Signal] = []
        self.iterations_used = self._iterations_before = 0  # now, and as the newest message was asked for
        self.exchanges: list[ToolExchange] = []  # messages with calls, as the next prompt has them
        self.constrained_by: str | None = None  # the parameter that constrained the newest generation
        self.keeps_thought = False  # if its newest message breaks off, although a constraint holds
        self.thought = Thought.NONE  # the thought that could precede the constrained answer
        self.own_tokens: int | None = (
            None  # tokens of its first prompt that its own key sent before; None shows all cached tokens
        )
        self.first_version: int | None = None  # version of the weights that made its first token
        self.last_version: int | None = None  # version of the weights that made its last token
        self.predicted_ms: float | None = None  # estimated duration, once it is complete
        self.has_unread_call = False  # in the text of its newest message
        self.is_mute = False  # its engine sends nothing before the whole answer
        self.deadline: CancelScope | None = None  # the time limit around the request
        self.asked: ChatRequest | None = None  # the request for the newest message
        self.is_continued = False  # it goes on from an earlier attempt's
        self.recorded: list[RecordedTokens] = []  # those of its complete messages
        self.source = ""  # names the model that writes it
        self._counted: Usage | None = None  # the cost that some usage has of a half; None: all of it
        self._half_tokens = 0  # those of the message that it goes on with
        self.begins_with: HalfAnswer | None = None  # an earlier attempt's, until its first message is asked for
        self._fruitless = 0  # attempts before it that added nothing to its half
        self._inherited = 0  # generations of an earlier attempt, which this answer goes on from

    def __repr__(self) -> str:
        return f"<Answer {self.phase} generations={len(self._ended) + 1} {self.generation!r}>"

    def go_on_from(self, half: HalfAnswer) -> None:
        """Take over the messages of an earlier attempt."""
        self.is_continued, self.begins_with = True, half
        self._ended, self._inherited = list(half.ended), len(half.ended)
        self.exchanges, self.tool_calls, self.signals = list(half.exchanges), list(half.tool_calls), list(half.signals)
        self.iterations_used, self._words = half.iterations_used, half.words
        self.first_version, self._counted, self._half_tokens = half.first_version, half.counted, half.tokens
        self._fruitless = half.fruitless

    @property
    def cost_parts(self) -> CostParts:
        """The parts of its cost that are not its own."""
        own, ended = self._generations[self._inherited :], self._ended[: self._inherited]
        inherited = sum((each.usage or each.seen for each in ended), NOTHING)
        strayed = sum((each.usage or each.seen for each in own if each.has_strayed), NOTHING)
        rewritten = sum(each.rewritten for each in own)
        carried = sum(each.carried for each in own)  # as this engine counts them; that of the half counted its pieces
        known = inherited + Usage(0, self._half_tokens if carried else 0, 0)
        counted = known if self._counted is None else self._counted
        full = counted.completion_tokens
        lost = 0
        if self.begins_with is None and not carried:
            lost = self._half_tokens if self._counted is None else max(0, full - inherited.completion_tokens)
            counted = inherited if full > inherited.completion_tokens else counted
        return CostParts(counted, strayed, rewritten, inherited.completion_tokens + carried, lost)

    @property
    def half(self) -> HalfAnswer:
        """The answer so far, for another attempt to go on from; an ended message without calls is left out."""
        if self.begins_with is not None:
            return self.begins_with
        if self.generation.tokens is not None:
            return HalfAnswer()  # an engine would tokenize its words in another way than they were written
        generation, is_whole = self.generation, self.generation.finish_reason is not None
        text, reasoning = generation.pieces
        if any(call.iteration >= self.iterations_used for call in self.tool_calls):
            return HalfAnswer()  # its calls were cut off: whether they took effect is not known
        is_bound = self.asked is not None and constraint_in(self.asked.params) is not None
        is_answered = self.iterations_used > self._iterations_before
        tokens, is_lost = generation.output_tokens, is_whole or is_answered or generation.is_refusal
        is_lost |= is_bound and not self.keeps_thought
        if is_lost or (generation.tool_call_fragments and not text):
            text = reasoning = ()
        elif is_bound:
            text, tokens = (), tokens - len(text)
        return HalfAnswer(
            text=text,
            reasoning=reasoning,
            tokens=tokens if text or reasoning else 0,
            ended=tuple(self._generations if is_answered else self._ended),
            exchanges=tuple(self.exchanges),
            tool_calls=tuple(self.tool_calls),
            signals=tuple(self.signals),
            iterations_used=self.iterations_used,
            words=self._words,
            asked=self.asked,
            first_version=self.first_version,
            source=self.source,
            fruitless=self._fruitless + 1 if generation.carried and generation.first_token_at is None else 0,
        )

    def begin_generation(
        self, limits: RepetitionLimits, prompt_chars: int, going_on: GoingOn | None = None
    ) -> Generation:
        """Start the engine's next answer and return it; ``prompt_chars`` is the size of its prompt."""
        if self.was_asked:
            self._ended.append(self.generation)
        self.was_asked, self._is_read, self.begins_with = True, False, None
        self._iterations_before = self.iterations_used
        self.prompt_tokens, self.counted_tokens = 0, None
        self.generation = Generation(self._clock)
        if going_on is not None:
            begun = replace(going_on.begun, text=going_on.begun.text + going_on.surplus)
            kind = RepeatedGeneration if going_on.is_again else ContinuedGeneration
            self.generation = kind(self._clock, begun, going_on.tokens, going_on.unheard)
        self.generation.tokens = TokenRecord() if self.asked is not None and self.asked.records else None
        self.prompt_chars = prompt_chars
        self.loops.begin_search(self.generation, limits)
        self.phase = Phase.ENGINE
        return self.generation

    def begin_again(self, limits: RepetitionLimits, prompt_chars: int, going_on: GoingOn | None = None) -> None:
        """Restart the newest generation with its room in a cache, unless the engine is answering it."""
        if self.phase is not Phase.ENGINE:
            if self.generation.carried:
                self.generation = self.generation.without_words()  # the next one begins with them again
            tokens = self.prompt_tokens, self.counted_tokens
            self.begin_generation(limits, prompt_chars, going_on)
            self.prompt_tokens, self.counted_tokens = tokens

    def take_words(self, words: str) -> None:
        """Take the text of the last message, without its calls."""
        self._is_read = True
        self._words = words or self._words

    @property
    def text(self) -> str:
        """The text of the newest message that has any; calls written in a text do not count."""
        return self._words if self._is_read else self.generation.text or self._words

    @property
    def reasoning(self) -> str:
        """All reasoning so far."""
        return "\n\n".join(thought for thought in (each.reasoning for each in self._generations) if thought)

    @property
    def finish(self) -> Finish:
        """Whether the newest message is whole, and why not."""
        return FINISHES.get((self.generation.finish_reason or "").casefold(), Finish.UNKNOWN)

    @property
    def is_declined(self) -> bool:
        """Whether the server marks the newest message as a refusal, or its filter ended it."""
        return self.generation.is_refusal or self.finish is Finish.FILTERED

    @property
    def usage(self) -> Usage | None:
        """The cost of all generations, as far as the engine has reported it."""
        if not self._ended:
            return self.generation.usage
        known = [each.usage for each in self._generations if each.usage is not None and not each.has_strayed]
        return sum(known, NOTHING) if known else None

    @property
    def cost(self) -> Usage:
        """Tokens of all generations: reported, or estimated if the engine has not reported them."""
        return sum((each.usage or each.seen for each in self._generations), NOTHING)

    @property
    def told_cost(self) -> Usage:
        """The cost as shown: no more of a prompt counts as cached than its own key sent before."""
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
        """Whether the engine has reported the cost of all generations."""
        return self.generation.usage is not None and all(each.usage is not None for each in self._ended)

    @property
    def told_prompt_tokens(self) -> int | None:
        """The tokens of the newest prompt as its engine reported them; None before that."""
        return self.generation.prompt_tokens or self.counted_tokens

    @property
    def context_tokens(self) -> int:
        """The tokens that the newest generation put into its engine's cache; estimated from letters until reported."""
        usage = self.generation.usage
        if usage is not None:
            return usage.prompt_tokens + usage.completion_tokens
        prompt = self.told_prompt_tokens or self.prompt_chars // LETTERS_A_TOKEN
        return prompt + self.generation.output_tokens

    @property
    def held_tokens(self) -> int:
        """The tokens that the newest generation holds of a shared KV cache; 0 before it is admitted, and after its end.

        A prompt counts as a whole while it is read.
        """
        if self.phase is not Phase.ENGINE or not self.prompt_tokens:
            return 0
        generation = self.generation
        return (generation.prompt_tokens or self.prompt_tokens) + generation.output_tokens

    @property
    def output_tokens(self) -> int:
        """The number of received pieces of answers: about one per token."""
        return sum(each.output_tokens for each in self._generations)

    @property
    def tools_s(self) -> float:
        """The seconds that its tools ran; tools of one message run in parallel."""
        longest: dict[int, float] = {}
        for call in self.tool_calls:
            longest[call.iteration] = max(longest.get(call.iteration, 0.0), call.duration_s)
        return sum(longest.values())

    @property
    def started_at(self) -> float:
        """The time of the first request to the engine, in the clock's seconds."""
        return self._own[0].started_at

    @property
    def first_token_at(self) -> float | None:
        """The time of the first token, None if there was none."""
        if not self._ended:
            return self.generation.first_token_at
        return next((each.first_token_at for each in self._own if each.first_token_at is not None), None)

    @property
    def _own(self) -> list[Generation]:
        return self._generations[self._inherited :]

    @property
    def _generations(self) -> list[Generation]:
        return [*self._ended, self.generation]
