"""A job's conversations as a filtered and sorted list: their last words, time, tokens and ends. Pure."""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Final

import msgspec

from service.conversations.document.job_document import PostedHead
from service.conversations.job.job import TurnKind
from service.conversations.job.states import ConversationState, TurnState
from service.store.conversation_rows import ConversationRow
from service.store.turn_rows import TurnHead

WORDS: Final = 160  # characters of a text in a list
ENDING: Final = 300  # characters of a turn's failure
MOST_TERMS: Final = 8  # terms of a search


def first_words(text: str) -> str:
    """Return the beginning of a text in one line."""
    return " ".join(text[: 4 * WORDS].split())[:WORDS]


class Sums(msgspec.Struct, gc=False):
    """The sums over the ended turns of a conversation; ``words`` are the last words, said by ``agent``."""

    turns: int = 0
    tokens: int = 0
    began_at: datetime | None = None
    ended_at: datetime | None = None
    agent: str = ""
    words: str = ""
    failure: str = ""

    def add(self, turn: TurnHead) -> None:
        """Add one turn."""
        self.tokens += turn.usage.completion_tokens or 0
        if turn.started_at is not None:
            self.began_at = min(filter(None, (self.began_at, turn.started_at)))
        if turn.finished_at is not None:
            self.ended_at = max(filter(None, (self.ended_at, turn.finished_at)))
        if turn.kind is not TurnKind.TURN:
            return
        self.turns += 1
        if turn.state is TurnState.COMPLETED:
            self.agent, self.words = turn.key.agent_id, first_words(turn.text)
        elif turn.state is TurnState.FAILED:
            self.failure = f"{turn.key.agent_id}: {(turn.detail or '')[:ENDING]}"

    @property
    def took_s(self) -> float | None:
        """The seconds from the start of its first turn to the end of its last; None without both."""
        if self.began_at is None or self.ended_at is None:
            return None
        return round((self.ended_at - self.began_at).total_seconds(), 3)


NOTHING: Final = Sums()  # for a conversation without ended turns


class ListedConversation(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation in the list; ``ended_by`` is the condition or the leader that ended it early."""

    id: str
    position: int
    state: ConversationState
    awaits: Sequence[str]
    reason: str | None
    detail: str
    ended_by: str
    prompt: str
    agent: str
    words: str
    turns: int
    took_s: float | None
    tokens: int


class Order(StrEnum):
    """The order of a list."""

    POSITION = "position"
    STATE = "state"
    TURNS = "turns"
    TOOK = "took"
    TOKENS = "tokens"
    WORDS = "words"


class ListQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The wanted part of a list.

    A line matches if it contains every term of ``text``. ``name=value`` matches a variable, and quotes join words.
    """

    state: ConversationState | None = None
    is_awaited: bool = False
    text: str = ""
    order: Order = Order.POSITION
    is_descending: bool = False
    page: int = 1


class ListPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of a list; ``number`` counts from 1, ``found`` counts the lines of all pages.

    ``until`` holds the job's own conditions in words.
    """

    lines: Sequence[ListedConversation]
    number: int
    pages: int
    found: int
    until: Sequence[str] = ()


KEYS: Final[Mapping[Order, Callable[[ListedConversation], tuple[object, ...]]]] = {
    Order.POSITION: lambda line: (line.position,),
    Order.STATE: lambda line: (line.state,),
    Order.TURNS: lambda line: (line.turns,),
    Order.TOOK: lambda line: (line.took_s or 0.0,),
    Order.TOKENS: lambda line: (line.tokens,),
    Order.WORDS: lambda line: (line.words.casefold(),),
}


def lines_of(
    rows: Iterable[ConversationRow], sums: Mapping[str, Sums], heads: Sequence[PostedHead]
) -> list[ListedConversation]:
    """Return the lines of a job's conversations; ``heads`` holds the posted head of each place."""
    return [_line(row, sums.get(row.id, NOTHING), heads[row.position]) for row in rows]


def texts_of(lines: Sequence[ListedConversation], heads: Sequence[PostedHead]) -> list[str]:
    """Return each line's searched texts joined into one, which makes a search cheap."""
    return [
        "\n".join(
            (
                *(line.id, line.prompt, line.words, line.agent, line.reason or "", line.detail, line.ended_by),
                *heads[line.position].variables.values(),
            )
        ).casefold()
        for line in lines
    ]


def page_of(
    lines: Sequence[ListedConversation],
    texts: Callable[[], Sequence[str]],
    heads: Sequence[PostedHead],
    query: ListQuery,
    size: int,
) -> ListPage:
    """Return a page of a job's lines, the last one if there are fewer; ``texts`` returns those of the lines."""
    found = [line for line in lines if query.state in (None, line.state) and (line.awaits or not query.is_awaited)]
    if terms := terms_of(query.text):
        of_lines = dict(zip((line.position for line in lines), texts(), strict=True))
        found = [
            line
            for line in found
            if all(_is_found(term, of_lines[line.position], heads[line.position].variables) for term in terms)
        ]
    found.sort(key=KEYS[query.order], reverse=query.is_descending)
    pages = max(1, -(-len(found) // size))
    number = min(query.page, pages)
    return ListPage(lines=found[(number - 1) * size : number * size], number=number, pages=pages, found=len(found))


def terms_of(text: str) -> list[str]:
    """Return the terms of a search; quotes join words."""
    text = text.casefold()
    try:
        return shlex.split(text)
    except ValueError:  # a quote is still open while it is being typed
        return text.split()


def _line(row: ConversationRow, sums: Sums, head: PostedHead) -> ListedConversation:
    return ListedConversation(
        id=row.id,
        position=row.position,
        state=row.state,
        awaits=row.awaits,
        reason=row.reason,
        detail=sums.failure if row.state is ConversationState.FAILED else "",
        ended_by="" if row.ending is None else head.told_end(row.ending),
        prompt=head.prompt,
        agent=sums.agent,
        words=sums.words,
        turns=sums.turns,
        took_s=sums.took_s,
        tokens=sums.tokens,
    )


def _is_found(term: str, text: str, variables: Mapping[str, str]) -> bool:
    name, is_one, value = term.partition("=")
    if is_one and (said := [each for key, each in variables.items() if key.casefold() == name]):
        return any(each.casefold() == value for each in said)
    return term in text
