"""A job's document as it was posted: what is looked up in it, without making a job of it again. Pure."""

from collections.abc import Collection
from dataclasses import dataclass

import msgspec
from msgspec import Raw, Struct


class _Talk(Struct):
    prompt: str
    id: str | None = None
    rounds: int | None = None


class _Document(Struct):
    conversations: list[_Talk]
    rounds: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationPlace:
    """What a conversation was posted with, and which come before and after it; ``number`` counts from 1."""

    prompt: str
    rounds: int
    number: int
    total: int
    previous: str | None
    next: str | None


_decode = msgspec.json.Decoder(_Document).decode
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_talks = msgspec.json.Decoder(list[Raw]).decode


def with_conversations(document: str, wanted: Collection[str]) -> bytes:
    """Return the JSON of a document with these of its conversations alone; all else stays as it was written."""
    fields = _decode_fields(document)
    names = [_id_of(talk, number) for number, talk in enumerate(_decode(document).conversations)]
    talks = _decode_talks(fields["conversations"])
    kept = [talk for name, talk in zip(names, talks, strict=True) if name in wanted]
    return msgspec.json.encode({**fields, "conversations": kept})


def place_in(document: str, conversation_id: str) -> ConversationPlace | None:
    """Return a conversation's place in its job; None where it has none."""
    read = _decode(document)
    names = [_id_of(talk, number) for number, talk in enumerate(read.conversations)]
    if conversation_id not in names:
        return None
    at = names.index(conversation_id)
    talk = read.conversations[at]
    return ConversationPlace(
        prompt=talk.prompt,
        rounds=read.rounds if talk.rounds is None else talk.rounds,
        number=at + 1,
        total=len(names),
        previous=names[at - 1] if at else None,
        next=names[at + 1] if at + 1 < len(names) else None,
    )


def prompt_heads(document: str, characters: int) -> list[str]:
    """Return the beginnings of all prompts, in the order of the conversations, each in one line."""
    return [" ".join(talk.prompt[: 4 * characters].split())[:characters] for talk in _decode(document).conversations]


def _id_of(talk: _Talk, number: int) -> str:
    return f"c{number}" if talk.id is None else talk.id
