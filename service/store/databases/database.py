"""The store's needs of a database; SQLite and PostgreSQL meet them in the same words.

Statements are written once, in what both understand, with ``?`` for a parameter; what cannot be the same in both is a
method here. All of a transaction's statements stand between ``begin`` and ``commit`` or ``rollback``.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

import msgspec

from service.conversations.job.job import Job, JobId

Row = Sequence[Any]

FEW: Final = 50  # conversations that are read one by one, and not with all others of their job


class Cursor(Protocol):
    """The result of a statement."""

    @property
    def rowcount(self) -> int:
        """The number of rows that it has changed."""

    def fetchone(self) -> Row | None:
        """Return the next row."""

    def fetchall(self) -> Sequence[Row]:
        """Return all rows that are left."""

    def __iter__(self) -> Iterator[Row]:
        """Iterate over the rows that are left."""


class Connection(Protocol):
    """One connection, used by one thread at a time."""

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> Cursor:
        """Run one statement."""

    def execute_many(self, sql: str, rows: Iterable[Sequence[object]]) -> None:
        """Run an INSERT of one row for each of these."""

    def begin(self) -> None:
        """Begin a transaction that writes; with a reader's connection, one that sees one moment."""

    def commit(self) -> None:
        """End it; what it wrote is durable when this returns."""

    def rollback(self) -> None:
        """End it, if it has not ended already, and all that it wrote is gone."""

    def close(self) -> None:
        """Close it; what is open is rolled back."""


T = TypeVar("T")
Query = Callable[[Connection], T]  # reads with one connection, at one moment


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation that this node runs until it ends, is released, or is taken over; ``fence`` grows each time."""

    job_id: JobId
    conversation_id: str
    fence: int


class Fenced(Exception):
    """This node's lease had ended, and another has taken over: nothing that it writes counts any more."""


class Membership(Protocol):
    """This node among those that write here. Used by the writer's thread, inside its transactions."""

    node_id: str

    def register(self, connection: Connection) -> None:
        """Become a member, under a new id, which has claimed nothing."""

    def begin_group(self, connection: Connection, number: int, jobs: Sequence[JobId], keys: Sequence[str]) -> None:
        """Write the number of the group that the transaction holds, which changes ``jobs`` and posts with ``keys``.

        Raises:
            Fenced: this member is no more.
        """

    def has_group(self, connection: Connection, number: int) -> bool:
        """Whether the group of that number was committed; a connection that broke may still be committing it."""

    def extend_lease(self, connection: Connection) -> None:
        """Make sure that the member outlives the transaction, which is about to be committed."""

    def add_job(self, connection: Connection, columns: Mapping[str, object], job: Job) -> int | None:
        """Insert a job and return its number; None if its idempotency key is another's."""

    def now(self, connection: Connection) -> float:
        """Return the time that counts for all members, in seconds since the epoch."""

    def wake(self, connection: Connection, job_id: JobId, conversation_id: str) -> None:
        """Let a conversation be claimed that only callers could move; one of them has spoken."""

    def add_conversations(self, connection: Connection, rows: Iterable[Sequence[object]], job: Job) -> None:
        """Insert the conversations of a job: its id, their id, position, metadata, state, owner and fence."""

    def claim(
        self, connection: Connection, models: Sequence[str], limit: int | None, job_id: JobId | None
    ) -> list[Claim]:
        """Claim at most ``limit`` conversations (of one job) that no node runs and that need one of ``models`` next.

        Return them in the order of jobs and conversations.
        """

    def owned(self, connection: Connection) -> list[Claim]:
        """List all unfinished conversations that this member has claimed, in the order of jobs and conversations."""

    def release(self, connection: Connection, claim: Claim, wants: Sequence[str]) -> None:
        """Leave a conversation, which needs one of the models ``wants`` next, to a node that has it."""

    def leave(self, connection: Connection) -> None:
        """Leave everything that is claimed to nodes that have the models for it."""

    def notify(self, connection: Connection, job_ids: Iterable[JobId], *, is_work: bool) -> None:
        """Wake other nodes when the transaction is committed: jobs have changed, or there is something to claim."""


class Database(Protocol):
    """The source of connections; ``readers`` is how many may read at the same time."""

    readers: int

    def connect_writer(self) -> Connection:
        """Open a connection that may write."""

    def connect_reader(self) -> Connection:
        """Open a connection that only reads."""

    def membership(self) -> Membership:
        """Return this node's membership; nothing is written for it yet."""

    def trouble_of(self, error: Exception) -> str | None:
        """Describe a transient outage; None for any other error."""

    def is_conflict(self, error: Exception) -> bool:
        """Whether a transaction was undone for another's sake alone, and can be tried again at once."""


def some_of(column: str, conversations: Collection[str]) -> tuple[str, tuple[str, ...]]:
    """Return a condition that a row is of one of these conversations, with its values; without, where they are many."""
    if len(conversations) > FEW:  # all others of their job are read along
        return "", ()
    return f" AND {column} IN ({', '.join('?' * len(conversations)) or 'NULL'})", tuple(conversations)
