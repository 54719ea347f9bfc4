"""The other nodes on the same database, and this node's own lease."""

import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import msgspec
import psycopg
from anyio.abc import TaskStatus
from typing_extensions import override

from service.conversations.job.job import JobId
from service.store.databases.membership_shared import CHANNEL, LEAVE
from service.store.databases.postgres import conninfo_of
from service.store.news import (
    JobsChanged,
    LeaseEnding,
    LeaseLost,
    LeaseRenewed,
    Neighbours,
    NodeReport,
    Tell,
    WorkWaiting,
)

RENEWALS: Final = 5  # renewals per lease
LONGEST_PAUSE_S: Final = 1.0  # seconds between two renewals, and before a lost connection is made again
COUNTED_JOBS: Final = 1000  # jobs that a node reports; more would make each renewal expensive
logger = logging.getLogger(__name__)


class _Others(msgspec.Struct, frozen=True, kw_only=True):
    models: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()
    counts: Sequence[Mapping[str, Sequence[int]]] = ()


class Cluster(Neighbours):
    """Renews this node's lease, takes over from nodes without one, and listens for notices."""

    def __init__(self, url: str, lease_s: float, report: Callable[[], NodeReport]) -> None:
        self._conninfo = conninfo_of(url)
        self._lease_s = lease_s
        self._report = report
        self._others = _Others()
        self._renewed_at = time.monotonic()
        self._has_looked = anyio.Event()

    def __repr__(self) -> str:
        return f"<Cluster others={len(self._others.counts)}>"

    @override
    def models(self) -> frozenset[str]:
        return self._others.models

    @override
    def known_models(self) -> frozenset[str]:
        return self._others.known

    @override
    def counts(self, job_id: JobId) -> tuple[int, int]:
        counted = [counts[job_id] for counts in self._others.counts if job_id in counts]
        return sum(each[0] for each in counted), sum(each[1] for each in counted)

    async def run(self, tell: Tell, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep the lease until cancelled; start once the other nodes are known, or cannot be known for now."""
        self._renewed_at = time.monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._renew_always, tell)
            tasks.start_soon(self._listen_always, tell)
            with anyio.move_on_after(self._lease_s):
                await self._has_looked.wait()
            task_status.started()

    # Leases

    async def _renew_always(self, tell: Tell) -> None:
        pause_s = min(LONGEST_PAUSE_S, self._lease_s / RENEWALS)
        is_good = True
        while True:
            try:
                async with self._connected() as connection:
                    while True:
                        await self._renew(connection, tell)
                        is_good = True
                        await anyio.sleep(pause_s)
            except (psycopg.Error, OSError, TimeoutError) as error:
                logger.warning("store: the lease of this node is not renewed: %s", error)
            if is_good and time.monotonic() - self._renewed_at > self._lease_s / 2:
                is_good = False
                tell(LeaseEnding())
            await anyio.sleep(pause_s)

    async def _renew(self, connection: psycopg.AsyncConnection[Any], tell: Tell) -> None:
        """Renew the lease, take over from dead nodes, and read the living ones, within a fraction of the lease."""
        asked_at = time.monotonic()
        with anyio.fail_after(self._lease_s / RENEWALS):
            report = self._report()
            counts = json.dumps(dict(list(report.counts.items())[:COUNTED_JOBS]))
            renewed = await connection.execute(
                "UPDATE nodes SET lease_until = now() + make_interval(secs => %s), report = %s, models = %s"
                " WHERE id = (SELECT id FROM nodes WHERE id = %s AND is_live = 1 FOR UPDATE SKIP LOCKED)",
                (self._lease_s, counts, list(report.models), report.node_id),
            )
            # A node that takes over also skips a locked row: a write of this node holds the lease while it lasts, and
            # renews it (``SharedMembership.begin_group``, ``extend_lease``).
            is_renewed = bool(renewed.rowcount) or await self._is_live(connection, report.node_id)
            if is_renewed:
                self._renewed_at = asked_at
            else:
                tell(LeaseLost())
            if await self._take_over(connection):
                tell(WorkWaiting())
            rows = await connection.execute(
                "SELECT models, report, is_live FROM nodes WHERE id <> %s", (report.node_id,)
            )
            known = await rows.fetchall()
            live = [row for row in known if row[2]]
            self._others = _Others(
                models=frozenset(model for row in live for model in row[0]),
                known=frozenset(model for row in known for model in row[0]),
                counts=[json.loads(row[1]) for row in live],
            )
            self._has_looked.set()
            if is_renewed:
                tell(LeaseRenewed())  # last, since its receiver reads the other nodes' models

    async def _is_live(self, connection: psycopg.AsyncConnection[Any], node_id: str) -> bool:
        rows = await connection.execute("SELECT 1 FROM nodes WHERE id = %s AND is_live = 1", (node_id,))
        return await rows.fetchone() is not None

    async def _take_over(self, connection: psycopg.AsyncConnection[Any]) -> int:
        """Mark nodes without a lease as dead, and release their conversations."""
        async with connection.transaction():
            dead = await connection.execute(
                "UPDATE nodes SET is_live = 0 WHERE id IN (SELECT id FROM nodes WHERE is_live = 1"
                " AND lease_until < now() FOR UPDATE SKIP LOCKED) RETURNING id"
            )
            names = [row[0] for row in await dead.fetchall()]
            if not names:
                return 0
            freed = await connection.execute(LEAVE.replace("?", "%s"), (names,))
        logger.warning("store: %s are dead, and leave %d conversations to others", ", ".join(names), freed.rowcount)
        return freed.rowcount

    # Notices

    async def _listen_always(self, tell: Tell) -> None:
        while True:
            try:
                async with self._connected() as connection:
                    await connection.execute(f"LISTEN {CHANNEL}")
                    tell(WorkWaiting())  # for notices that were missed without a connection
                    async for notice in connection.notifies():
                        self._hear(notice.payload, tell)
            except (psycopg.Error, OSError) as error:
                logger.info("store: no notices of other nodes for the moment: %s", error)
            await anyio.sleep(LONGEST_PAUSE_S)

    def _hear(self, payload: str, tell: Tell) -> None:
        notice = json.loads(payload)
        if notice["node"] == self._report().node_id:
            return
        tell(JobsChanged(job_ids=frozenset(map(JobId, notice["jobs"]))))
        if notice["work"]:
            tell(WorkWaiting())

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        """Connect for a block; psycopg's own context would leave the connection open on cancellation."""
        with anyio.fail_after(self._lease_s / RENEWALS):
            connection = await psycopg.AsyncConnection.connect(self._conninfo, autocommit=True)
        try:
            yield connection
        finally:
            with anyio.CancelScope(shield=True):  # it sends a good-bye, and waits for no answer
                await connection.close()
