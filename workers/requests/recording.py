"""Records the tokens of a complete message: the engine tokenizes its prompt, and decodes its ids if that is needed.

A prompt that the engine renders for a question of its own is rendered before the answer and after it. A template may
show the time: only where both are alike did the engine read the same.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec
from msgspec.structs import replace

from transport.client import EngineClient
from transport.dialects.recording import DETOKENIZE_PATH, Recording
from transport.errors import EngineError, EngineUnreachable, without_frames
from transport.request import ChatRequest, TokenDetail
from workers.outcome import Outcome
from workers.requests.answer import Answer
from workers.requests.generation import Generation
from workers.requests.halves import constraint_in, stops_in
from workers.requests.request_ends import broken_off
from workers.requests.tokens import TokenRecord, holds, is_text_of

OVERRIDDEN: Final = frozenset(
    {"logprobs", "top_logprobs", "return_token_ids", "return_tokens", "verbose", "stream", "stream_options"}
    | {"cache_salt"}
)
logger = logging.getLogger(__name__)


def is_mute(client: EngineClient) -> bool:
    """Whether an engine sends nothing of a recorded answer before all of it."""
    return client.dialect.recording is not None and client.dialect.recording.is_mute


async def begin_record(client: EngineClient, chat: ChatRequest, answer: Answer) -> None:
    """Render the prompt of the message that is about to be asked for, where its answer will not have the tokens.

    Raises:
        EngineUnreachable: the engine is gone.
    """
    record, engine = answer.generation.tokens, client.dialect.recording
    if record is not None and engine is not None and engine.render is not None:
        with _as_unknown(chat):
            record.rendered = await engine.render(client.post, client.dialect.encode(chat))


@contextmanager
def _as_unknown(chat: ChatRequest) -> Iterator[None]:
    """Leave a part of the record unknown if the engine refuses a question: asked again it would say the same.

    Raises:
        EngineUnreachable: the engine is gone.
    """
    try:
        yield
    except EngineUnreachable:
        raise
    except EngineError as error:
        logger.warning("tokens of %s are not known to be whole: %s", chat.model, error)


async def record_tokens(client: EngineClient, chat: ChatRequest, answer: Answer, version: int | None) -> Outcome | None:
    """Record the tokens of the newest message, if they are wanted; return an ending if the engine breaks off.

    ``version`` is that of the weights which wrote the last token.
    """
    generation, engine = answer.generation, client.dialect.recording
    if generation.tokens is None or engine is None:
        return None
    record = generation.tokens
    is_text = False
    try:
        if engine.render is not None and engine.tokenize is not None:
            with _as_unknown(chat):
                rendered = await engine.render(client.post, client.dialect.encode(chat))
                if rendered == record.rendered:
                    record.prompt = await engine.tokenize(client.post, rendered)
        with _as_unknown(chat):
            is_text = await _is_text(client, engine, chat, generation, record)
    except EngineUnreachable as error:
        return broken_off(without_frames(error))
    tokens = record.recorded(
        generation.usage,
        is_text=is_text,
        has_logprobs=chat.records is TokenDetail.LOGPROBS,
        version=version,
        reason=generation.finish_reason,
        params={name: value for name, value in chat.params.items() if name not in OVERRIDDEN},
    )
    is_masked = engine.masks_logprobs and constraint_in(chat.params) is not None
    answer.recorded.append(replace(tokens, is_masked=is_masked))
    return None


async def _is_text(
    client: EngineClient, engine: Recording, chat: ChatRequest, generation: Generation, record: TokenRecord
) -> bool:
    text, reason, stops = generation.text, generation.finish_reason, stops_in(chat.params)
    is_plain = not generation.reasoning and not generation.tool_call_fragments
    if is_plain and record.decodes_to(text, stops, reason):
        return True

    async def decode(count: int) -> str:
        asked = msgspec.json.encode(engine.detokenize(chat.model, record.ids[:count]))
        return engine.text_of(await client.post(DETOKENIZE_PATH, asked))

    decoded = await decode(len(record.ids))
    if is_plain:
        return is_text_of(decoded, await decode(len(record.ids) - 1) if record.ids else "", text, stops, reason)
    names = [each.name for each in generation.tool_call_fragments if each.name]
    return holds(decoded, [part for part in (generation.reasoning, text) if part.strip()]) and all(
        name in decoded for name in names
    )
