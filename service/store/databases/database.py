"""The interface to a database, which SQLite and PostgreSQL both implement.

Statements are written once, in SQL that both understand, with ``?`` for a parameter. What differs is a method here.
Each transaction's statements stand between ``begin`` and ``commit`` or ``rollback``.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

import msgspec

from service.conversations.job.job import Job, JobId

Row = Sequence[Any]

FEW: Final = 50  # conversations that are read one by one; more are read with all others of their job


class Cursor(Protocol):
    """The result of a statement."""

    @property
    def rowcount(self) -> int:
        """The number of changed rows."""

    def fetchone(self) -> Row | None:
        """Return the next row."""

    def fetchall(self) -> Sequence[Row]:
        """Return the remaining rows."""

    def __iter__(self) -> Iterator[Row]:
        """Iterate over the remaining rows."""


class Connection(Protocol):
    """One connection, used by one thread at a time."""

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> Cursor:
        """Run one statement."""

    def execute_many(self, sql: str, rows: Iterable[Sequence[object]]) -> None:
        """Run a one-row INSERT for each of these rows."""

    def begin(self) -> None:
        """Begin a transaction that writes; on a read connection, one with a snapshot."""

    def commit(self) -> None:
        """End the transaction; its changes are durable when this returns."""

    def rollback(self) -> None:
        """Undo the transaction, unless it has ended."""

    def close(self) -> None:
        """Close the connection; an open transaction is rolled back."""


T = TypeVar("T")
Query = Callable[[Connection], T]  # reads with one connection, from one snapshot


def value_of(connection: Connection, sql: str, parameters: Sequence[object] = (), default: Any = None) -> Any:  # noqa: ANN401 - the statement's value
    """Return the one value that a statement finds; ``default`` without one."""
    row = connection.execute(sql, parameters).fetchone()
    return default if row is None else row[0]


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation that this node runs until it ends, is released or taken over; ``fence`` grows with each claim."""

    job_id: JobId
    conversation_id: str
    fence: int


class Fenced(Exception):
    """This node's lease had ended and another node has taken over, so its writes no longer count."""


class Membership(Protocol):
    """This node among those that write here; used in the writer's thread, inside its transactions."""

    node_id: str
    has_others: bool  # other nodes may have to be notified

    def register(self, connection: Connection) -> None:
        """Become a member under a new id, without claims."""

    def begin_group(
        self, connection: Connection, number: int, jobs: Sequence[JobId], keys: Sequence[str], *, only_claims: bool
    ) -> None:
        """Write the number of the transaction's group, which changes ``jobs`` and posts with ``keys``.

        With ``only_claims`` this may wait until a claim finds something: ``claim`` may then raise Fenced too.

        Raises:
            Fenced: this node is no longer a member.
        """

    def has_group(self, connection: Connection, number: int) -> bool:
        """Whether the group with that number was committed; waits for a commit on a broken connection."""

    def extend_lease(self, connection: Connection) -> None:
        """Extend the lease beyond the commit of the transaction."""

    def add_job(self, connection: Connection, columns: Mapping[str, object], job: Job) -> int | None:
        """Insert a job and return its number; None if its idempotency key is taken."""

    def now(self, connection: Connection) -> float:
        """Return the time that all members use, in seconds since the epoch."""

    def wake(self, connection: Connection, job_id: JobId, conversation_id: str) -> None:
        """Let nodes claim a conversation that only callers could move on; one of them has spoken."""

    def add_conversations(self, connection: Connection, rows: Iterable[Sequence[object]], job: Job) -> None:
        """Insert the conversations of a job: job id, id, position, metadata, state, owner and fence."""

    def claim(
        self, connection: Connection, models: Sequence[str], limit: int | None, job_id: JobId | None
    ) -> list[Claim]:
        """Claim at most ``limit`` conversations (of one job) that no node runs and that need one of ``models`` next.

        Return them in the order of jobs and conversations.
        """

    def owned(self, connection: Connection) -> list[Claim]:
        """List all unfinished conversations that this member has claimed, in the order of jobs and conversations."""

    def release(self, connection: Connection, claim: Claim, wants: Sequence[str]) -> None:
        """Release a conversation to a node that has one of ``wants``, the models that it needs next."""

    def leave(self, connection: Connection) -> None:
        """Release all claims to nodes that have the models for them."""

    def notify(self, job_ids: Iterable[JobId], *, is_work: bool) -> None:
        """Wake other nodes after the commit: jobs have changed, or conversations can be claimed."""

    def send_notices(self, connection: Connection) -> float | None:
        """Notify the other nodes, outside of transactions; return the seconds until some are due, None without any.

        A notice is only a hint: one that is lost, or sent for a transaction that was undone, does no harm.
        """


class Database(Protocol):
    """The source of connections; ``readers`` may read at the same time."""

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
        """Whether a transaction was undone only in favour of another, and can be tried again at once."""


def some_of(column: str, conversations: Collection[str]) -> tuple[str, tuple[str, ...]]:
    """Return an SQL condition for rows of these conversations, with its values; no condition if they are many."""
    if len(conversations) > FEW:  # all others of their job are read along
        return "", ()
    return f" AND {column} IN ({', '.join('?' * len(conversations)) or 'NULL'})", tuple(conversations)
