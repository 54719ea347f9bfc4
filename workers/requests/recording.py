"""Records the tokens of a complete message: the engine tokenizes its prompt, and decodes its ids if that is needed."""

import logging
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
        if engine.read_prompt is not None:
            record.prompt = await engine.read_prompt(client.post, client.dialect.encode(chat))
        is_text = await _is_text(client, engine, chat, generation, record)
    except EngineUnreachable as error:
        return broken_off(without_frames(error))
    except EngineError as error:  # asked again it would say the same: the record is not whole
        logger.warning("tokens of %s are not known to be whole: %s", chat.model, error)
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
