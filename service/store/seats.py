"""The places of nodes beside this one, and the generations of engines that span them.

A seat is a node over all programs of its process; unlike the node's lease, it outlives a takeover of its conversations.
Each node keeps its own seat, offers devices, and forms generations, whichever comes first: a generation takes its
members' offers in the transaction that writes it, so that no offer is taken twice.
"""

import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Final

import anyio
import msgspec
import psycopg

from service.errors import StoreUnavailable
from service.store.databases.postgres import conninfo_of
from service.store.news import NodeReport
from workers.span_board import SpanBoard, StoredSpan
from workers.spans import Offer, SpanGeneration, collide, form

PAUSE_S: Final = 0.5  # between two looks
ASK_LIMIT_S: Final = 5.0  # for one look
FORMING_LOCK: Final = 7237422110  # offers and generations are written by one node after the other
RETURN_S: Final = 2 * ASK_LIMIT_S + 1.0  # time that other nodes may need to connect once the database is back
KEPT_S: Final = 86_400  # how long the seat of a node that is gone is kept
SEE: Final = (
    "INSERT INTO seats (id, node, address, port, models, seen_at) VALUES (%s, %s, %s, %s, %s, now())"
    " ON CONFLICT (id) DO UPDATE SET node = excluded.node, address = excluded.address, port = excluded.port,"
    " models = excluded.models, seen_at = now()"
)
logger = logging.getLogger(__name__)


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the cluster; ``seen_s`` is how long ago the store last saw it."""

    id: str
    node: str
    address: str
    port: int
    models: Sequence[str]
    seen_s: float

    @property
    def url(self) -> str:
        """The address of its HTTP."""
        return f"http://[{self.address}]:{self.port}" if ":" in self.address else f"http://{self.address}:{self.port}"


class Seats:
    """Keeps this node's seat, and its board of spans up to date, while ``run`` runs."""

    def __init__(self, url: str, board: SpanBoard, port: int, report: Callable[[], NodeReport]) -> None:
        self._conninfo = conninfo_of(url)
        self._board = board
        self._port = port
        self._report = report
        self._offered: set[str] = set()  # workers whose offers the store may have
        self._since = self._seen_at = float("-inf")  # since when each look has succeeded, and the last one
        self.seats: Sequence[Seat] = ()
        self.secret = secrets.token_bytes()  # the cluster's, once it has been read
        self._has_secret = False

    def __repr__(self) -> str:
        return f"<Seats of {self._board!r}>"

    @property
    def own(self) -> str:
        """The id of this node's seat."""
        return self._board.seat

    def others(self) -> list[Seat]:
        """Return the other nodes that the store has seen within a lease, or had no chance to see."""
        is_sure, lease_s = self._is_sure, self._board.lease_s
        return [seat for seat in self.seats if seat.id != self._board.seat and (seat.seen_s <= lease_s or not is_sure)]

    async def run(self) -> None:
        """Look until cancelled, and leave then; a database that is away changes nothing here."""
        try:
            while True:
                try:
                    async with self._connected() as connection:
                        await self._look_always(connection)
                except (psycopg.Error, OSError, TimeoutError) as error:
                    logger.info("store: the seats of the nodes are not read for the moment: %s", error)
                await anyio.sleep(PAUSE_S)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(ASK_LIMIT_S):
                await self._leave()

    async def _leave(self) -> None:
        with suppress(psycopg.Error, OSError, TimeoutError):
            async with self._connected() as connection:
                await self._write_ends(connection)
                await connection.execute("DELETE FROM seats WHERE id = %s", (self._board.seat,))

    async def _look_always(self, connection: psycopg.AsyncConnection[Any]) -> None:
        while True:
            changed = self._board.changed.next
            with anyio.fail_after(ASK_LIMIT_S):
                await self._look(connection)
            with anyio.move_on_after(PAUSE_S):
                await changed.wait()

    async def _look(self, connection: psycopg.AsyncConnection[Any]) -> None:
        board, asked_at = self._board, time.monotonic()
        if asked_at - self._seen_at > board.lease_s / 2:
            self._since = asked_at
        report = self._report()
        await connection.execute(SEE, (board.seat, report.node_id, board.address, self._port, list(report.models)))
        await self._write_ends(connection)
        absent = await self._read_seats(connection)
        if not self._has_secret:
            rows = await connection.execute("SELECT secret FROM cluster")
            self.secret, self._has_secret = "".join([row[0] for row in await rows.fetchall()]).encode(), True
        offers = board.free_offers()
        for worker in self._offered - {offer.worker for offer in offers}:
            await connection.execute("DELETE FROM offers WHERE seat = %s AND worker = %s", (board.seat, worker))
            self._offered.discard(worker)
        for offer in offers:
            await self._offer(connection, offer, absent)
        rows = await connection.execute("SELECT generation, because FROM spans")
        stored = [_stored(row) for row in await rows.fetchall()]
        self._seen_at = time.monotonic()
        if self._seen_at - asked_at > board.lease_s / 2:
            self._since = self._seen_at
        gone = {
            member.seat: absent.get(member.seat, board.lease_s)
            for span in stored
            for member in span.generation.members
            if member.seat not in {seat.id for seat in self.seats} or member.seat in absent
        }
        board.update(stored, gone if self._is_sure else {})

    @property
    def _is_sure(self) -> bool:
        """Whether a node that was not seen had the time to be seen: the database itself may have been away."""
        return time.monotonic() - self._since > self._board.lease_s + RETURN_S

    async def _write_ends(self, connection: psycopg.AsyncConnection[Any]) -> None:
        for (worker, number), because in tuple(self._board.ended.items()):
            await connection.execute(
                "UPDATE spans SET because = %s, changed_at = now()"
                " WHERE worker = %s AND number = %s AND because IS NULL",
                (because, worker, number),
            )
            del self._board.ended[worker, number]

    async def _read_seats(self, connection: psycopg.AsyncConnection[Any]) -> Mapping[str, float]:
        """Read all seats; return those that the store has not seen for a lease, with the seconds."""
        await connection.execute("DELETE FROM seats WHERE seen_at < now() - make_interval(secs => %s)", (KEPT_S,))
        self.seats = await _seats_in(connection)
        return {seat.id: seat.seen_s for seat in self.seats if seat.seen_s > self._board.lease_s}

    async def _offer(self, connection: psycopg.AsyncConnection[Any], offer: Offer, absent: Mapping[str, float]) -> None:
        """Offer this node's devices unless a generation has them, and form one if there are enough offers."""
        worker = offer.worker
        async with connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock(%s)", (FORMING_LOCK,))
            rows = await connection.execute("SELECT worker, number, generation, because FROM spans")
            spans = {row[0]: (row[1], _stored(row[2:])) for row in await rows.fetchall()}
            running = [span.generation for _, span in spans.values() if span.because is None]
            if any(_has(generation, offer) for generation in running):
                return  # the board hears of it next
            await connection.execute(
                "INSERT INTO offers (seat, worker, offer) VALUES (%s, %s, %s) ON CONFLICT (seat, worker)"
                " DO UPDATE SET offer = excluded.offer WHERE offers.offer <> excluded.offer",
                (offer.seat, worker, msgspec.json.encode(offer).decode()),
            )
            self._offered.add(worker)
            number, newest = spans.get(worker, (0, None))
            if newest is None or newest.because is not None or self._is_over(newest, absent):
                await self._form(connection, worker, number + 1)

    def _is_over(self, stored: StoredSpan, absent: Mapping[str, float]) -> bool:
        """Whether a generation without a recorded end is over: all its nodes are gone, and could not say so.

        While one of them is there, it judges the others by two proofs (``spans.fate``).
        """
        return self._is_sure and all(
            member.seat in absent or member.seat not in {seat.id for seat in self.seats}
            for member in stored.generation.members
        )

    async def _form(self, connection: psycopg.AsyncConnection[Any], worker: str, number: int) -> None:
        rows = await connection.execute(
            "SELECT o.offer FROM offers o JOIN seats s ON s.id = o.seat"
            " WHERE s.seen_at > now() - make_interval(secs => %s)",
            (self._board.lease_s / 2,),
        )
        offers = [msgspec.json.decode(row[0], type=Offer) for row in await rows.fetchall()]
        fitting = [offer for offer in offers if offer.worker == worker]
        generation = form(fitting, self._board.nodes[worker], number, secrets.token_hex(32), self._board.lease_s)
        if generation is None:
            return
        for offer in offers:
            if _has(generation, offer):
                await connection.execute(
                    "DELETE FROM offers WHERE seat = %s AND worker = %s", (offer.seat, offer.worker)
                )
        await connection.execute(
            "INSERT INTO spans (worker, number, generation, changed_at) VALUES (%s, %s, %s, now())"
            " ON CONFLICT (worker) DO UPDATE SET number = excluded.number, generation = excluded.generation,"
            " because = NULL, changed_at = now()",
            (worker, number, msgspec.json.encode(generation).decode()),
        )
        where = ", ".join(member.address for member in generation.members)
        logger.info("span %s: generation %d is formed by %s", worker, number, where)

    def _connected(self) -> AbstractAsyncContextManager[psycopg.AsyncConnection[Any]]:
        return _connected(self._conninfo)


