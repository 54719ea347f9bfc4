"""Writes facts to the store in pieces: a cancel may bring a million, and other commits must not wait for all."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final

from service.conversations.job.job import TurnKey
from service.conversations.job.states import ENDED_CONVERSATIONS
from service.scheduling.core import events
from service.scheduling.keeping.turns import Turns
from service.scheduling.work import RunCounters, SchedulerStore
from service.store import records
from service.store.records import Record

FACTS_A_WRITE: Final = 500


class FactWriter:
    """Counts ended turns and conversations, and forgets turns whose end is durable; owned by the scheduler."""

    def __init__(
        self, store: SchedulerStore, counters: RunCounters, turns: Turns, start_soon: Callable[..., Any]
    ) -> None:
        self._store = store
        self._counters = counters
        self._turns = turns
        self._start_soon = start_soon

    def __repr__(self) -> str:
        return f"<FactWriter {self._counters!r}>"

    def record(self, facts: Sequence[Record]) -> None:
        """Pass facts to the store in order."""
        for begin in range(0, len(facts), FACTS_A_WRITE):
            self._write(facts[begin : begin + FACTS_A_WRITE])

    def in_pieces(self, facts: Iterable[Record], move: events.Move) -> Sequence[Record]:
        """Return the facts of a move; those of a long end are written in pieces later, and nothing is returned."""
        if isinstance(move, events.ConversationEnded) and len(move.unspoken) > FACTS_A_WRITE:
            self._start_soon(self._write_slowly, iter(facts))
            return ()
        return list(facts)

    async def settle(self) -> None:
        """Return when all facts so far are durable or refused."""
        await self._store.append([])

    def _write(self, facts: Sequence[Record]) -> None:
        ended = [fact.turn.key for fact in facts if isinstance(fact, records.TurnEnded)]
        conversations = sum(
            isinstance(fact, records.ConversationMoved) and fact.state in ENDED_CONVERSATIONS for fact in facts
        )
        self._counters.note_ended(len(ended), conversations)
        self._store.append_nowait(facts, partial(self._forget_stored, ended, conversations))

    async def _write_slowly(self, facts: Iterator[Record]) -> None:
        while some := list(islice(facts, FACTS_A_WRITE)):
            self._write(some)
            await self.settle()

    def _forget_stored(self, keys: Sequence[TurnKey], conversations: int) -> None:
        self._counters.persisted += conversations
        self._turns.forget_stored(keys)
