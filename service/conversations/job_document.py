"""A job's document as it was posted: what is looked up in it, without making a job of it again. Pure."""

from collections.abc import Collection

import msgspec
from msgspec import Raw, Struct

from service.conversations.variables import fill, written

_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_conversations = msgspec.json.Decoder(list[Raw]).decode


class _Identified(Struct, gc=False):
    id: str | None = None


_decode_ids = msgspec.json.Decoder(list[_Identified]).decode


class _PostedConversation(Struct):
    prompt: str
    id: str | None = None
    rounds: int | None = None
    variables: dict[str, str | int | float | bool] | None = None

    @property
    def filled(self) -> str:
        """The prompt with its values."""
        values = self.variables
        return fill(self.prompt, None if values is None else {name: written(value) for name, value in values.items()})


class _Document(Struct):
    conversations: list[_PostedConversation]
    rounds: int = 1


class ConversationPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation as it was posted, and its neighbours in the job; ``number`` counts from 1."""

    prompt: str
    rounds: int
    number: int
    total: int
    previous: str | None
    next: str | None


_decode = msgspec.json.Decoder(_Document).decode


def with_conversations(document: str, wanted: Collection[str], *, are_named: bool = False) -> bytes:
    """Return the JSON of a document with these of its conversations alone; all else stays as it was written.

    ``are_named``: but those that have their names by their places get an ``id``.
    """
    fields = _decode_fields(document)
    names = [f"c{n}" if each.id is None else each.id for n, each in enumerate(_decode_ids(fields["conversations"]))]
    conversations = _decode_conversations(fields["conversations"])
    kept = [
        _named(conversation, name) if are_named else conversation
        for name, conversation in zip(names, conversations, strict=True)
        if name in wanted
    ]
    return msgspec.json.encode({**fields, "conversations": kept})


def place_in(document: str, conversation_id: str) -> ConversationPlace | None:
    """Return a conversation's place in its job; None where it has none."""
    read = _decode(document)
    names = [_id_of(conversation, number) for number, conversation in enumerate(read.conversations)]
    if conversation_id not in names:
        return None
    at = names.index(conversation_id)
    conversation = read.conversations[at]
    return ConversationPlace(
        prompt=conversation.filled,
        rounds=read.rounds if conversation.rounds is None else conversation.rounds,
        number=at + 1,
        total=len(names),
        previous=names[at - 1] if at else None,
        next=names[at + 1] if at + 1 < len(names) else None,
    )


def prompt_heads(document: str, characters: int) -> list[str]:
    """Return the beginnings of all prompts, in the order of the conversations, each in one line."""
    return [
        " ".join(conversation.filled[: 4 * characters].split())[:characters]
        for conversation in _decode(document).conversations
    ]


def _named(conversation: Raw, name: str) -> Raw:
    return Raw(msgspec.json.encode({**_decode_fields(conversation), "id": name}))


def _id_of(conversation: _PostedConversation, number: int) -> str:
    return f"c{number}" if conversation.id is None else conversation.id
