"""Everything that must outlive the process, on any database."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Concatenate, Final, ParamSpec, TypeVar

import anyio
from msgspec.structs import replace

from service.conversations.job.job import JobId, TurnKey
from service.conversations.record.transcript import Turn
from service.errors import StoreUnavailable
from service.store import awaited_turns, job_rows, waits
from service.store.awaited_turns import SpokenTurn
from service.store.claims import Claims
from service.store.databases.database import Claim, Connection, Database
from service.store.facts import Applied
from service.store.news import FactsLost, Tell
from service.store.records import NewJob, Place, Record, RequestUsed, StoredJob
from service.store.threads import PendingWrites, Readers, Write
from service.store.waits import Due
from service.store.writer import Writer

T = TypeVar("T")
P = ParamSpec("P")
NONE_AWAITED: Final[Mapping[Place, Collection[TurnKey]]] = {}


class Store:
    """The store, for callers in the event loop; ``open_store`` opens it.

    A method that waits raises StoreUnavailable if the database is in trouble.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._membership = database.membership()
        self._claims = Claims(self._membership)
        self._writes = PendingWrites(self._claims, lambda *write: self._writer.submit(*write))  # noqa: PLW0108
        self._writer = Writer(database, self._membership, self._claims.begin_group, self._writes.hear)
        self._readers = Readers(database)
        self._writer.start()

    def __repr__(self) -> str:
        return f"<Store {self._database!r} {self._writer!r}>"

    def subscribe(self, tell: Tell) -> None:
        """Report events to ``tell`` from now on, in the event loop but in no task."""
        self._writes.tell = tell

    @property
    def node_id(self) -> str:
        """This node's id among those that share the database."""
        return self._membership.node_id

    @property
    def trouble(self) -> str | None:
        """The trouble of the database in words; None while it works."""
        return self._writer.trouble

    async def wait_failed(self) -> None:
        """Wait until a write fails for good, usually forever.

        Raises:
            StoreError: a write has failed. Unacknowledged writes may be lost, and going on would hide it.
        """
        await self._writes.wait_failed()

    # Writing

    async def post(self, job: NewJob, *, claims: bool) -> tuple[StoredJob, list[Claim], bool]:
        """Store a new job, and claim its conversations with ``claims``; return job, claims and whether it is new.

        The same key and body return the stored job.

        Raises:
            IdempotencyConflict: the key belongs to another body.
            StoreUnavailable: the database is in trouble; the job may be stored.
        """
        sources = {each.heritage.source[0] for each in job.job.conversations if each.heritage.source is not None}
        return await self._writes.write(
            frozenset({job.job.id, *sources}),
            lambda connection: self._claims.post(connection, job, claims=claims),
            lambda posted: self._claims.keep(posted[1]),
            key=job.idempotency_key,
        )

    async def claim(self, models: Sequence[str], limit: int | None, job_id: JobId | None = None) -> list[Claim]:
        """Claim at most ``limit`` conversations (of one job) that no node runs and that need one of ``models`` next.

        Earlier claims that this node does not know are returned too.

        Raises:
            StoreUnavailable: another node has taken over meanwhile.
        """
        return await self._writes.write(
            frozenset(),
            lambda connection: self._claims.claim(connection, models, limit, job_id),
            self._claims.keep_told,
            is_kept=True,
            is_claim=True,
        )

    def release_nowait(
        self, wants: Mapping[Place, Sequence[str]], awaited: Mapping[Place, Collection[TurnKey]] = NONE_AWAITED
    ) -> None:
        """Release conversations to any node with workers for one of the models that each needs next.

        No node claims a conversation that only ``awaited`` turns can move on until a caller has spoken.
        """
        jobs = frozenset(job_id for job_id, _ in wants)
        write = Write(
            operation=lambda connection: self._claims.release(connection, wants, awaited), jobs=jobs, is_kept=True
        )
        self._writes.submit(write, lambda _: self._claims.drop(wants))

    def forget_said_nowait(self, keys: Collection[TurnKey]) -> None:
        """Forget callers' words that this node has taken over; the turns stay stored."""
        write = Write(
            operation=lambda connection: awaited_turns.forget_said(connection, keys), jobs=frozenset(), is_kept=True
        )
        self._writes.submit(write, lambda _: None)

    def forget_claims_nowait(self, places: Collection[Place]) -> None:
        """Forget claims; the next claim returns them again."""
        write = Write(operation=lambda _connection: self._claims.unlearn(places), jobs=frozenset(), is_kept=True)
        self._writes.submit(write, lambda _: self._claims.drop(places))

    async def forget_all_claims(self) -> None:
        """Forget all claims; the next claim returns them again."""
        await self._writes.write(
            frozenset(), lambda _connection: self._claims.unlearn(), lambda _: self._claims.forget_all(), is_kept=True
        )

    async def leave_claims(self) -> None:
        """Release all conversations to other nodes now, before the lease ends.

        Raises:
            StoreUnavailable: other nodes have taken over already.
        """
        await self._writes.write(frozenset(), self._membership.leave, lambda _: self._claims.forget_all(), is_kept=True)

    async def request_cancel(self, job_id: JobId) -> StoredJob:
        """Request a job's cancellation durably; return the job.

        Raises:
            JobNotFound: the job does not exist.
        """
        return await self._writes.write(
            frozenset({job_id}), lambda connection: job_rows.request_cancel(connection, self._membership, job_id)
        )

    async def delete(self, job_id: JobId, *, with_heirs: bool = False) -> Sequence[JobId]:
        """Delete an ended job, with its heirs of the same key if ``with_heirs``.

        Return the jobs to cancel: those of other keys that lose inherited turns.

        Raises:
            JobNotFound: the job does not exist.
            NotEnded: the job, or an heir that is to be deleted with it, has not ended.
        """
        return await self._writes.write(
            frozenset({job_id}),
            lambda connection: job_rows.delete(connection, self._membership, job_id, with_heirs=with_heirs),
        )

    async def say(self, turn: Turn) -> SpokenTurn | None:
        """Store a caller's words or the end of its wait; return the stored turn, None if the turn does not wait."""
        return await self._writes.write(
            frozenset({turn.key.job_id}), lambda connection: awaited_turns.say(connection, self._membership, turn)
        )

    async def take_due(self) -> Due:
        """Return some turns whose wait for a caller is over, and when to look again."""
        return await self._writes.write(frozenset(), lambda connection: waits.take_due(connection, self._membership))

    async def write(self, operation: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an operation of ``service.store`` on the writer's connection."""
        return await self._writes.write(frozenset(), lambda connection: operation(connection, *args, **kwargs))

    def append_nowait(self, records: Sequence[Record], on_durable: Callable[[], None]) -> None:
        """Submit facts that belong together: they are durable soon, in the order of calls, or the store fails.

        Usage of requests belongs to no job and waits a moment for other writes. ``on_durable`` is called in the event
        loop. It is never called if the store fails, or if another node has taken over the conversation: the facts are
        then refused and logged.
        """
        write = self._facts(records)
        self._writes.submit(replace(write, may_wait=not write.jobs), self._take_over, on_success=on_durable)

    async def append(self, records: Sequence[Record]) -> bool:
        """Submit facts as ``append_nowait`` does, and return when they are durable; False if any was refused."""
        write, done = self._facts(records), anyio.Event()
        self._writes.submit(write, self._take_over, on_success=done.set, on_failure=done.set)
        await done.wait()
        try:
            applied: Applied = write.future.result()
        except StoreUnavailable:  # a kept write is retried until it succeeds, so another node has taken over
            return False
        return not (applied.refused or applied.spoiled)

    async def flush(self) -> None:
        """Return when all earlier writes are durable, or the store has failed."""
        await self._writes.write(frozenset(), lambda _connection: None, is_kept=True)

    # Reading

    async def read(self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a query of ``service.store`` in a thread, on one snapshot of the database."""
        return await self._readers.run(lambda connection: query(connection, *args, **kwargs))

    def close(self) -> None:
        """Write what was submitted and close all connections."""
        self._writer.close()
        self._readers.close()

    # Inside

    def _facts(self, records: Sequence[Record]) -> Write:
        jobs = frozenset(record.place[0] for record in records if not isinstance(record, RequestUsed))

        def is_passing(error: Exception) -> bool:
            return self._database.trouble_of(error) is not None or self._database.is_conflict(error)

        return Write(
            operation=lambda connection: self._claims.apply(connection, records),
            careful=lambda connection: self._claims.apply(connection, records, is_passing),
            jobs=jobs,
            is_kept=True,
            size=len(records),
        )

    def _take_over(self, applied: Applied) -> None:
        """Drop ended conversations after a commit, in the writer's thread."""
        self._claims.drop(applied.ended)
        if applied.lost:
            self._writes.hear(FactsLost(count=applied.lost, conversations=tuple(applied.spoiled)))


@contextmanager
def open_store(database: Database) -> Iterator[Store]:
    """Run the store of a prepared database for a block; it belongs to the running event loop."""
    store = Store(database)
    try:
        yield store
    finally:
        store.close()
