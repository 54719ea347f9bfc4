"""A job's document as it was posted: what is looked up in it, without making a job of it again. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec
from msgspec import Raw, Struct

from service.conversations.until import Ending
from service.conversations.variables import fill, written

MOST_TEXTS: Final = 4  # of the full length, of the variables of a conversation, and of its conditions
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_conversations = msgspec.json.Decoder(list[Raw]).decode


class _Identified(Struct, gc=False):
    id: str | None = None


_decode_ids = msgspec.json.Decoder(list[_Identified]).decode


class _PostedCondition(Struct):
    agent: str | None = None
    says: list[str] | None = None
    matches: str | None = None
    field: str | None = None
    equals: str | int | float | bool | None = None
    signal: str | None = None
    agree: list[str] | None = None
    unchanged: int | None = None
    answer_tokens: int | None = None

    @property
    def told(self) -> str:
        """The condition in words."""
        if self.says or self.matches is not None or self.field is not None:
            return f"{self.agent} {self._told_words}"
        if self.signal is not None:
            return f"{self.agent or 'an agent'} sends {self.signal}"
        if self.agree:
            return f"{', '.join(self.agree)} agree"
        if self.unchanged is not None:
            return f"unchanged for {self.unchanged} rounds"
        return f"answers of {self.answer_tokens} tokens"

    @property
    def _told_words(self) -> str:
        if self.says:
            return f"says {' or '.join(self.says)}"
        return f"says {self.field}: {written(self.equals)}" if self.matches is None else f"matches {self.matches}"


class _Source(Struct):
    job: str
    conversation: str


class _PostedConversation(Struct, rename={"source": "from"}):
    prompt: str | None = None
    id: str | None = None
    rounds: int | None = None
    variables: dict[str, str | int | float | bool] | None = None
    until: list[_PostedCondition] | None = None
    source: _Source | None = None

    @property
    def filled(self) -> str:
        """The prompt with its values."""
        return fill(self.prompt or "", None if self.variables is None else self.values)

    @property
    def values(self) -> dict[str, str]:
        """The values as they are inserted."""
        return {name: written(value) for name, value in (self.variables or {}).items()}


class _Document(Struct):
    conversations: list[_PostedConversation]
    rounds: int | None = None
    until: list[_PostedCondition] | None = None

    def told_conditions(self, conversation: _PostedConversation) -> tuple[str, ...]:
        """Return the conditions that may end a conversation, in words."""
        return tuple(each.told for each in (self.until if conversation.until is None else conversation.until) or ())


class PostedHead(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The part of a posted conversation that a list tells.

    ``prompt`` is the beginning of the prompt, in one line, ``until`` the conditions in words.
    """

    prompt: str
    variables: Mapping[str, str] = MappingProxyType({})
    until: Sequence[str] = ()

    def told_end(self, ending: Ending) -> str:
        """Return in words why the conversation ended before its rounds were over."""
        if ending.leader is not None:
            return f"{ending.leader} ended it in round {ending.round + 1}"
        place = ending.until or 0
        condition = self.until[place] if place < len(self.until) else f"until[{place}]"
        return f"{condition}, in round {ending.round + 1}"


class ConversationPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation as it was posted, and its neighbours in the job; ``number`` counts from 1."""

    prompt: str
    rounds: int
    number: int
    total: int
    previous: str | None
    next: str | None
    until: Sequence[str] = ()
    source: Mapping[str, str] | None = None


_decode = msgspec.json.Decoder(_Document).decode
_decode_conditions = msgspec.json.Decoder(list[_PostedCondition] | None).decode


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
        rounds=conversation.rounds or read.rounds or 1,
        number=at + 1,
        total=len(names),
        previous=names[at - 1] if at else None,
        next=names[at + 1] if at + 1 < len(names) else None,
        until=read.told_conditions(conversation),
        source=None if conversation.source is None else msgspec.structs.asdict(conversation.source),
    )


def posted_heads(document: str, characters: int) -> list[PostedHead]:
    """Return the heads of all conversations in their order, each text of so many characters at most."""
    read = _decode(document)
    of_job = _bounded([each.told for each in read.until or ()], characters)
    return [
        PostedHead(
            prompt=" ".join(conversation.filled[: 4 * characters].split())[:characters],
            variables=dict(zip(values, _bounded(values.values(), characters), strict=False)),
            until=of_job if until is None else _bounded([each.told for each in until], characters),
        )
        for conversation in read.conversations
        for values, until in [(conversation.values, conversation.until)]
    ]


def posted_conditions(document: str, characters: int) -> list[str]:
    """Return the job's own conditions in words, each of so many characters at most."""
    until = _decode_conditions(_decode_fields(document).get("until", b"null"))
    return _bounded([each.told for each in until or ()], characters)


def _bounded(texts: Iterable[str], characters: int) -> list[str]:
    """Return the beginnings of texts, as many as have room together: of 10,000 conversations all are kept."""
    kept: list[str] = []
    left = MOST_TEXTS * characters
    for text in texts:
        if left <= 0:
            break
        kept.append(text[: min(characters, left)])
        left -= len(kept[-1])
    return kept


def _named(conversation: Raw, name: str) -> Raw:
    return Raw(msgspec.json.encode({**_decode_fields(conversation), "id": name}))


def _id_of(conversation: _PostedConversation, number: int) -> str:
    return f"c{number}" if conversation.id is None else conversation.id
