"""Applies facts: one match over their types, and one write for many facts and their effects."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Final, assert_never

import msgspec

from service.conversations.job.job import JobId
from service.conversations.job.states import ENDED_CONVERSATIONS, ConversationState, TurnState
from service.conversations.record.transcript import Turn
from service.store import conversation_rows, event_rows, job_rows, records, tool_rows, turn_rows, usage, waits
from service.store.databases.database import Connection, Membership
from service.store.event_rows import Events
from service.store.records import Fact, Place, Record, Used
from workers.log_context import line_about
from workers.outcome import FailureReason

INTERNAL: Final = FailureReason.INTERNAL.value
IsPassing = Callable[[Exception], bool]
logger = logging.getLogger(__name__)


def apply_fact(connection: Connection, membership: Membership, fact: Fact, fence: int, events: Events) -> bool:
    """Write a fact of a conversation claimed with ``fence``, and add its events; return False if it was known."""
    match fact:
        case records.ConversationMoved():
            conversation_rows.move(connection, fact, fence, events)
        case records.ConversationWorded():
            conversation_rows.keep_words(connection, fact)
        case records.MemoryCut():
            turn_rows.cut_memory(connection, fact)
        case records.GivenUp():
            job_rows.give_up(connection, fact)
        case records.TurnMoved():
            return _move_turn(connection, membership, fact, events)
        case records.TurnRequeued() | records.HalfWritten():
            return turn_rows.requeue(connection, fact, events)
        case records.TurnEnded():
            turn_rows.end(connection, fact, events)
        case records.ToolCallStarted():
            tool_rows.start(connection, fact)
        case records.ToolCallEnded():
            tool_rows.end(connection, fact)
        case _:
            assert_never(fact)
    return True


def _move_turn(connection: Connection, membership: Membership, fact: records.TurnMoved, events: Events) -> bool:
    demand = fact.demand
    if demand is not None and not waits.begin(connection, membership, fact.key, demand):
        return False  # it has waited since before the claim, and callers know of it
    wait = {} if demand is None else {"wait_s": demand.wait_s}
    event_rows.add_turn_event(events, fact.key, fact.at, state=fact.state.value, worker=fact.worker, **wait)
    return True


class Applied(msgspec.Struct, kw_only=True):
    """The outcome of facts: conversations that ended with them, and the numbers of refused and lost facts.

    ``spoiled`` holds the conversations that ended because a fact cannot be written.
    """

    ended: list[Place] = []
    refused: int = 0
    lost: int = 0
    spoiled: list[Place] = []


class FactGroup:
    """The facts of one write, within its transaction.

    ``fence_of`` returns the fence of a conversation that this node runs. ``leave`` is called with each one that has
    ended.
    """

    def __init__(
        self,
        connection: Connection,
        membership: Membership,
        fence_of: Callable[[Place], int | None],
        leave: Callable[[Place], None],
    ) -> None:
        self._connection = connection
        self._membership = membership
        self._fence_of = fence_of
        self._leave = leave
        self._applied = Applied()
        self._changed: dict[JobId, None] = {}
        self._used: list[Used] = []
        self._events: Events = []

    def apply(self, facts: Sequence[Record]) -> Applied:
        """Apply facts in order; refuse facts of conversations that this node no longer runs."""
        for fact in facts:
            self._apply(fact)
        self._write_events()
        usage.add(self._connection, self._used)
        return self._finish()

    def apply_carefully(self, facts: Sequence[Record], is_passing: IsPassing) -> Applied:
        """Apply facts one by one, because one of them cannot be written and would undo the others.

        Usage that cannot be written is only lost itself. For any other such fact its conversation fails with
        ``internal``, and its later facts are refused, since they may build on the lost one. ``is_passing`` errors come
        from the database and are raised.
        """
        for fact in facts:
            try:
                with _savepoint(self._connection):
                    self._apply(fact)
                    self._write_events()
            except Exception as error:
                if is_passing(error):
                    raise
                self._events.clear()
                self._give_up(fact, error)
        for used in self._used:
            try:
                with _savepoint(self._connection):
                    usage.add(self._connection, [used])
            except Exception as error:
                if is_passing(error):
                    raise
                self._applied.lost += 1
                logger.exception("store: an account cannot be written, and is lost: %s", used)
        return self._finish()

    def _apply(self, record: Record) -> None:
        if isinstance(record, records.RequestUsed):
            self._used.append(record.used)
            return
        place = record.place
        fence = self._fence_of(place)
        if fence is None:
            self._applied.refused += 1
            text = "store: refused, since this node runs %s no more: %s"
            logger.warning(text, "/".join(place), _name(record), extra=_line_of(place))
            return
        if not apply_fact(self._connection, self._membership, record, fence, self._events):
            return
        if isinstance(record, records.ConversationMoved) and record.state in ENDED_CONVERSATIONS:
            self._applied.ended.append(place)
            self._leave(place)
        self._changed[place[0]] = None
        if isinstance(record, records.TurnEnded | records.TurnRequeued) and record.used is not None:
            self._used.append(record.used)

    def _give_up(self, record: Record, error: Exception) -> None:
        """Write a failed turn and a failed conversation instead of a fact that cannot be written."""
        assert not isinstance(record, records.RequestUsed)  # noqa: S101 - usage is written apart
        place = record.place
        text = "store: a fact of %s cannot be written; it ends"
        logger.error(text, "/".join(place), exc_info=error, extra=_line_of(place))
        self._applied.lost += 1
        if isinstance(record, records.TurnEnded):
            with suppress(Exception), _savepoint(self._connection):  # the conversation ends in any case
                turn_rows.end(self._connection, _unwritable(record, error), self._events)
                self._write_events()
            self._events.clear()
        failed, now = ConversationState.FAILED, datetime.now(UTC)
        job_id, name = place
        self._apply(
            records.ConversationMoved(job_id=job_id, conversation_id=name, state=failed, reason=INTERNAL, at=now)
        )
        self._write_events()
        self._applied.spoiled.append(place)

    def _write_events(self) -> None:
        events, self._events = self._events, []
        event_rows.write(self._connection, events)

    def _finish(self) -> Applied:
        if self._changed:
            self._membership.notify(self._changed, is_work=False)
        return self._applied


@contextmanager
def _savepoint(connection: Connection) -> Iterator[None]:
    """Undo what a block has written, and nothing else, if it fails."""
    connection.execute("SAVEPOINT fact")
    try:
        yield
    except Exception:
        connection.execute("ROLLBACK TO SAVEPOINT fact")
        raise
    finally:
        connection.execute("RELEASE SAVEPOINT fact")


def _unwritable(fact: records.TurnEnded, error: Exception) -> records.TurnEnded:
    """Return the fact that replaces one whose turn cannot be written."""
    turn = fact.turn
    ended = Turn(
        key=turn.key,
        kind=turn.kind,
        state=TurnState.FAILED,
        role=turn.role,
        reason=INTERNAL,
        detail=f"its result cannot be stored: {type(error).__name__}",
        worker=turn.worker,
        queued_at=turn.queued_at,
        started_at=turn.started_at,
        finished_at=turn.finished_at,
    )
    return records.TurnEnded(turn=ended, at=fact.at)


def _line_of(place: Place) -> Mapping[str, object]:
    return line_about({"job": place[0], "conversation": place[1]})


def _name(fact: Fact) -> str:
    if isinstance(fact, records.TurnEnded):
        return f"a late result of {fact.turn.key.agent_id} in round {fact.turn.key.round}, {fact.turn.state}"
    return type(fact).__name__
