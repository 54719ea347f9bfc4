"""Requests of sessions: their bodies as chats, and the recording of their answers.

An answer is durable before its client hears the last byte of it.
"""

import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from service.api.errors.forms import CHAT
from service.conversations.record.session import Asked, Posted
from service.errors import BodyMalformed, ServiceError, StoreUnavailable
from service.node.sessions import Sessions
from service.scheduling.keeping.request import AGAIN_S, RelayedRequest, RelayFailure
from transport.dialects.answer_forms import WholeWords, write_document, write_stream
from transport.dialects.chat_forms import FORMS, NoChat, chat_of
from transport.errors import UNDECODABLE
from transport.relay import JSON
from workers.requests.answer import Answer, Finish
from workers.tools.call_parser import join_fragments

EVENT_STREAM: Final = "text/event-stream"
OK: Final = 200


def rename_model(body: bytes, name: str) -> bytes:
    """Return a body with another model's name."""
    return msgspec.json.encode({**msgspec.json.decode(body, type=dict[str, msgspec.Raw]), "model": name})


def read_as_chat(body: bytes, path: str, name: str) -> bytes:
    """Return the body of a chat with model ``name`` for that of another path.

    Raises:
        BodyMalformed: it cannot be one.
    """
    if path not in FORMS:
        raise BodyMalformed(f"{path} is not recorded; a session records {', '.join(FORMS)}")
    try:
        chat = chat_of(path, msgspec.json.decode(body))
    except (NoChat, *UNDECODABLE) as error:
        raise BodyMalformed(f"the body cannot be used: {error}") from error
    return msgspec.json.encode({**chat, "model": name})


class SessionRecorder:
    """Stores the exchanges of one request's session, and gives the request its answer in the form of its path."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._number: int | None = None

    def __repr__(self) -> str:
        return f"<SessionRecorder {self._number}>"

    async def record(self, request: RelayedRequest) -> None:
        """Store a complete answer; the request fails if that is impossible."""
        posted, answer = request.posted, request.attempt.answer
        fields: dict[str, Any] = msgspec.json.decode(posted.body)
        words = _words_of(request, answer, fields)
        try:
            assert posted.session is not None  # noqa: S101 - else there is no recorder
            asked = Asked(model=posted.name, prompt=fields["messages"], answer=_message_of(words), mode=request.mode)
            self._number = await self._sessions.add(posted.session, asked, answer)
        except ServiceError as error:
            after_s = AGAIN_S if isinstance(error, StoreUnavailable) else None
            request.lose_answer(RelayFailure(reason=error.code, detail=str(error), after_s=after_s))
            return
        if posted.is_streamed:
            request.asked.pass_frames(EVENT_STREAM, write_stream(posted.path, words))
        else:
            request.asked.pass_whole(OK, JSON, msgspec.json.encode(write_document(posted.path, words)))

    async def note_delivered(self, request: RelayedRequest) -> None:
        """Record that the client has the answer."""
        if self._number is not None and request.posted.session is not None:
            await self._sessions.note_delivered(request.posted.session, self._number)


def _words_of(request: RelayedRequest, answer: Answer, asked: Mapping[str, Any]) -> WholeWords:
    generation = answer.generation
    assert generation.finish_reason is not None  # noqa: S101 - else the answer has failed
    return WholeWords(
        asked=asked,
        name=request.key.job_id.removeprefix("request-"),
        created=int(time.time()),
        model=request.posted.name,
        text=generation.text,
        reasoning=generation.reasoning,
        calls=join_fragments(generation.tool_call_fragments),
        finish_reason=generation.finish_reason,
        stop_word=None if generation.tokens is None else generation.tokens.stop_word,
        usage=answer.told_cost,
        is_cut=answer.finish is Finish.CUT_OFF,
        is_filtered=answer.finish is Finish.FILTERED,
        is_refusal=generation.is_refusal,
    )


def _message_of(words: WholeWords) -> Posted:
    """Return the answer as a message of a chat."""
    message: Posted = write_document(CHAT, words)["choices"][0]["message"]
    return {name: value for name, value in message.items() if name != "reasoning"}
