"""Reads parts of a stored document without parsing the job again. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from service.conversations.document.spec import ConditionSpec, ConversationSpec
from service.conversations.job.until import Ending
from service.conversations.job.variables import fill, written
from workers.tools.schemas import postponing

MOST_TEXTS: Final = 4  # texts of full length kept of a conversation's variables, and of its conditions
NULL: Final = Raw(b"null")
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_conversations = msgspec.json.Decoder(list[Raw]).decode


class _Identified(Struct, gc=False):
    id: str | None = None


_decode_ids = msgspec.json.Decoder(list[_Identified]).decode


class PostedValues(Struct):
    """The values of a posted conversation that a table of results shows beside its turns."""

    metadata: dict[str, Any] = {}
    variables: dict[str, Any] | None = None


class _Listed(Struct):
    """The listed part of a posted conversation; a job may have ten thousand, too many to read as a whole."""

    prompt: str | None = None
    variables: dict[str, str | int | float | bool] | None = None
    until: Raw = NULL


_decode_listed = msgspec.json.Decoder(list[_Listed]).decode
_decode_values = msgspec.json.Decoder(list[PostedValues]).decode


class PostedHead(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The listed part of a posted conversation, ready to show.

    ``prompt`` is the beginning of the prompt in one line, ``until`` the conditions in words.
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
    """A conversation as posted, and its neighbours in the job; ``number`` counts from 1."""

    prompt: str
    rounds: int
    number: int
    total: int
    previous: str | None
    next: str | None
    until: Sequence[str] = ()
    source: Mapping[str, str] | None = None


def with_conversations(document: str, wanted: Collection[str], *, are_named: bool = False) -> bytes:
    """Return the JSON of a document with only the wanted conversations; everything else stays unchanged.

    With ``are_named`` a conversation without an ``id`` gets the one of its place.
    """
    fields = _decode_fields(document)
    names = _names(fields["conversations"])
    conversations = _decode_conversations(fields["conversations"])
    kept = [
        _named(conversation, name) if are_named else conversation
        for name, conversation in zip(names, conversations, strict=True)
        if name in wanted
    ]
    return msgspec.json.encode({**fields, "conversations": kept})


def posted_values(document: bytes) -> list[PostedValues]:
    """Return the values of each conversation, in the order of the document."""
    return _decode_values(_decode_fields(document)["conversations"])


def place_in(document: str, conversation_id: str) -> ConversationPlace | None:
    """Return a conversation's place in its job; None if the job does not have it."""
    fields = _decode_fields(document)
    names = _names(fields["conversations"])
    if conversation_id not in names:
        return None
    at = names.index(conversation_id)
    given = msgspec.json.decode(_decode_conversations(fields["conversations"])[at])
    with postponing():
        conversation = ConversationSpec.model_validate(given)
    source = conversation.source
    return ConversationPlace(
        prompt=_filled(conversation.prompt, _written(conversation.variables)),
        rounds=conversation.rounds or msgspec.json.decode(fields.get("rounds", b"1")),
        number=at + 1,
        total=len(names),
        previous=names[at - 1] if at else None,
        next=names[at + 1] if at + 1 < len(names) else None,
        until=_in_words(fields.get("until", NULL))
        if conversation.until is None
        else [each.told for each in conversation.until],
        source=None if source is None else {"job": source.job, "conversation": source.conversation},
    )


def posted_heads(document: str, characters: int) -> list[PostedHead]:
    """Return the heads of all conversations in order; no text is longer than ``characters``."""
    fields = _decode_fields(document)
    of_job = posted_conditions(document, characters)
    return [
        PostedHead(
            prompt=" ".join(_filled(each.prompt, values)[: 4 * characters].split())[:characters],
            variables=dict(zip(values or (), _bounded((values or {}).values(), characters), strict=False)),
            until=of_job if each.until == NULL else _bounded(_in_words(each.until), characters),
        )
        for each in _decode_listed(fields["conversations"])
        for values in [_written(each.variables)]
    ]


def posted_conditions(document: str, characters: int) -> list[str]:
    """Return the job's own conditions in words, each of at most ``characters``."""
    return _bounded(_in_words(_decode_fields(document).get("until", NULL)), characters)


def _in_words(conditions: Raw) -> list[str]:
    with postponing():
        return [ConditionSpec.model_validate(each).told for each in msgspec.json.decode(conditions) or ()]


def _filled(prompt: str | None, values: Mapping[str, str] | None) -> str:
    return fill(prompt or "", values)


def _written(variables: Mapping[str, object] | None) -> dict[str, str] | None:
    return None if variables is None else {name: written(value) for name, value in variables.items()}


def _bounded(texts: Iterable[str], characters: int) -> list[str]:
    """Return the beginnings of texts up to a common bound, since those of 10,000 conversations are kept."""
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


def _names(conversations: Raw) -> list[str]:
    return [f"c{n}" if each.id is None else each.id for n, each in enumerate(_decode_ids(conversations))]
