"""The turns that callers speak: listed, stored, and ended if a caller is too late.

Source: specification, "Turns of callers".
"""

import logging
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

import anyio

from service.conversations.document.job_document import with_conversations
from service.conversations.document.job_faults import said_faults
from service.conversations.document.reading import read_stored
from service.conversations.job.job import SpokenBy, TurnKey
from service.conversations.job.states import ENDED_CONVERSATIONS, ConversationState, TurnState
from service.conversations.job.validation import read_words
from service.conversations.record.awaited_turn import AwaitedTurn
from service.conversations.record.log_fields import of_job
from service.conversations.record.transcript import Turn
from service.errors import InvalidWords, NotAwaited, StoreUnavailable
from service.node.intake import Intake
from service.scheduling.asking.judging import TOO_LONG, judge_answer, judge_conditions
from service.scheduling.scheduler import Scheduler
from service.store import awaited_turns, job_rows, waits
from service.store.awaited_turns import Awaited, OpenTurn, Which
from service.store.databases.database import Connection
from service.store.store import Store
from workers.log_context import line_about
from workers.offload.pool import asked_for

LOOK_S: Final = 1.0  # seconds between two looks after a change
REST_S: Final = 5.0  # seconds between two looks for any waits, which another node may have begun
# Multiple of a count's duration until the next: counting takes a reader 2 % of its time at most
COUNT_REST: Final = 50.0
MOST_COUNTED: Final = 64  # keys with a remembered count
logger = logging.getLogger(__name__)


