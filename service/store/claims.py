"""The conversations that this node runs, and what it writes of them.

Used by the writer's thread alone. What an operation changes here it returns as well, and it is taken over with
``committed``: an operation may run several times until its group is committed, and must find the same each time.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from service.conversations.job import JobId
from service.conversations.states import ENDED_CONVERSATIONS, ConversationState
from service.store import operations, usage
from service.store.databases.database import Claim, Connection, Membership
from service.store.records import (
    ConversationMoved,
    Fact,
    NewJob,
    Record,
    RequestUsed,
    StoredJob,
    TurnEnded,
    TurnRequeued,
    Used,
)
from workers.log_context import line_about

Place = tuple[JobId, str]  # a conversation
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What became of facts: conversations that ended with them, and how many were refused."""

    ended: Sequence[Place]
    refused: int


class Claims:
    """The fence of each conversation that was claimed and has neither ended nor been released."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._fences: dict[Place, int] = {}
        self._arriving: set[Place] = set()  # within the group that is being written
        self._leaving: set[Place] = set()

    def __repr__(self) -> str:
        return f"<Claims {len(self._fences)} by {self._membership.node_id}>"

    def begin_group(self) -> None:
        """Note that a group is written, for the first time or again."""
        self._arriving.clear()
        self._leaving.clear()

    # When a group is committed

    def keep(self, claims: Iterable[Claim]) -> None:
        """Take what was claimed."""
        self._fences |= {_place(claim): claim.fence for claim in claims}

    def take_over(self, applied: "Applied") -> None:
        """Take what facts have ended."""
        self.drop(applied.ended)

    def drop(self, places: Iterable[Place]) -> None:
        """Take what has ended or was released."""
        for place in places:
            self._fences.pop(place, None)

    def forget_all(self) -> None:
        """Note that another node has taken over."""
        self._fences.clear()

    # Within one

    def post(self, connection: Connection, new: NewJob, *, claims: bool) -> tuple[StoredJob, list[Claim], bool]:
        """Insert a job, or return the one of the same key and body."""
        stored = operations.find_posted(connection, new)
        if stored is not None:
            return stored, [], False
        job = new.job
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
        operations.tell_posted(connection, new)
        self._membership.notify(connection, [job.id], is_work=not claims)
        taken = (
            [Claim(job_id=job.id, conversation_id=conversation.id, fence=1) for conversation in job.conversations]
            if claims
            else []
        )
        return operations.as_stored(new, number), self._arrive(taken), True

    def take(
        self, connection: Connection, models: Sequence[str], limit: int | None, job_id: JobId | None
    ) -> list[Claim]:
        """Claim what no node runs; return it, with what this node had claimed without learning of it."""
        self._membership.claim(connection, models, limit, job_id)
        return self._arrive(self._membership.owned(connection))

    def _arrive(self, claims: Iterable[Claim]) -> list[Claim]:
        """Return those of ``claims`` that are new, and take them as known for the rest of the group."""
        fresh = [claim for claim in claims if _place(claim) not in self._fences and _place(claim) not in self._arriving]
        self._arriving.update(map(_place, fresh))
        return fresh

    def release(self, connection: Connection, wants: Mapping[Place, Sequence[str]]) -> None:
        """Leave conversations to other nodes, each with the models that it needs next."""
        for place, models in wants.items():
            fence = self._fence(place)
            if fence is not None:
                self._leaving.add(place)
                claim = Claim(job_id=place[0], conversation_id=place[1], fence=fence)
                self._membership.release(connection, claim, models)
        self._membership.notify(connection, [], is_work=True)

    def apply(self, connection: Connection, records: Sequence[Record]) -> "Applied":
        """Apply facts in their order; refuse those of what is ours no more."""
        ended: list[Place] = []
        refused = 0
        changed: dict[JobId, None] = {}
        used: list[Used] = []
        for record in records:
            if isinstance(record, RequestUsed):
                used.append(record.used)
                continue
            place = operations.place_of(record)
            fence = self._fence(place)
            if fence is None:
                refused += 1
                line = line_about({"job": place[0], "conversation": place[1]})
                what = _words(record)
                logger.warning("store: refused, since this node runs %s no more: %s", "/".join(place), what, extra=line)
                continue
            changed[place[0]] = None
            if isinstance(record, TurnEnded | TurnRequeued) and record.used is not None:
                used.append(record.used)
            if not isinstance(record, ConversationMoved):
                operations.apply(connection, record)
                continue
            operations.move_conversation(connection, record, fence)
            if record.state in ENDED_CONVERSATIONS:
                ended.append(place)
                self._leaving.add(place)
        usage.add(connection, used)
        if changed:
            self._membership.notify(connection, changed, is_work=False)
        return Applied(ended=ended, refused=refused)

    def _fence(self, place: Place) -> int | None:
        return None if place in self._leaving else self._fences.get(place)


def _place(claim: Claim) -> Place:
    return claim.job_id, claim.conversation_id


def _words(record: Fact) -> str:
    if isinstance(record, TurnEnded):
        return f"a late result of {record.turn.key.agent_id} in round {record.turn.key.round}, {record.turn.state}"
    return type(record).__name__
