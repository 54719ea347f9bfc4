"""A node that has its database to itself: it claims everything, and knows no other node."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from service.conversations.job.job import Job, JobId
from service.store.databases.database import Claim, Connection, Fenced, Row, value_of

# Three parts of one index, so that a claim does not read this member's own conversations.
_CLAIM_FREE: Final = (
    "UPDATE conversations SET owner = ?, fence = fence + 1 WHERE state IN ('queued', 'running') AND awaits = 0"
    " AND owner IS NULL RETURNING job_id, id, fence, position"
)
_CLAIMS: Final = (
    _CLAIM_FREE,
    _CLAIM_FREE.replace("owner IS NULL", "owner < ?"),
    _CLAIM_FREE.replace("owner IS NULL", "owner > ?"),
)
_CLAIM_CANCELLED: Final = (
    "UPDATE conversations SET owner = ?, fence = fence + 1, awaits = 0"
    " WHERE state IN ('queued', 'running') AND awaits = 1"
    " AND job_id IN (SELECT id FROM jobs WHERE state IN ('queued', 'running') AND is_cancel_requested = 1)"
    " RETURNING job_id, id, fence, position"
)


class AnyMembership:
    """The common part of all ``service.store.databases.database.Membership``."""

    last_write = "SELECT last_write FROM nodes WHERE id = ?"

    def __init__(self) -> None:
        self.node_id = new_node_id()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.node_id}>"

    def has_group(self, connection: Connection, number: int) -> bool:
        """Whether the group with that number was committed."""
        row = connection.execute(self.last_write, (self.node_id,)).fetchone()
        return row is not None and row[0] == number

    def owned(self, connection: Connection) -> list[Claim]:
        """List all unfinished conversations that this member has claimed, in the order of jobs and conversations."""
        rows = connection.execute(
            "SELECT c.job_id, c.id, c.fence FROM conversations c JOIN jobs j ON j.id = c.job_id"
            " WHERE c.owner = ? AND c.state IN ('queued', 'running') ORDER BY j.number, c.position",
            (self.node_id,),
        )
        return [Claim(job_id=JobId(row[0]), conversation_id=row[1], fence=row[2]) for row in rows]


class ExclusiveMembership(AnyMembership):
    """The only node of a database (``service.store.databases.database.Membership``)."""

    has_others = False

    def register(self, connection: Connection) -> None:
        """Become the only member; the previous one is dead."""
        self.node_id = new_node_id()
        connection.execute("DELETE FROM nodes")
        connection.execute(
            "INSERT INTO nodes (id, is_live, started_at) VALUES (?, 1, ?)",
            (self.node_id, datetime.now(UTC).isoformat()),
        )

    def begin_group(
        self, connection: Connection, number: int, _jobs: Sequence[JobId], _keys: Sequence[str], *, only_claims: bool
    ) -> None:
        """Write the number of a group."""
        del only_claims  # they are rare here
        signed = connection.execute("UPDATE nodes SET last_write = ? WHERE id = ?", (number, self.node_id))
        if signed.rowcount != 1:
            raise Fenced

    def extend_lease(self, connection: Connection) -> None:
        """Do nothing: there is no lease to extend."""

    def add_job(self, connection: Connection, columns: Mapping[str, object], _job: Job) -> int | None:
        """Insert a job; no other member could have inserted it."""
        marks = ", ".join("?" * len(columns))
        sql = (
            f"INSERT INTO jobs ({', '.join(columns)}, number)"  # noqa: S608 - names of our own
            f" VALUES ({marks}, (SELECT coalesce(max(number), 0) + 1 FROM jobs)) RETURNING number"
        )
        number: int | None = value_of(connection, sql, tuple(columns.values()))
        return number

    def add_conversations(self, connection: Connection, rows: Iterable[Sequence[object]], _job: Job) -> None:
        """Insert conversations."""
        connection.execute_many(
            "INSERT INTO conversations (job_id, id, position, metadata, state, owner, fence)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            rows,
        )

    def now(self, _connection: Connection) -> float:
        """Return the time of this machine."""
        return datetime.now(UTC).timestamp()

    def wake(self, connection: Connection, job_id: JobId, conversation_id: str) -> None:
        """Let a conversation be claimed that only callers could move on."""
        connection.execute("UPDATE conversations SET awaits = 0 WHERE job_id = ? AND id = ?", (job_id, conversation_id))

    def claim(
        self, connection: Connection, _models: Sequence[str], _limit: int | None, job_id: JobId | None
    ) -> list[Claim]:
        """Claim all conversations but those that only wait for callers, and all of cancelled jobs."""
        of_job, values = ("", ()) if job_id is None else (" AND job_id = ?", (job_id,))
        claimed: list[Row] = []
        for claim in _CLAIMS:
            sql = claim.replace(" RETURNING", f"{of_job} RETURNING")
            claimed += connection.execute(sql, (*(self.node_id,) * claim.count("?"), *values)).fetchall()
        claimed += connection.execute(_CLAIM_CANCELLED, (self.node_id,)).fetchall()
        numbers = {job: _number(connection, job) for job in {row[0] for row in claimed}}
        claimed.sort(key=lambda row: (numbers[row[0]], row[3]))
        return [Claim(job_id=JobId(row[0]), conversation_id=row[1], fence=row[2]) for row in claimed]

    def release(self, connection: Connection, claim: Claim, wants: Sequence[str]) -> None:
        """Release a conversation to the next claim, or without ``wants`` to none."""
        connection.execute(
            "UPDATE conversations SET owner = NULL, awaits = ? WHERE job_id = ? AND id = ? AND fence = ?",
            (int(not wants), claim.job_id, claim.conversation_id, claim.fence),
        )

    def leave(self, connection: Connection) -> None:
        """Do nothing: the next run claims everything."""

    def notify(self, job_ids: Iterable[JobId], *, is_work: bool) -> None:
        """Do nothing: there is no other member."""

    def send_notices(self, _connection: Connection) -> None:
        """Do nothing: there is no other member."""


def _number(connection: Connection, job_id: str) -> int:
    row = connection.execute("SELECT number FROM jobs WHERE id = ?", (job_id,)).fetchone()
    assert row is not None  # noqa: S101 - its conversations are there
    return int(row[0])


def new_node_id() -> str:
    """Return an id that no other node has."""
    return f"node-{secrets.token_hex(6)}"
