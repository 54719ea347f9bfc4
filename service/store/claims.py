"""The conversations that this node runs.

Only the writer's thread uses them. An operation may run several times until its group is committed, and must find the
same state each time. So it returns its changes, and they are applied after the commit.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from service.conversations.job.job import JobId, TurnKey
from service.conversations.job.states import ConversationState
from service.store import awaited_turns, conversation_rows, event_rows, heirs, job_rows
from service.store.databases.database import Claim, Connection, Membership
from service.store.facts import Applied, FactGroup, IsPassing
from service.store.records import ConversationWorded, NewJob, Place, Record, StoredJob


class Claims:
    """The fence of each claimed conversation that has neither ended nor been released."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._fences: dict[Place, int] = {}
        self._arriving: set[Place] = set()  # within the group that is being written
        self._leaving: set[Place] = set()
        self._is_sure = False  # all claims of this node are known, so a claim returns only new ones
        self._will_be_sure = False  # the same after the group that is being written

    def __repr__(self) -> str:
        return f"<Claims {len(self._fences)} by {self._membership.node_id}>"

    def begin_group(self) -> None:
        """Begin the write of a group, for the first time or again."""
        self._arriving.clear()
        self._leaving.clear()
        self._will_be_sure = self._is_sure

    # When a group is committed

    def keep(self, claims: Iterable[Claim]) -> None:
        """Store the fences of new claims."""
        self._fences |= {_place(claim): claim.fence for claim in claims}

    def keep_told(self, claims: Iterable[Claim]) -> None:
        """Store the fences of the conversations that a claim has returned."""
        self.keep(claims)
        self._is_sure = self._will_be_sure

    def doubt(self) -> None:
        """Let the next claim return all unknown claims of this node: a failed write may be stored."""
        self._is_sure = self._will_be_sure = False

    def drop(self, places: Iterable[Place]) -> None:
        """Drop the fences of conversations that have ended or were released."""
        for place in places:
            self._fences.pop(place, None)

    def forget_all(self) -> None:
        """Forget all fences: another node has taken over."""
        self._fences.clear()
        self._is_sure = False

    # Within one

    def unlearn(self, places: Iterable[Place] | None = None) -> None:
        """Forget some or all claims, so that a later claim of the same group returns them again."""
        forgotten = set(self._fences if places is None else places)
        self._leaving |= forgotten
        self._arriving -= forgotten
        self._is_sure = self._will_be_sure = False

    def post(self, connection: Connection, new: NewJob, *, claims: bool) -> tuple[StoredJob, list[Claim], bool]:
        """Insert a job, or return the stored one with the same key and body."""
        stored = job_rows.find_posted(connection, new)
        if stored is not None:
            return stored, [], False
        job = new.job
        if new.shares:
            heirs.check_sources(connection, job, new.shares)
        number = self._membership.add_job(connection, job_rows.columns_of(new), job)
        if number is None:
            stored = job_rows.find_posted(connection, new)  # another node has just inserted it
            assert stored is not None  # noqa: S101 - its key kept ours from being inserted
            return stored, [], False
        owner, fence = (self._membership.node_id, 1) if claims else (None, 0)
        rows = [
            (
                job.id,
                conversation.id,
                place,
                event_rows.to_json(conversation.metadata),
                ConversationState.QUEUED.value,
                owner,
                fence,
            )
            for place, conversation in enumerate(job.conversations)
        ]
        self._membership.add_conversations(connection, rows, job)
        job_rows.keep_document(connection, new)
        conversation_rows.keep_posted(connection, job)
        if new.shares:
            heirs.add(connection, job, new.shares)
        for name, words in new.words.items():
            conversation_rows.keep_words(
                connection, ConversationWorded(job_id=job.id, conversation_id=name, words=words)
            )
        event_rows.write_first(connection, job.id, new.created_at)
        self._membership.notify([job.id], is_work=not claims)
        taken = (
            [Claim(job_id=job.id, conversation_id=conversation.id, fence=1) for conversation in job.conversations]
            if claims
            else []
        )
        return job_rows.as_stored(new, number), self._arrive(taken), True

    def claim(
        self, connection: Connection, models: Sequence[str], limit: int | None, job_id: JobId | None
    ) -> list[Claim]:
        """Claim conversations that no node runs; return them with earlier claims that this node does not know."""
        claimed = self._membership.claim(connection, models, limit, job_id)
        if not self._will_be_sure:
            claimed, self._will_be_sure = self._membership.owned(connection), True
        return self._arrive(claimed)

    def _arrive(self, claims: Iterable[Claim]) -> list[Claim]:
        """Return the new ones of ``claims``, and count them as known for the rest of the group.

        A conversation that left earlier in the group may be new again.
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
        """Release conversations to other nodes, each with the models that it needs next.

        No node claims a conversation that only ``awaited`` turns can move on.
        """
        for place, models in wants.items():
            fence = self._fence(place)
            if fence is not None:
                self._leaving.add(place)
                claim = Claim(job_id=place[0], conversation_id=place[1], fence=fence)
                self._membership.release(connection, claim, models)
                if place in awaited:
                    awaited_turns.leave(connection, self._membership, awaited[place])
        self._membership.notify([], is_work=True)

    def apply(self, connection: Connection, records: Sequence[Record], is_passing: IsPassing | None = None) -> Applied:
        """Apply facts in order; with ``is_passing`` one by one, dropping those that cannot be written."""
        group = FactGroup(connection, self._membership, self._fence, self._leaving.add)
        return group.apply(records) if is_passing is None else group.apply_carefully(records, is_passing)

    def _fence(self, place: Place) -> int | None:
        return None if place in self._leaving else self._fences.get(place)


def _place(claim: Claim) -> Place:
    return claim.job_id, claim.conversation_id
