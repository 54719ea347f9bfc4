"""The conversations that this node runs, and what it writes of them.

Used by the writer's thread alone. What an operation changes here it returns as well, and it is taken over with
``committed``: an operation may run several times until its group is committed, and must find the same each time.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Final

import msgspec

from service.conversations.job import JobId, TurnKey
from service.conversations.states import ENDED_CONVERSATIONS, ConversationState, TurnState
from service.conversations.transcript import Turn
from service.store import awaited_turns, heirs, operations, usage
from service.store.databases.database import Claim, Connection, Membership
from service.store.records import (
    ConversationMoved,
    ConversationWorded,
    Fact,
    NewJob,
    Record,
    RequestUsed,
    StoredJob,
    TurnEnded,
    TurnMoved,
    TurnRequeued,
    Used,
)
from workers.log_context import line_about
from workers.outcome import FailureReason

INTERNAL: Final = FailureReason.INTERNAL.value
Place = tuple[JobId, str]  # a conversation
logger = logging.getLogger(__name__)


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """The fate of facts: conversations that ended with them, how many were refused, and how many are lost.

    ``spoiled`` are conversations that ended for a fact that cannot be written.
    """

    ended: Sequence[Place]
    refused: int
    lost: int = 0
    spoiled: Sequence[Place] = ()


class _Group:
    """The fate of the facts of one write so far."""

    def __init__(self) -> None:
        self.ended: list[Place] = []
        self.refused = self.lost = 0
        self.spoiled: list[Place] = []
        self.changed: dict[JobId, None] = {}
        self.used: list[Used] = []
        self.events: operations.Events = []

    def write_events(self, connection: Connection) -> None:
        """Write the events of the facts so far."""
        events, self.events = self.events, []
        operations.write_events(connection, events)


class Claims:
    """The fence of each conversation that was claimed and has neither ended nor been released."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._fences: dict[Place, int] = {}
        self._arriving: set[Place] = set()  # within the group that is being written
        self._leaving: set[Place] = set()
        self._is_sure = False  # whether all that is this node's is known: a claim need only tell what it brings
        self._will_be_sure = False  # with the group that is being written

    def __repr__(self) -> str:
        return f"<Claims {len(self._fences)} by {self._membership.node_id}>"

    def begin_group(self) -> None:
        """Begin the write of a group, for the first time or again."""
        self._arriving.clear()
        self._leaving.clear()
        self._will_be_sure = self._is_sure

    # When a group is committed

    def keep(self, claims: Iterable[Claim]) -> None:
        """Keep the fences of new claims."""
        self._fences |= {_place(claim): claim.fence for claim in claims}

    def keep_told(self, claims: Iterable[Claim]) -> None:
        """Keep the fences of what a claim has told."""
        self.keep(claims)
        self._is_sure = self._will_be_sure

    def doubt(self) -> None:
        """Have the next claim tell all that is this node's and not known: a write has failed that may be stored."""
        self._is_sure = self._will_be_sure = False

    def take_over(self, applied: "Applied") -> None:
        """Drop the conversations that facts have ended."""
        self.drop(applied.ended)

    def drop(self, places: Iterable[Place]) -> None:
        """Drop the fences of conversations that were ended or released."""
        for place in places:
            self._fences.pop(place, None)

    def forget_all(self) -> None:
        """Forget every fence: another node has taken over."""
        self._fences.clear()
        self._is_sure = False

    # Within one

    def unlearn(self, places: Iterable[Place] | None = None) -> None:
        """Forget what was claimed, all of it or some, so that a later claim of the same group tells it again."""
        forgotten = set(self._fences if places is None else places)
        self._leaving |= forgotten
        self._arriving -= forgotten
        self._is_sure = self._will_be_sure = False

    def post(self, connection: Connection, new: NewJob, *, claims: bool) -> tuple[StoredJob, list[Claim], bool]:
        """Insert a job, or return the one of the same key and body."""
        stored = operations.find_posted(connection, new)
        if stored is not None:
            return stored, [], False
        job = new.job
        if new.shares:
            heirs.check_sources(connection, job, new.shares)
        number = self._membership.add_job(connection, operations.job_columns(new), job)
        if number is None:
            stored = operations.find_posted(connection, new)  # another node was quicker, this very moment
            assert stored is not None  # noqa: S101 - its key is why ours was not inserted
            return stored, [], False
        owner, fence = (self._membership.node_id, 1) if claims else (None, 0)
        rows = [
            (
                job.id,
                conversation.id,
                place,
                operations.to_json(conversation.metadata),
                ConversationState.QUEUED.value,
                owner,
                fence,
            )
            for place, conversation in enumerate(job.conversations)
        ]
        self._membership.add_conversations(connection, rows, job)
        operations.keep_document(connection, new)
        if new.shares:
            heirs.add(connection, job, new.shares)
        for name, words in new.words.items():
            operations.keep_words(connection, ConversationWorded(job_id=job.id, conversation_id=name, words=words))
        operations.tell_posted(connection, new)
        self._membership.notify(connection, [job.id], is_work=not claims)
        taken = (
            [Claim(job_id=job.id, conversation_id=conversation.id, fence=1) for conversation in job.conversations]
            if claims
            else []
        )
        return operations.as_stored(new, number), self._arrive(taken), True

    def claim(
        self, connection: Connection, models: Sequence[str], limit: int | None, job_id: JobId | None
    ) -> list[Claim]:
        """Claim what no node runs; return it, with what this node had claimed without learning of it."""
        claimed = self._membership.claim(connection, models, limit, job_id)
        if not self._will_be_sure:
            claimed, self._will_be_sure = self._membership.owned(connection), True
        return self._arrive(claimed)

    def _arrive(self, claims: Iterable[Claim]) -> list[Claim]:
        """Return those of ``claims`` that are new, and take them as known for the rest of the group.

        One that was left earlier in the group may be ours again.
        """
        fresh = [claim for claim in claims if not self._is_known(_place(claim))]
        self._arriving.update(map(_place, fresh))
        return fresh

    def _is_known(self, place: Place) -> bool:
        return place in self._arriving or (place in self._fences and place not in self._leaving)

    def release(
        self,
        connection: Connection,
        wants: Mapping[Place, Sequence[str]],
        awaited: Mapping[Place, Collection[TurnKey]],
    ) -> None:
        """Leave conversations to other nodes, each with the models that it needs next.

        Those that only ``awaited`` turns can move are left to none.
        """
        for place, models in wants.items():
            fence = self._fence(place)
            if fence is not None:
                self._leaving.add(place)
                claim = Claim(job_id=place[0], conversation_id=place[1], fence=fence)
                self._membership.release(connection, claim, models)
                if place in awaited:
                    awaited_turns.leave(connection, self._membership, awaited[place])
        self._membership.notify(connection, [], is_work=True)

    def apply(self, connection: Connection, records: Sequence[Record]) -> "Applied":
        """Apply facts in their order; refuse those of what is ours no more."""
        group = _Group()
        for record in records:
            self._apply_one(connection, record, group)
        group.write_events(connection)
        usage.add(connection, group.used)
        return self._applied(connection, group)

    def apply_carefully(
        self, connection: Connection, records: Sequence[Record], is_passing: Callable[[Exception], bool]
    ) -> "Applied":
        """Apply facts one by one, where one of them cannot be written and would take the others along.

        An account that cannot be written is lost alone. In the place of any other fact its conversation ends as failed
        with ``internal``, since what follows may build on it: those facts are refused. ``is_passing`` errors are the
        database's, and are raised.
        """
        group = _Group()
        for record in records:
            try:
                with _savepoint(connection):
                    self._apply_one(connection, record, group)
                    group.write_events(connection)
            except Exception as error:
                if is_passing(error):
                    raise
                group.events.clear()
                self._give_up(connection, record, error, group)
        for used in group.used:
            try:
                with _savepoint(connection):
                    usage.add(connection, [used])
            except Exception as error:
                if is_passing(error):
                    raise
                group.lost += 1
                logger.exception("store: an account cannot be written, and is lost: %s", used)
        return self._applied(connection, group)

    def _apply_one(self, connection: Connection, record: Record, group: "_Group") -> None:
        if isinstance(record, RequestUsed):
            group.used.append(record.used)
            return
        place = operations.place_of(record)
        fence = self._fence(place)
        if fence is None:
            group.refused += 1
            line = line_about({"job": place[0], "conversation": place[1]})
            what = _words(record)
            logger.warning("store: refused, since this node runs %s no more: %s", "/".join(place), what, extra=line)
            return
        if not isinstance(record, ConversationMoved):
            if isinstance(record, TurnMoved) and record.demand is not None:
                is_new = awaited_turns.begin(connection, self._membership, record, record.demand)
                if not is_new:  # it was before a claim, and callers were told
                    return
            operations.apply(connection, record, group.events)
        else:
            operations.move_conversation(connection, record, fence, group.events)
            if record.state in ENDED_CONVERSATIONS:
                group.ended.append(place)
                self._leaving.add(place)
        group.changed[place[0]] = None
        if isinstance(record, TurnEnded | TurnRequeued) and record.used is not None:
            group.used.append(record.used)

    def _give_up(self, connection: Connection, record: Record, error: Exception, group: "_Group") -> None:
        """Write what stands for a fact that cannot be written: its turn has failed, and so has its conversation."""
        assert not isinstance(record, RequestUsed)  # noqa: S101 - those are written apart
        place = operations.place_of(record)
        line = line_about({"job": place[0], "conversation": place[1]})
        logger.error("store: a fact of %s cannot be written; it ends", "/".join(place), exc_info=error, extra=line)
        group.lost += 1
        if isinstance(record, TurnEnded):
            with suppress(Exception), _savepoint(connection):  # the conversation ends all the same
                unwritable = TurnEnded(turn=_unwritable(record.turn, error), at=record.at)
                operations.apply(connection, unwritable, group.events)
                group.write_events(connection)
            group.events.clear()
        now = datetime.now(UTC)
        failed = ConversationMoved(
            job_id=place[0], conversation_id=place[1], state=ConversationState.FAILED, reason=INTERNAL, at=now
        )
        self._apply_one(connection, failed, group)
        group.write_events(connection)
        group.spoiled.append(place)

    def _applied(self, connection: Connection, group: "_Group") -> "Applied":
        if group.changed:
            self._membership.notify(connection, group.changed, is_work=False)
        return Applied(ended=group.ended, refused=group.refused, lost=group.lost, spoiled=group.spoiled)

    def _fence(self, place: Place) -> int | None:
        return None if place in self._leaving else self._fences.get(place)


@contextmanager
def _savepoint(connection: Connection) -> Iterator[None]:
    """Undo what a block has written, and nothing else, where it fails."""
    connection.execute("SAVEPOINT fact")
    try:
        yield
    except Exception:
        connection.execute("ROLLBACK TO SAVEPOINT fact")
        raise
    finally:
        connection.execute("RELEASE SAVEPOINT fact")


def _unwritable(turn: Turn, error: Exception) -> Turn:
    """Return a turn as it is stored where its own record cannot be."""
    detail = f"its result cannot be stored: {type(error).__name__}"
    return Turn(
        key=turn.key,
        kind=turn.kind,
        state=TurnState.FAILED,
        role=turn.role,
        reason=INTERNAL,
        detail=detail,
        worker=turn.worker,
        queued_at=turn.queued_at,
        started_at=turn.started_at,
        finished_at=turn.finished_at,
    )


def _place(claim: Claim) -> Place:
    return claim.job_id, claim.conversation_id


def _words(record: Fact) -> str:
    if isinstance(record, TurnEnded):
        return f"a late result of {record.turn.key.agent_id} in round {record.turn.key.round}, {record.turn.state}"
    return type(record).__name__
