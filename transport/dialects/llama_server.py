"""llama-server's dialect: its counters, its capacity, and how to ask for its progress.

Source: llama.cpp, ``tools/server`` (README and ``server-task.cpp``), builds of 2026.
"""

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Struct

from transport.counters import EngineCounters, SlotWork
from transport.dialects.dialect import (
    REWRITTEN,
    BegunQuery,
    BegunReading,
    CountQuery,
    Dialect,
    EngineQuery,
    ThoughtQuery,
)
from transport.dialects.frame_parts import MESSAGES_PATH, RESPONSES_PATH
from transport.dialects.grammar import grammar_of_choices, grammar_of_pattern
from transport.dialects.openai import MODELS_PATH, MOST_TOKENS, ask_to_go_on, body_of, respond_in_format
from transport.dialects.recording import OF_LLAMA, RENDER_PATH, TOKENIZE_PATH, Post
from transport.errors import UNDECODABLE, MalformedFrame
from transport.request import BegunAnswer, ChatRequest, Constraint, Thought, TokenDetail

MOST_SLOTS: Final = 1_000_000
SLOTS_PATH: Final = "/slots"
PROPS_PATH: Final = "/props"
COUNT_PATH: Final = "/v1/chat/completions/input_tokens"
_SHAPES_PROMPT: Final = frozenset({"chat_template_kwargs", "reasoning_format", "reasoning_effort", "enable_thinking"})
_BEGIN, _END = "<think>", "</think>"


class _NextToken(Struct, gc=False):
    n_decoded: int = 0


class _Props(Struct, gc=False):
    total_slots: int | None = None
    chat_template: str = ""


class _Rendered(Struct, gc=False):
    prompt: str


class _Tokens(Struct, gc=False):
    tokens: list[int]


class _Count(Struct, gc=False):
    input_tokens: int


class _Slot(Struct, gc=False):
    is_processing: bool = False
    id_task: int = -1
    n_prompt_tokens_processed: int = 0
    next_token: list[_NextToken] | _NextToken | None = None

    @property
    def decoded(self) -> int:
        """The answer's tokens so far."""
        tokens = self.next_token if isinstance(self.next_token, list) else [self.next_token or _NextToken()]
        return sum(token.n_decoded for token in tokens)


_decode_props = msgspec.json.Decoder(_Props).decode
_decode_rendered = msgspec.json.Decoder(_Rendered).decode
_decode_tokens = msgspec.json.Decoder(_Tokens).decode
_decode_count = msgspec.json.Decoder(_Count).decode
_decode_slots = msgspec.json.Decoder(list[_Slot]).decode


def encode(request: ChatRequest) -> bytes:
    """Return the JSON body."""
    body = body_of(request)
    body["return_progress"] = True  # the heartbeat of a long prefill
    if request.begun is not None:
        ask_to_echo(body, request.begun)
    if request.records is not None:
        OF_LLAMA.ask(body, request.records is TokenDetail.LOGPROBS)
    return msgspec.json.encode(body)


def constrain(constraint: Constraint) -> Mapping[str, object] | None:
    """Return the grammar or the schema that expresses a constraint."""
    if constraint.json_schema is not None:
        return respond_in_format(constraint)
    if constraint.pattern is None:
        return {"grammar": grammar_of_choices(constraint.choices, constraint.thought)}
    grammar = grammar_of_pattern(constraint.pattern, constraint.thought)
    return None if grammar is None else {"grammar": grammar}


def decode_capacity(props: bytes) -> int | None:
    """Return the number of slots from GET /props, None if it reports none.

    Raises:
        MalformedFrame: not the JSON of this dialect.
    """
    try:
        slots = _decode_props(props).total_slots
    except UNDECODABLE as error:
        raise MalformedFrame(f"GET /props: {error}: {props[:200]!r}") from error
    if slots is not None and not 0 < slots <= MOST_SLOTS:
        raise MalformedFrame(f"GET /props: {slots} slots")
    return slots


def decode_thought(rendered: bytes, props: bytes) -> Thought:
    """Return where the thought stands: begun by a rendered prompt, closed by it, or left to the model by its template.

    Raises:
        MalformedFrame: not the JSON of this dialect.
    """
    try:
        prompt, template = _decode_rendered(rendered).prompt, _decode_props(props).chat_template
    except UNDECODABLE as error:
        raise MalformedFrame(f"POST {RENDER_PATH}: {error}: {rendered[:200]!r}") from error
    if prompt.rstrip().endswith(_BEGIN):
        return Thought.OPEN
    if prompt.rstrip().endswith(_END):
        return Thought.NONE
    return Thought.OPTIONAL if _BEGIN in template else Thought.NONE


