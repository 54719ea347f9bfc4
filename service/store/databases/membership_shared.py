"""A node among others on one database: what it claims is its own until it ends, is released, or its lease is over.

A lease is in the database's time, and it is the node's: a node that takes over marks it as dead first, and each group
of writes begins with the node's own row. So a group is committed before its node is dead, or it is refused whole.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from service.conversations.job.job import Job, JobId
from service.store.databases.database import Claim, Connection, Fenced
from service.store.databases.membership_exclusive import AnyMembership, new_node_id

CHANNEL: Final = "roundhouse"
JOBS_A_NOTICE: Final = 100  # of 20 bytes each, and PostgreSQL takes 8000
# What comes next may need any of the job's models; a node that has not got the right one leaves it again.
LEAVE: Final = (
    "UPDATE conversations SET owner = NULL, wants = jobs.models FROM jobs"
    " WHERE jobs.id = conversations.job_id AND conversations.owner = ANY(?)"
)
LONG: Final = 5  # the part of a lease after which a transaction counts as long


def unclaimed(connection: Connection) -> dict[str, int]:
    """Count the conversations that no node runs, by each model that they need next."""
    rows = connection.execute(
        "SELECT model, count(*) FROM conversations, unnest(wants) AS model"
        " WHERE owner IS NULL AND state IN ('queued', 'running') GROUP BY model ORDER BY model"
    )
    return {row[0]: row[1] for row in rows}


def _lock_of(key: str) -> int:
    """Return the number that an idempotency key is locked by; another key's may be the same."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), signed=True)


