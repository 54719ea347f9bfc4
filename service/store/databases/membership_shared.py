"""A node among others on one database: its claims last until they end, are released, or its lease is over.

A lease belongs to a node, by the database's clock. A node that takes over marks the other as dead first, and each group
that changes anything writes the node's own row. So it is committed before its node is dead, or refused as a whole.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from service.conversations.job.job import Job, JobId
from service.store.databases.database import Claim, Connection, Fenced, value_of
from service.store.databases.membership_exclusive import AnyMembership, new_node_id

CHANNEL: Final = "roundhouse"
NOTICE_S: Final = 0.1  # least seconds between two notices
_NOTIFY: Final = "SELECT set_config('synchronous_commit', 'off', true), pg_notify(?, ?)"
JOBS_A_NOTICE: Final = 100  # job ids take 20 bytes each, and PostgreSQL takes 8000
# The next turn may need any of the job's models; a node without the right one releases the conversation again.
LEAVE: Final = (
    "UPDATE conversations SET owner = NULL, wants = jobs.models FROM jobs"
    " WHERE jobs.id = conversations.job_id AND conversations.owner = ANY(?)"
)
LONG: Final = 5  # part of a lease after which a transaction counts as long


def unclaimed(connection: Connection) -> dict[str, int]:
    """Count the conversations that no node runs, by each model that they may need next."""
    rows = connection.execute(
        "SELECT model, count(*) FROM conversations, unnest(wants) AS model"
        " WHERE owner IS NULL AND state IN ('queued', 'running') GROUP BY model ORDER BY model"
    )
    return {row[0]: row[1] for row in rows}


def _lock_of(key: str) -> int:
    """Return the number by which an idempotency key is locked; several keys may share one."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), signed=True)