def decode_count(answer: bytes) -> int:
    """Return the number of tokens of a prompt.

    Raises:
        MalformedFrame: not the JSON of this dialect.
    """
    try:
        count = _decode_count(answer).input_tokens
    except UNDECODABLE as error:
        raise MalformedFrame(f"POST {COUNT_PATH}: {error}: {answer[:200]!r}") from error
    if not 0 <= count <= MOST_TOKENS:
        raise MalformedFrame(f"POST {COUNT_PATH}: {count} tokens")
    return count


def ask_to_echo(body: dict[str, object], begun: BegunAnswer) -> None:
    """Ask to go on with an answer, and to repeat its beginning, as older builds always do."""
    ask_to_go_on(body, begun)
    body["echo"] = True
    if not begun.text:
        body["continue_final_message"] = "reasoning_content"


def ask_messages_to_go_on(body: dict[str, object], begun: BegunAnswer) -> None:
    """Ask in Anthropic's form, in which a last message of the model's is the beginning of the next."""
    messages = body["messages"]
    assert isinstance(messages, list)  # noqa: S101 - Messages has them
    body["messages"] = [*messages, {"role": "assistant", "content": begun.text}]


def ask_response_to_go_on(body: dict[str, object], begun: BegunAnswer) -> None:
    """Ask in the form of Responses, in which it may be unfinished as well."""
    given = body["input"]
    items = given if isinstance(given, list) else [{"type": "message", "role": "user", "content": given}]
    said = {"type": "output_text", "text": begun.text, "annotations": []}
    begins = {"type": "message", "role": "assistant", "status": "in_progress", "content": [said]}
    body["input"] = [*items, begins]


async def count_text(post: Post, _model: object, text: str) -> int:
    """Return the tokens of a text."""
    answer = await post(TOKENIZE_PATH, msgspec.json.encode({"content": text, "add_special": False}))
    try:
        return len(_decode_tokens(answer).tokens)
    except UNDECODABLE as error:
        raise MalformedFrame(f"POST {TOKENIZE_PATH}: {error}: {answer[:200]!r}") from error


async def read_begun(post: Post, begun: BegunAnswer, without: bytes, whole: bytes) -> BegunReading:
    """Return the tokens of the beginning of an answer, if the template writes it as it is."""
    before, prompt = [_prompt_in(await post(RENDER_PATH, body)) for body in (without, whole)]
    if not begun.is_end_of(prompt, before):
        return REWRITTEN
    fewer, tokens = [decode_count(await post(COUNT_PATH, body)) for body in (without, whole)]
    return BegunReading(tokens=max(1, tokens - fewer))


def _prompt_in(rendered: bytes) -> str:
    try:
        return _decode_rendered(rendered).prompt
    except UNDECODABLE as error:
        raise MalformedFrame(f"POST {RENDER_PATH}: {error}: {rendered[:200]!r}") from error


def decode_counters(slots: bytes) -> EngineCounters:
    """Decode the answer to GET /slots; other builds may leave fields out, or give an object for a list.

    Raises:
        MalformedFrame: not the JSON of this dialect.
    """
    try:
        decoded = _decode_slots(slots)
    except UNDECODABLE as error:
        raise MalformedFrame(f"GET /slots: {error}: {slots[:200]!r}") from error
    return EngineCounters(
        work=tuple(
            SlotWork(
                task=slot.id_task,
                prompt_tokens=slot.n_prompt_tokens_processed,
                output_tokens=slot.decoded,
                is_busy=slot.is_processing,
            )
            for slot in decoded
        ),
    )


LLAMA_SERVER: Final = Dialect(
    name="llama-server",
    ready_paths=(MODELS_PATH,),
    keeps_connections=False,
    encode=encode,
    counters=EngineQuery(paths=(SLOTS_PATH,), decode=decode_counters),
    capacity=EngineQuery(paths=(PROPS_PATH,), decode=decode_capacity),
    canary_params={"max_tokens": 1, "cache_prompt": False},
    constrain=constrain,
    begun=BegunQuery(
        ask=ask_to_echo,
        asks={MESSAGES_PATH: ask_messages_to_go_on, RESPONSES_PATH: ask_response_to_go_on},
        read=read_begun,
        count=count_text,
        echoes=True,
    ),
    recording=OF_LLAMA,
    count=CountQuery(path=COUNT_PATH, decode=decode_count),
    thoughts=ThoughtQuery(render_path=RENDER_PATH, path=PROPS_PATH, params=_SHAPES_PROMPT, decode=decode_thought),
)