async def read_seats(url: str) -> list[Seat]:
    """Return the nodes of the cluster on a database; none before the first one has started.

    Raises:
        StoreUnavailable: the database does not answer.
    """
    try:
        async with _connected(conninfo_of(url)) as connection:
            with anyio.fail_after(ASK_LIMIT_S):
                return await _seats_in(connection)
    except psycopg.errors.UndefinedTable:
        return []
    except (psycopg.Error, OSError, TimeoutError) as error:
        raise StoreUnavailable(f"the cluster's database: {str(error) or 'no answer'}") from error


@asynccontextmanager
async def _connected(conninfo: str) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    with anyio.fail_after(ASK_LIMIT_S):
        connection = await psycopg.AsyncConnection.connect(conninfo, autocommit=True)
    try:
        yield connection
    finally:
        with anyio.CancelScope(shield=True):
            await connection.close()


async def _seats_in(connection: psycopg.AsyncConnection[Any]) -> list[Seat]:
    rows = await connection.execute(
        "SELECT id, node, address, port, models, extract(epoch FROM now() - seen_at)"
        " FROM seats ORDER BY address, port, id"
    )
    return [
        Seat(id=row[0], node=row[1], address=row[2], port=row[3], models=tuple(row[4]), seen_s=float(row[5]))
        for row in await rows.fetchall()
    ]


def _stored(row: Sequence[Any]) -> StoredSpan:
    return StoredSpan(generation=msgspec.json.decode(row[0], type=SpanGeneration), because=row[1])


def _has(generation: SpanGeneration, offer: Offer) -> bool:
    """Whether a generation has the devices of an offer."""
    return any(
        offer.seat == member.seat and (generation.worker == offer.worker or collide(offer.devices, member.devices))
        for member in generation.members
    )
