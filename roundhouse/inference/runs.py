"""Runs of agents: each waits for a slot in one queue, is asked, and is asked elsewhere when its engine fails under it.

The queue is one over all agents, first in, first out, in front of the slots of all lanes.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from roundhouse.inference.event_log import INFER_DONE, INFER_START, EventLog
from roundhouse.inference.failures import EngineClosed, InferenceFailed
from roundhouse.inference.lane_news import LaneNews, NewsReaders
from workers.lanes.lane_pool import LanePool
from workers.outcome import Cancelled, Completed, EngineFailed, FailureReason, Outcome, RequestFailed
from workers.policy.placement import AHEAD, Waiting
from workers.policy.restart import Backoff
from workers.requests.answer import Answer
from workers.requests.request import Request
from workers.requests.slots import Lease
from workers.states import WorkerState
from workers.supervised import SupervisedWorker

MOST_DEATHS: Final = 5  # engines that may die under one run, which may be the cause
PAUSES: Final = Backoff(first_s=0.1, last_s=5.0)
CLOSED: Final = "the engine was shut down"
MS: Final = 1000.0
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
        free = [worker for worker in on_lanes if worker.now.state is WorkerState.READY]
        free = [worker for worker in free if worker.slots.in_use < worker.slots.total]
        hint = self._pool.hints.get(model)
        # Back to where it was pinned only where it has nothing to lose elsewhere.
        return min(
            free,
            key=lambda worker: (worker.spec.id != last, worker.spec.id != hint, worker.slots.in_use),
            default=None,
        )

    def _waiting(self) -> dict[str, Waiting]:
        orders: dict[str, list[int]] = {}
        for ticket in self._tickets:
            orders.setdefault(ticket.model, []).append(ticket.order)
        return {model: Waiting(count=len(of), first=tuple(of[:AHEAD])) for model, of in orders.items()}


class Patience:
    """The deaths and refusals of one run. Deaths by a signal from outside count towards nothing."""

    def __init__(self) -> None:
        self.deaths = 0
        self._refusals = 0
        self._refused_since: float | None = None

    def __repr__(self) -> str:
        return f"<Patience deaths={self.deaths} refusals={self._refusals}>"

    def pause_s(self, failed: EngineFailed, now: float, refusal_s: float | None) -> float | None:
        """Return how long to wait before the next try; None for no further try.

        ``refusal_s`` is for how long the worker may refuse one request.
        """
        if failed.brought_down:
            self.deaths += not failed.is_outside
            return 0.0 if self.deaths < MOST_DEATHS else None
        self._refusals += 1
        self._refused_since = now if self._refused_since is None else self._refused_since
        if refusal_s is not None and now - self._refused_since >= refusal_s:
            return None
        return failed.retry_after_s or PAUSES.after(self._refusals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """The seconds that a run has waited for its slot, and those of them in which its checkpoint was loading."""

    seconds: float
    swap_s: float

    @property
    def queue_s(self) -> float:
        """The seconds that it has waited behind others."""
        return self.seconds - self.swap_s


class AgentRuns:
    """Brings runs to their answers; with ``emulates`` none comes sooner than the engine's pace says that it would."""

    def __init__(
        self,
        pool: LanePool,
        turnstile: Turnstile,
        readers: NewsReaders,
        news: LaneNews,
        log: EventLog | None,
        *,
        emulates: bool,
    ) -> None:
        self._pool = pool
        self._turnstile = turnstile
        self._readers = readers
        self._news = news
        self._log = log
        self._emulates = emulates
        self._lanes: dict[str, str] = {}  # the lane that each agent was on last
        self._closing = asyncio.Event()
        self.because = CLOSED

    def __repr__(self) -> str:
        return f"<AgentRuns {self._turnstile!r}>"

    @property
    def is_closed(self) -> bool:
        """Whether nothing is asked any more, for the reason in ``because``."""
        return self._closing.is_set()

    def close(self, because: str = CLOSED) -> None:
        """End all waits; the first reason stands."""
        if not self._closing.is_set():
            self.because = because
        self._closing.set()
        self._turnstile.fail_all(lambda: EngineClosed(self.because))

    @property
    def last_lanes(self) -> Mapping[str, str]:
        """The lane that each agent was on last, of those that were on any."""
        return dict(self._lanes)

    def last_lane(self, agent_id: str) -> str | None:
        """Return the lane that an agent was on last, None where it was on none."""
        return self._lanes.get(agent_id)

    async def ask(self, agent_id: str, model: str, request: Request, refusal_s: float | None) -> Answer:
        """Return the answer to a request; ``refusal_s`` is for how long an engine may refuse it.

        Raises:
            InferenceFailed: there is none.
            EngineClosed: the engine was shut down.
        """
        place: int | None = None
        last, patience = "", Patience()
        while not self._closing.is_set():
            asked_at = time.monotonic()
            place, seat = await self._turnstile.enter(model, again=place, last=self._lanes.get(agent_id, ""))
            waited = self._waited(seat.worker, asked_at)
            if last and seat.worker.spec.id != last:
                self._readers.tell(self._news.moved(agent_id, last, seat.worker))
            last = self._lanes[agent_id] = seat.worker.spec.id
            answer, outcome = await self._attempt(agent_id, request, seat, waited)
            match outcome:
                case Completed():
                    return answer
                case EngineFailed():
                    pause_s = patience.pause_s(outcome, time.monotonic(), refusal_s)
                    if pause_s is None:
                        reason = FailureReason.POISONED if outcome.brought_down else outcome.reason
                        raise InferenceFailed(agent_id, reason, outcome.detail)
                    await asyncio.sleep(pause_s)
                case RequestFailed():
                    raise InferenceFailed(agent_id, outcome.reason, outcome.detail)
                case Cancelled():
                    break  # by the shutdown
        raise EngineClosed(self.because)

    def _waited(self, worker: SupervisedWorker, asked_at: float) -> Waited:
        now, lane = time.monotonic(), self._pool.find(worker.spec.id)
        began, ended = lane.last_load if lane is not None else (0.0, 0.0)
        return Waited(seconds=now - asked_at, swap_s=max(0.0, min(ended, now) - max(began, asked_at)))

    async def _attempt(self, agent_id: str, request: Request, seat: Seat, waited: Waited) -> tuple[Answer, Outcome]:
        answer = Answer(time.monotonic)
        worker, began_at = seat.worker, time.monotonic()
        lane = worker.spec.lane
        place = {"agent": agent_id, "gpu": lane.device.uuid if lane is not None else "", "lane": worker.spec.id}
        self._write(INFER_START, place, prompt_len=len(request.conversation[0].content))
        try:
            with seat.lease:
                outcome = await worker.requests.perform(request, answer)
                if self._emulates and isinstance(outcome, Completed) and answer.predicted_ms is not None:
                    await self._hold_until(began_at + answer.predicted_ms / MS)
        finally:
            self._turnstile.start_runs()
        predicted = answer.predicted_ms
        self._write(
            INFER_DONE,
            place,
            tokens_out=answer.output_tokens,
            latency_ms=_ms(waited.swap_s + time.monotonic() - began_at),
            predicted_ms=None if predicted is None else round(predicted + waited.swap_s * MS, 3),
            queue_ms=_ms(waited.queue_s),
            swap_ms=_ms(waited.swap_s),
            tools_ms=_ms(answer.tools_s),
            outcome=type(outcome).__name__.lower(),
        )
        return answer, outcome

    async def _hold_until(self, at: float) -> None:
        """Keep an answer, and its slot, until it would have come; a shutdown waits for none."""
        while not self._closing.is_set() and (left := at - time.monotonic()) > 0:  # a timer may be a moment early
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), left)

    def _write(self, event: str, place: dict[str, str], **about: object) -> None:
        if self._log is not None:
            self._log.write({"event": event, "time": time.time(), **place, **about})


def _ms(seconds: float) -> float:
    return round(seconds * MS, 3)