class SharedMembership(AnyMembership):
    """One of several nodes on a database (``service.store.databases.database.Membership``)."""

    has_others = True
    last_write = f"{AnyMembership.last_write} FOR UPDATE"  # waits for a commit in progress

    def __init__(self, lease_s: float, models: Sequence[str]) -> None:
        super().__init__()
        self._lease_s = lease_s
        self._models = models  # shared with its owner, so always up to date
        self._signed_at = 0.0
        self._unsigned: int | None = None  # the number of a group of claims, until one of them finds something
        self._changed: set[JobId] = set()  # jobs of which the other nodes have not been notified yet
        self._has_work = False
        self._noticed_at = 0.0

    def register(self, connection: Connection) -> None:
        """Become a member."""
        self.node_id = new_node_id()
        connection.execute(
            "INSERT INTO nodes (id, is_live, started_at, lease_until, models)"
            " VALUES (?, 1, ?, now() + make_interval(secs => ?), ?)",
            (self.node_id, datetime.now(UTC).isoformat(), self._lease_s, list(self._models)),
        )

    def begin_group(
        self, connection: Connection, number: int, jobs: Sequence[JobId], keys: Sequence[str], *, only_claims: bool
    ) -> None:
        """Write the number of a group, and lock its jobs and keys; a group of claims is signed by what it finds.

        All nodes lock in the same order, so no deadlock occurs: a claim locks only free rows.
        """
        self._signed_at = time.monotonic()
        self._unsigned = number if only_claims else None
        if not only_claims:
            self._sign(connection, number)
        if jobs:
            connection.execute("SELECT 1 FROM jobs WHERE id = ANY(?) ORDER BY id FOR UPDATE", (list(jobs),))
        for lock in sorted({_lock_of(key) for key in keys}):
            connection.execute("SELECT pg_advisory_xact_lock(?)", (lock,))

    def _sign(self, connection: Connection, number: int) -> None:
        """Write a group's number to the node's own row.

        The lease is renewed here too: the row of a node that writes all the time is always locked when its lease is due
        for renewal.
        """
        signed = connection.execute(
            "UPDATE nodes SET last_write = ?, lease_until = now() + make_interval(secs => ?)"
            " WHERE id = ? AND is_live = 1",
            (number, self._lease_s, self.node_id),
        )
        if signed.rowcount != 1:
            raise Fenced

    def extend_lease(self, connection: Connection) -> None:
        """Renew the lease after a long transaction, which kept the node's row locked."""
        if self._unsigned is None and time.monotonic() - self._signed_at > self._lease_s / LONG:
            connection.execute(
                "UPDATE nodes SET lease_until = clock_timestamp() + make_interval(secs => ?) WHERE id = ?",
                (self._lease_s, self.node_id),
            )

    def add_job(self, connection: Connection, columns: Mapping[str, object], job: Job) -> int | None:
        """Insert a job; None if another node has just inserted one with its key."""
        known = {**columns, "priority": job.priority, "models": list(job.models)}
        marks = ", ".join("?" * len(known))
        sql = (
            f"INSERT INTO jobs ({', '.join(known)}, number) VALUES ({marks}, nextval('job_numbers'))"  # noqa: S608
            " ON CONFLICT (idempotency_key) DO NOTHING RETURNING number"
        )
        number: int | None = value_of(connection, sql, tuple(known.values()))
        return number

    def add_conversations(self, connection: Connection, rows: Iterable[Sequence[object]], job: Job) -> None:
        """Insert conversations, which need the models of their first speakers."""
        connection.execute_many(
            "INSERT INTO conversations (job_id, id, position, metadata, state, owner, fence, wants)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            ((*row, list(wants)) for row, wants in zip(rows, job.first_models(), strict=True)),
        )

    def now(self, connection: Connection) -> float:
        """Return the time of the database's machine."""
        return float(value_of(connection, "SELECT extract(epoch FROM clock_timestamp())"))

    def wake(self, connection: Connection, job_id: JobId, conversation_id: str) -> None:
        """Let any node with one of the job's models claim a conversation."""
        connection.execute(
            "UPDATE conversations SET wants = jobs.models FROM jobs WHERE jobs.id = conversations.job_id"
            " AND conversations.job_id = ? AND conversations.id = ?",
            (job_id, conversation_id),
        )

    def claim(
        self, connection: Connection, models: Sequence[str], limit: int | None, job_id: JobId | None
    ) -> list[Claim]:
        """Claim conversations that no node runs, by priority and age; those of cancelled jobs need no model.

        All nodes look at each notice, and most find nothing. They write nothing then, so they wait for no disk, and do
        not keep those waiting that do write.
        """
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
        if rows and self._unsigned is not None:
            self._sign(connection, self._unsigned)
            self._unsigned = None
        ordered = sorted(rows, key=lambda row: (row[3], row[4]))
        return [Claim(job_id=JobId(row[0]), conversation_id=row[1], fence=row[2]) for row in ordered]

    def release(self, connection: Connection, claim: Claim, wants: Sequence[str]) -> None:
        """Release a conversation to a node with one of these models, or without models to none."""
        connection.execute(
            "UPDATE conversations SET owner = NULL, wants = ? WHERE job_id = ? AND id = ? AND fence = ?",
            (list(wants), claim.job_id, claim.conversation_id, claim.fence),
        )

    def leave(self, connection: Connection) -> None:
        """Release all claims and become dead, so that others go on at once, without the end of a lease."""
        connection.execute("UPDATE nodes SET is_live = 0 WHERE id = ?", (self.node_id,))
        connection.execute(LEAVE, ([self.node_id],))
        connection.execute("SELECT pg_notify(?, ?)", (CHANNEL, self._notice([], is_work=True)))  # nothing may follow

    def notify(self, job_ids: Iterable[JobId], *, is_work: bool) -> None:
        """Notify the other nodes soon after the commit."""
        self._changed.update(job_ids)
        self._has_work |= is_work

    def send_notices(self, connection: Connection) -> float | None:
        """Notify the other nodes, at most once in ``NOTICE_S``; return the seconds until some are due.

        A commit with a notice holds a lock of the whole server. So notices have a transaction of their own, which holds
        no rows and waits for no disk.
        """
        if not (self._changed or self._has_work):
            return None
        left_s = self._noticed_at + NOTICE_S - time.monotonic()
        if left_s > 0:
            return left_s
        self._noticed_at = time.monotonic()
        jobs, is_work = sorted(self._changed), self._has_work
        self._changed, self._has_work = set(), False
        for first in range(0, max(1, len(jobs)), JOBS_A_NOTICE):
            notice = self._notice(jobs[first : first + JOBS_A_NOTICE], is_work=is_work)
            connection.execute(_NOTIFY, (CHANNEL, notice))
        return None

    def _notice(self, jobs: Sequence[JobId], *, is_work: bool) -> str:
        return json.dumps({"node": self.node_id, "jobs": jobs, "work": is_work})
