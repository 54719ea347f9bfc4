"""One queue over all agents, first in, first out, in front of the slots of all lanes."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from workers.lanes.lane_pool import LanePool
from workers.policy.placement import AHEAD, Waiting
from workers.requests.slots import Lease
from workers.states import WorkerState
from workers.supervised import SupervisedWorker

Order = Literal["fair", "fcfs"]


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """A slot that a run was given: the worker, and the lease that gives it back."""

    worker: SupervisedWorker
    lease: Lease


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ticket:
    order: int
    model: str
    seat: asyncio.Future[Seat]
    last: str  # the lane that it was on before, "" for none


class Turnstile:
    """Gives slots to runs in the order in which they came.

    With ``fcfs`` none starts before one that came earlier. With ``fair`` one may, on a lane whose model the earlier
    ones do not want; who has waited longest gets the next lane that is free.
    """

    def __init__(self, pool: LanePool, order: Order) -> None:
        self._pool = pool
        self._order = order
        self._tickets: list[_Ticket] = []
        self._count = 0

    def __repr__(self) -> str:
        return f"<Turnstile {self._order} waiting={len(self._tickets)}>"

    @property
    def waiting(self) -> Mapping[str, int]:
        """The number of runs that wait for a slot, by model."""
        return Counter(ticket.model for ticket in self._tickets)

    async def enter(self, model: str, *, again: int | None = None, last: str = "") -> tuple[int, Seat]:
        """Return the place in the order of arrival, and a slot; ``again`` is the place of a run that had one before.

        ``last`` is the lane that the agent was on last: what it has read is in the cache there, if anywhere.
        """
        self._count += again is None
        order = self._count if again is None else again
        ticket = _Ticket(order=order, model=model, seat=asyncio.get_running_loop().create_future(), last=last)
        self._tickets.append(ticket)
        self._tickets.sort(key=lambda each: each.order)
        self.start_runs()
        try:
            return ticket.order, await ticket.seat
        except asyncio.CancelledError:
            if ticket.seat.done() and not ticket.seat.cancelled() and ticket.seat.exception() is None:
                ticket.seat.result().lease.release()
            raise
        finally:
            if ticket in self._tickets:
                self._tickets.remove(ticket)
            self.start_runs()

    def start_runs(self) -> None:
        """Start what can start; called after every change of a lane and of the queue."""
        # One whose run was cancelled is there until its task has run: it must not be given what none gives back.
        self._tickets = [ticket for ticket in self._tickets if not ticket.seat.done()]
        for ticket in list(self._tickets):
            worker = self._free_worker(ticket.model, ticket.last)
            if worker is not None:
                self._tickets.remove(ticket)
                self._pool.note_start(worker.spec.id, ticket.model)
                ticket.seat.set_result(Seat(worker=worker, lease=worker.lease_nowait()))
            elif self._order == "fcfs":
                break
        self._pool.note_waiting(self._waiting())

    def fail_all(self, error: Callable[[], Exception]) -> None:
        """End every wait."""
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            if not ticket.seat.done():
                ticket.seat.set_exception(error())

    def _free_worker(self, model: str, last: str) -> SupervisedWorker | None:
        on_lanes = [worker for worker in self._pool if worker.spec.name == model]
        free = [worker for worker in on_lanes if worker.state is WorkerState.READY]
        free = [worker for worker in free if worker.slots_in_use < worker.slots]
        hint = self._pool.hints.get(model)
        # Back to where it was pinned only where it has nothing to lose elsewhere.
        return min(
            free,
            key=lambda worker: (worker.spec.id != last, worker.spec.id != hint, worker.slots_in_use),
            default=None,
        )

    def _waiting(self) -> dict[str, Waiting]:
        orders: dict[str, list[int]] = {}
        for ticket in self._tickets:
            orders.setdefault(ticket.model, []).append(ticket.order)
        return {model: Waiting(count=len(of), first=tuple(of[:AHEAD])) for model, of in orders.items()}