class SharedMembership(AnyMembership):
    """A ``service.store.databases.database.Membership``."""

    last_write = f"{AnyMembership.last_write} FOR UPDATE"  # waits for a commit that is under way

    def __init__(self, lease_s: float, models: Sequence[str]) -> None:
        super().__init__()
        self._lease_s = lease_s
        self._models = models  # of this moment
        self._signed_at = 0.0

    def register(self, connection: Connection) -> None:
        """Become a member."""
        self.node_id = new_node_id()
        connection.execute(
            "INSERT INTO nodes (id, is_live, started_at, lease_until, models)"
            " VALUES (?, 1, ?, now() + make_interval(secs => ?), ?)",
            (self.node_id, datetime.now(UTC).isoformat(), self._lease_s, list(self._models)),
        )

    def begin_group(self, connection: Connection, number: int, jobs: Sequence[JobId], keys: Sequence[str]) -> None:
        """Write the number of a group, and lock its jobs and keys.

        They are locked in one order on all nodes, so that none waits in a circle. The lease is renewed with it: a node
        that writes all the time has its row locked whenever it is to be renewed apart.
        """
        signed = connection.execute(
            "UPDATE nodes SET last_write = ?, lease_until = now() + make_interval(secs => ?)"
            " WHERE id = ? AND is_live = 1",
            (number, self._lease_s, self.node_id),
        )
        if signed.rowcount != 1:
            raise Fenced
        self._signed_at = time.monotonic()
        if jobs:
            connection.execute("SELECT 1 FROM jobs WHERE id = ANY(?) ORDER BY id FOR UPDATE", (list(jobs),))
        for lock in sorted({_lock_of(key) for key in keys}):
            connection.execute("SELECT pg_advisory_xact_lock(?)", (lock,))

    def extend_lease(self, connection: Connection) -> None:
        """Renew the lease after a long transaction, which held the node's row: it could not be renewed meanwhile."""
        if time.monotonic() - self._signed_at > self._lease_s / LONG:
            connection.execute(
                "UPDATE nodes SET lease_until = clock_timestamp() + make_interval(secs => ?) WHERE id = ?",
                (self._lease_s, self.node_id),
            )

    def add_job(self, connection: Connection, columns: Mapping[str, object], job: Job) -> int | None:
        """Insert a job; None if another node has one of its key, from this very moment."""
        known = {**columns, "priority": job.priority, "models": list(job.models)}
        marks = ", ".join("?" * len(known))
        row = connection.execute(
            f"INSERT INTO jobs ({', '.join(known)}, number) VALUES ({marks}, nextval('job_numbers'))"  # noqa: S608
            " ON CONFLICT (idempotency_key) DO NOTHING RETURNING number",
            tuple(known.values()),
        ).fetchone()
        return None if row is None else int(row[0])

    def add_conversations(self, connection: Connection, rows: Iterable[Sequence[object]], job: Job) -> None:
        """Insert conversations, which need the models of those who speak first."""
        connection.execute_many(
            "INSERT INTO conversations (job_id, id, position, metadata, state, owner, fence, wants)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            ((*row, list(wants)) for row, wants in zip(rows, job.first_models(), strict=True)),
        )

    def now(self, connection: Connection) -> float:
        """Return the time of the database's machine."""
        row = connection.execute("SELECT extract(epoch FROM clock_timestamp())").fetchone()
        assert row is not None  # noqa: S101 - it tells the time
        return float(row[0])

    def wake(self, connection: Connection, job_id: JobId, conversation_id: str) -> None:
        """Let a conversation be claimed by any node that has one of the job's models."""
        connection.execute(
            "UPDATE conversations SET wants = jobs.models FROM jobs WHERE jobs.id = conversations.job_id"
            " AND conversations.job_id = ? AND conversations.id = ?",
            (job_id, conversation_id),
        )

    def claim(
        self, connection: Connection, models: Sequence[str], limit: int | None, job_id: JobId | None
    ) -> list[Claim]:
        """Claim what no node runs, the highest priority and the oldest first; cancelled jobs need no model to end."""
        rows = connection.execute(
            "UPDATE conversations SET owner = ?, fence = fence + 1 FROM ("
            " SELECT c.job_id, c.id, j.number, c.position FROM conversations c JOIN jobs j ON j.id = c.job_id"
            " WHERE c.owner IS NULL AND c.state IN ('queued', 'running')"
            " AND (c.wants && CAST(? AS TEXT[]) OR j.is_cancel_requested = 1) AND j.id = coalesce(?, j.id)"
            " ORDER BY j.priority DESC, j.number, c.position LIMIT ? FOR UPDATE OF c SKIP LOCKED"
            ") AS free WHERE conversations.job_id = free.job_id AND conversations.id = free.id"
            " RETURNING conversations.job_id, conversations.id, fence, free.number, free.position",
            (self.node_id, list(models), job_id, limit),
        ).fetchall()
        ordered = sorted(rows, key=lambda row: (row[3], row[4]))
        return [Claim(job_id=JobId(row[0]), conversation_id=row[1], fence=row[2]) for row in ordered]

    def release(self, connection: Connection, claim: Claim, wants: Sequence[str]) -> None:
        """Leave a conversation to a node that has one of these models, without any to none."""
        connection.execute(
            "UPDATE conversations SET owner = NULL, wants = ? WHERE job_id = ? AND id = ? AND fence = ?",
            (list(wants), claim.job_id, claim.conversation_id, claim.fence),
        )

    def leave(self, connection: Connection) -> None:
        """Leave everything that is claimed, and be dead: no lease has to end before others go on with it."""
        connection.execute("UPDATE nodes SET is_live = 0 WHERE id = ?", (self.node_id,))
        connection.execute(LEAVE, ([self.node_id],))
        self.notify(connection, [], is_work=True)

    def notify(self, connection: Connection, job_ids: Iterable[JobId], *, is_work: bool) -> None:
        """Notify the other nodes when the transaction is committed."""
        jobs = list(job_ids)
        while True:
            some, jobs = jobs[:JOBS_A_NOTICE], jobs[JOBS_A_NOTICE:]
            notice = json.dumps({"node": self.node_id, "jobs": some, "work": is_work})
            connection.execute("SELECT pg_notify(?, ?)", (CHANNEL, notice))
            if not jobs:
                return
