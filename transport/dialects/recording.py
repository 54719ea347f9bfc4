"""Token ids, as engines give them for a recorded answer.

vLLM streams ids and logprobs in the frames of a chat. llama.cpp's stream loses ids where several tokens make one
character, so its recorded answers come whole: all ids, logprobs where a token ends a character. The prompt is rendered
and tokenized by further questions. Sources: vLLM 0.32, ``entrypoints/openai/chat_completion``; llama.cpp,
``tools/server``, builds of 2026.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Raw, Struct

from transport.dialects import openai
from transport.errors import UNDECODABLE, MalformedFrame
from transport.events import Event, PromptRendered, TokensWritten

RENDER_PATH: Final = "/apply-template"
TOKENIZE_PATH: Final = "/tokenize"
DETOKENIZE_PATH: Final = "/detokenize"
Post = Callable[[str, bytes], Awaitable[bytes]]  # path and body to the body of the engine's answer
_Id = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
SHOWN_BYTES: Final = 200


class AnswerReaders(msgspec.Struct, frozen=True, kw_only=True):
    """The readers of an answer: of a frame of its stream, and of one that comes whole."""

    decode: Callable[[bytes, list[Event]], bool] = openai.decode
    decode_whole: Callable[[bytes, list[Event]], bool] = openai.decode_whole


class Recording(AnswerReaders, frozen=True, kw_only=True):
    """The way in which an engine gives token ids.

    ``ask`` adds the fields for that to the body of a chat, with or without logprobs. An engine that ``is_mute`` sends
    nothing before the whole answer. Where the answer does not have the tokens of its prompt, ``render`` asks for the
    prompt of a chat, given its body, and ``tokenize`` for the tokens of that. With ``masks_logprobs`` the logprobs of a
    constrained answer are those after its constraint. ``detokenize`` returns the body for a model's name and ids,
    ``text_of`` reads the answer.
    """

    ask: Callable[[dict[str, object], bool], None]
    is_mute: bool = False
    masks_logprobs: bool = False
    render: Callable[[Post, bytes], Awaitable[str]] | None = None
    tokenize: Callable[[Post, str], Awaitable[list[int]]] | None = None
    detokenize: Callable[[str, Sequence[int]], object]
    text_of: Callable[[bytes], str]


class _Logprob(Struct, gc=False):
    token: str | None = None
    logprob: float | None = None
    id: int | None = None  # llama.cpp's


class _Logprobs(Struct, gc=False):
    content: list[_Logprob] | None = None


class _Choice(openai.Choice, gc=False):
    token_ids: list[_Id] | None = None
    logprobs: _Logprobs | None = None
    stop_reason: str | int | None = None  # a stop word, or the id of a stop token


class _Chunk(openai.Chunk, gc=False):
    choices: list[_Choice] | None = None
    prompt_token_ids: list[_Id] | None = None


class _WholeChoice(Struct, gc=False):
    logprobs: _Logprobs | None = None


class _Verbose(Struct, gc=False):
    tokens: list[_Id] = []
    stopping_word: str = ""


class _Whole(Struct, gc=False):
    choices: list[_WholeChoice] = []
    verbose: _Verbose | None = msgspec.field(name="__verbose", default=None)


class _TokenList(Struct, gc=False):
    tokens: list[_Id]


class _Prompt(Struct, gc=False):
    prompt: str


class _Content(Struct, gc=False):
    content: str


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_whole = msgspec.json.Decoder(_Whole).decode
_decode_tokens = msgspec.json.Decoder(_TokenList).decode
_decode_prompt = msgspec.json.Decoder(_Prompt).decode
_decode_content = msgspec.json.Decoder(_Content).decode
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_list = msgspec.json.Decoder(list[dict[str, Raw]]).decode


def _ask_vllm(body: dict[str, object], has_logprobs: bool) -> None:
    body["return_token_ids"] = True
    if has_logprobs:
        body["logprobs"] = True


def _decode_vllm(frame: bytes, events: list[Event]) -> bool:
    try:
        chunk = _decode_chunk(frame)
    except UNDECODABLE as error:
        has_stopped = openai.decode(frame, events)  # an error of the engine's, or another form
        if b'"token_ids"' in frame or b'"prompt_token_ids"' in frame:
            raise MalformedFrame(f"{error}: {frame[:SHOWN_BYTES]!r}") from error
        return has_stopped
    has_stopped = openai.decode(frame, events, lambda _frame: chunk)
    if chunk.prompt_token_ids is not None:
        events.append(PromptRendered(chunk.prompt_token_ids))
    for choice in chunk.choices or ():
        ids = choice.token_ids or []
        stop_word = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        if (ids or stop_word) and not choice.index:
            each = (choice.logprobs.content if choice.logprobs else None) or ()
            is_each = len(each) == len(ids)
            values = [entry.logprob for entry in each] if is_each else None
            texts = [entry.token or "" for entry in each] if is_each else []
            events.append(TokensWritten(ids, values, texts, stop_word))
    return has_stopped


def _ask_llama(body: dict[str, object], has_logprobs: bool) -> None:
    body.pop("stream_options", None)
    body |= {"stream": False, "verbose": True, "return_tokens": True}
    if has_logprobs:
        body |= {"logprobs": True, "top_logprobs": 1}  # 0 would turn them off


async def _render(post: Post, chat: bytes) -> str:
    """Render a chat as the server itself does: what it reports of the prompt is decoded tokens.

    Raises:
        MalformedFrame: not the JSON of this engine.
    """
    rendered = await post(RENDER_PATH, chat)
    try:
        return _decode_prompt(rendered).prompt
    except UNDECODABLE as error:
        raise MalformedFrame(f"POST {RENDER_PATH}: {error}: {rendered[:SHOWN_BYTES]!r}") from error


async def _tokenize(post: Post, text: str) -> list[int]:
    """Tokenize a rendered prompt.

    Raises:
        MalformedFrame: not the JSON of this engine.
    """
    body = msgspec.json.encode({"content": text, "add_special": True, "parse_special": True})
    answer = await post(TOKENIZE_PATH, body)
    try:
        return _decode_tokens(answer).tokens
    except UNDECODABLE as error:
        raise MalformedFrame(f"POST {TOKENIZE_PATH}: {error}: {answer[:SHOWN_BYTES]!r}") from error


def _decode_llama(document: bytes, events: list[Event]) -> bool:
    """Read a whole answer; its lists of logprobs are read apart, since each token of them is several objects."""
    try:
        whole, fields = _decode_whole(document), _decode_fields(document)
        choices = _decode_list(fields.get("choices", b"[]"))
    except UNDECODABLE as error:
        has_stopped = openai.decode_whole(document, events)  # an error, or no answer at all
        if b'"__verbose"' in document:
            raise MalformedFrame(f"{error}: {document[:SHOWN_BYTES]!r}") from error
        return has_stopped
    plain = [{name: value for name, value in choice.items() if name != "logprobs"} for choice in choices]
    fields = {name: value for name, value in fields.items() if name != "__verbose"}
    has_stopped = openai.decode_whole(msgspec.json.encode({**fields, "choices": plain}), events)
    if whole.verbose is None:
        return has_stopped
    ids = whole.verbose.tokens
    logprobs = whole.choices[0].logprobs if whole.choices else None
    entries = (logprobs.content if logprobs else None) or []
    values = _placed(ids, entries) if entries else None
    is_each = len(entries) == len(ids)
    texts = [entry.token or "" for entry in entries] if is_each else []
    events.append(TokensWritten(ids, values, texts, whole.verbose.stopping_word or None))
    return has_stopped


def _placed(ids: Sequence[int], entries: Sequence[_Logprob]) -> list[float | None]:
    """Return the logprobs at their tokens: some tokens have none, and an entry counts where it can only stand once."""
    first, last = _matches(ids, entries), _matches(ids[::-1], entries[::-1])
    values: list[float | None] = [None] * len(ids)
    if first is None or last is None:
        return values
    for entry, early, late in zip(entries, first, reversed(last), strict=True):
        if early == len(ids) - 1 - late:
            values[early] = entry.logprob
    return values


def _matches(ids: Sequence[int], entries: Sequence[_Logprob]) -> list[int] | None:
    """Return the first places of the entries among the ids, in their order; None without such places."""
    places: list[int] = []
    place = 0
    for entry in entries:
        while place < len(ids) and ids[place] != entry.id:
            place += 1
        if place == len(ids):
            return None
        places.append(place)
        place += 1
    return places


def _text_of_vllm(answer: bytes) -> str:
    return _text_in(answer, lambda given: _decode_prompt(given).prompt)


def _text_of_llama(answer: bytes) -> str:
    return _text_in(answer, lambda given: _decode_content(given).content)


def _text_in(answer: bytes, read: Callable[[bytes], str]) -> str:
    try:
        return read(answer)
    except UNDECODABLE as error:
        raise MalformedFrame(f"POST {DETOKENIZE_PATH}: {error}: {answer[:SHOWN_BYTES]!r}") from error


PLAIN_ANSWERS: Final = AnswerReaders()
OF_VLLM: Final = Recording(
    ask=_ask_vllm,
    decode=_decode_vllm,
    masks_logprobs=True,
    detokenize=lambda model, ids: {"model": model, "tokens": ids},
    text_of=_text_of_vllm,
)
OF_LLAMA: Final = Recording(
    ask=_ask_llama,
    decode_whole=_decode_llama,
    is_mute=True,
    render=_render,
    tokenize=_tokenize,
    detokenize=lambda _model, ids: {"tokens": ids},
    text_of=_text_of_llama,
)