class CallersTurns:
    """Takes callers' words on any node; the node that runs the conversation, or claims it then, goes on with it."""

    def __init__(self, store: Store, scheduler: Scheduler, intake: Intake, *, is_shared: bool) -> None:
        self._store = store
        self._scheduler = scheduler
        self._intake = intake
        self._is_shared = is_shared
        self._counted: dict[str | None, tuple[Awaited, float]] = {}  # by key: the count, and the time of the next one

    def __repr__(self) -> str:
        return "<CallersTurns>"

    async def count(self, owner: str | None = None) -> Awaited:
        """Count the awaited turns in the whole store, of a key or of all.

        The longer a count takes, the longer its result is used; so is the last one while the store is in trouble.
        """
        began_at = time.monotonic()
        counted, due_at = self._counted.get(owner, (Awaited(), 0.0))  # set again below, since others ask meanwhile
        if began_at >= due_at:
            with suppress(StoreUnavailable):
                counted = await self._store.read(awaited_turns.count_all, owner)
            ended_at = time.monotonic()
            due_at = ended_at + COUNT_REST * (ended_at - began_at)
        self._counted.pop(owner, None)
        self._counted[owner] = counted, due_at
        while len(self._counted) > MOST_COUNTED:
            del self._counted[next(iter(self._counted))]
        return counted

    async def say(self, key: TurnKey, text: str, whose: str | None = None) -> tuple[Turn, bool]:
        """Take a caller's words, which are durable when this returns; return the turn, and whether it is new.

        Their validation takes the turn of the key ``whose``.

        Raises:
            JobNotFound: the job does not exist.
            ConversationNotFound: the job has no such conversation.
            NotAwaited: the turn does not wait for a caller, or other words were stored.
            InvalidWords: they are too long, or do not fit the agent's validation.
            StoreUnavailable: the store is in trouble.
        """
        asked_for.set(whose)
        found = await self._store.read(awaited_turns.find, key)
        if isinstance(found, Turn):
            return _known(found, text), False
        if isinstance(found, ConversationState):
            why = f"its conversation is {found}"
            if found not in ENDED_CONVERSATIONS:
                why = await self._store.read(_why_not_yet, key)
            raise NotAwaited(key.agent_id, key.round, why)
        turn, demand = found
        fault = next(said_faults(text), None)
        if fault is None and demand.validation is not None:
            try:
                fault = await judge_answer(demand.validation, text, has_markup=False)
            except TimeoutError:
                fault = TOO_LONG
        if fault is not None:
            raise InvalidWords(fault)
        fulfils = await _fulfilled(demand, text)
        said = await self._store.say(demand.said(key, text, fulfils, turn.since_at, datetime.now(UTC)))
        if said is None:  # its conversation has just ended
            raise NotAwaited(key.agent_id, key.round, "its conversation has ended")
        if not said.is_new:
            return _known(said.turn, text), False
        self._intake.hint(is_work=True)
        return said.turn, True

    async def listed(self, which: Which, after: int, limit: int) -> list[OpenTurn]:
        """List awaited turns, the oldest first.

        Raises:
            JobNotFound: there is no such job.
            StoreUnavailable: the store is in trouble.
        """
        if which.job_id is not None:
            await self._store.read(job_rows.owner, which.job_id)
        return await self._store.read(awaited_turns.listed, which, after, limit)

    async def run(self) -> None:
        """End waits that are over, until cancelled."""
        is_changed, is_any = True, False
        rest_s = REST_S if self._is_shared else None
        while True:
            change = self._scheduler.awaits.next
            pause_s: float | None = LOOK_S
            try:
                if is_changed:
                    await self._store.flush()  # for waits begun or left since the change
                    self._intake.hint(is_work=True)  # a caller may have spoken before
                if not is_any:
                    is_any = await self._store.read(waits.ends_next) is not None
                next_s = await self._end_due() if is_any else None
                is_any, pause_s = next_s is not None, rest_s if next_s is None else next_s
            except StoreUnavailable as error:
                logger.debug("no wait is ended: %s", error)
            with anyio.move_on_after(pause_s) as patience:
                await change.wait()
            is_changed = not patience.cancelled_caught
            if is_changed and is_any:
                await anyio.sleep(LOOK_S)  # more changes often follow at once

    async def _end_due(self) -> float | None:
        """Store the ``otherwise`` of late callers, or fail their turns.

        Return the seconds until the next look, None if no wait ends.

        Raises:
            StoreUnavailable: the store is in trouble.
        """
        while True:
            due = await self._store.take_due()
            troubles: list[StoreUnavailable] = []
            # Concurrent, for one write: a long pause would look like time without a node
            async with anyio.create_task_group() as tasks:
                for turn, demand in due.turns:
                    tasks.start_soon(self._end_wait, turn, demand, troubles)
            if troubles:
                raise troubles[0]
            if len(due.turns) < waits.DUE_AT_ONCE:
                return due.pause_s

    async def _end_wait(self, turn: OpenTurn, demand: AwaitedTurn, troubles: list[StoreUnavailable]) -> None:
        asked_for.set(turn.key.job_id)
        now = datetime.now(UTC)
        if demand.otherwise is None:
            ended = demand.unsaid(turn.key, turn.since_at, now)
        else:
            fulfils = await _fulfilled(demand, demand.otherwise)
            ended = demand.said_by_nobody(turn.key, fulfils, turn.since_at, now)
        try:
            said = await self._store.say(ended)
        except StoreUnavailable as error:  # raised here, it would arrive in an exception group
            troubles.append(error)
            return
        if said is not None and said.is_new:
            what = "fails" if demand.otherwise is None else "is spoken otherwise"
            line = line_about(of_job(turn.key.job_id))
            logger.info("turn %s %s: no caller spoke within %g s", turn.key, what, demand.wait_s, extra=line)
            self._intake.hint(is_work=True)


async def _fulfilled(demand: AwaitedTurn, words: str) -> tuple[int, ...]:
    """Return the indexes of the conditions that a caller's words meet."""
    if not demand.conditions:
        return ()
    read = read_words(words, demand.validation, has_markup=False)
    return (await judge_conditions(demand.conditions, read, [])).fulfils


def _known(turn: Turn, text: str) -> Turn:
    """Return an ended turn if these are its words."""
    rules = (
        (turn.by is SpokenBy.CALLER, "a model speaks for its agent"),
        (turn.state is TurnState.COMPLETED, f"it is {turn.state} ({turn.reason})"),
        (turn.text == text, "it was spoken with other words"),
    )
    for is_kept, why in rules:
        if not is_kept:
            raise NotAwaited(turn.key.agent_id, turn.key.round, why)
    return turn


def _why_not_yet(connection: Connection, key: TurnKey) -> str:
    """Return why a turn of a conversation that goes on does not wait for a caller."""
    document = job_rows.document(connection, key.job_id)
    alone = with_conversations(document, (key.conversation_id,), are_named=True).decode()
    speakers = {agent.id: agent.by for agent in read_stored(alone).agents}
    if key.agent_id not in speakers:
        return "the job has no such agent"
    if speakers[key.agent_id] is SpokenBy.MODEL:
        return "a model speaks for its agent"
    return "its order has not come"
