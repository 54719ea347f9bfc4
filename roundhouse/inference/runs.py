"""Runs of agents: each waits for a slot in one queue, is asked, and is asked elsewhere when its engine fails under it.

The queue is one over all agents, first in, first out, in front of the slots of all lanes. The end of an attempt is
judged like that of a turn, without blame.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from typing import Final, Literal

from msgspec.structs import replace

from roundhouse.inference.event_log import INFER_DONE, INFER_START, EventLog
from roundhouse.inference.failures import EngineClosed, InferenceFailed
from roundhouse.inference.lane_agents import LaneAgent
from roundhouse.inference.lane_news import LaneNews
from service.conversations.record.transcript import Charges
from service.scheduling.core.blame import BlameVerdict
from service.scheduling.core.deaths import MOST_DEATHS
from service.scheduling.endings import FailureEvidence, Move, decide
from workers.lanes.lane_pool import LanePool
from workers.outcome import Completed, EngineFailed, Outcome, RequestFailed
from workers.policy.continuation import Continuation
from workers.policy.placement import AHEAD, Waiting
from workers.requests.answer import Answer
from workers.requests.halves import HalfAnswer
from workers.requests.request import Request
from workers.requests.slots import Lease
from workers.states import WorkerState
from workers.supervised import SupervisedWorker

CLOSED: Final = "the engine was shut down"
MS: Final = 1000.0
Order = Literal["fair", "fcfs"]
Seat = tuple[SupervisedWorker, Lease]  # a slot, and the lease that gives it back


class WaitingRun:
    """One run: its place in the order of arrival, which it keeps, and the charges of its attempts."""

    def __init__(self, order: int, agent: LaneAgent) -> None:
        self.order = order
        self.agent = agent
        self.model = agent.served.model
        self.lane = ""  # where it was asked last
        self.charges = Charges()
        self.half: HalfAnswer | None = None  # what its next attempt goes on from
        self.seat: asyncio.Future[Seat]  # the slot that it waits for

    def judge(self, outcome: Outcome, asked_s: float, refusal_s: float | None) -> None:
        """Charge the run with an attempt without an answer; deaths by a signal from outside count towards nothing.

        Raises:
            InferenceFailed: it is given up.
        """
        death = None
        if isinstance(outcome, EngineFailed) and outcome.brought_down:
            charges = replace(self.charges, deaths=self.charges.deaths + (not outcome.is_outside))
            death = BlameVerdict(charges=charges, is_convicted=charges.deaths >= MOST_DEATHS)
        evidence = FailureEvidence(death=death, asked_s=asked_s, refusal_s=refusal_s, now=time.time())
        verdict = decide(outcome, self.charges, evidence, may_run_again=True)
        self.charges = verdict.charges
        if verdict.move is Move.FAIL and isinstance(outcome, EngineFailed | RequestFailed):
            raise InferenceFailed(self.agent.id, verdict.reason, outcome.detail)


class AgentRuns:
    """Gives slots to runs in the order in which they came, and brings them to their answers.

    With ``fcfs`` no run starts before one that came earlier. With ``fair`` one may, on a lane whose model the earlier
    ones do not want; the run that has waited longest gets the next lane that is free. With ``emulates`` no answer comes
    sooner than the engine's pace predicts.
    """

    def __init__(self, pool: LanePool, order: Order, news: LaneNews, log: EventLog | None, *, emulates: bool) -> None:
        self._pool = pool
        self._order = order
        self._news = news
        self._log = log
        self._emulates = emulates
        self._queue: list[WaitingRun] = []
        self._numbers = count(1)
        self._closing = asyncio.Event()
        self.because = CLOSED

    def __repr__(self) -> str:
        return f"<AgentRuns {self._order} waiting={len(self._queue)}>"

    @property
    def is_closed(self) -> bool:
        """Whether no more runs are asked, for the reason in ``because``."""
        return self._closing.is_set()

    @property
    def waiting(self) -> Mapping[str, int]:
        """The number of runs that wait for a slot, by model."""
        return Counter(run.model for run in self._queue)

    def close(self, because: str = CLOSED) -> None:
        """End all waits; the first reason stands."""
        if not self.is_closed:
            self.because = because
        self._closing.set()
        for run in self._queue:
            if not run.seat.done():
                run.seat.set_exception(EngineClosed(self.because))

    async def ask(self, agent: LaneAgent, request: Request, refusal_s: float | None) -> Answer:
        """Return the answer to a request; ``refusal_s`` is for how long an engine may refuse it.

        Raises:
            InferenceFailed: there is none.
            EngineClosed: the engine was shut down.
        """
        run = WaitingRun(next(self._numbers), agent)
        while not self.is_closed:
            asked_at = time.monotonic()
            worker, lease = await self.wait_seat(run)
            if run.lane and worker.spec.id != run.lane:
                self._news.report_move(agent.id, run.lane, worker)
            run.lane = agent.last_lane = worker.spec.id
            answer, outcome = await self._attempt(run, request, worker, lease, asked_at)
            run.half = answer.half if worker.spec.continuation is not Continuation.OFF else None
            if isinstance(outcome, Completed):
                return answer
            run.judge(outcome, time.monotonic() - answer.started_at, refusal_s)
        raise EngineClosed(self.because)

    # The queue

    async def wait_seat(self, run: WaitingRun) -> Seat:
        """Return a slot for a run, at its place in the order of arrival."""
        run.seat = asyncio.get_running_loop().create_future()
        self._queue.append(run)
        self._queue.sort(key=lambda each: each.order)
        self.start_runs()
        try:
            return await run.seat
        except asyncio.CancelledError:
            if run.seat.done() and not run.seat.cancelled() and run.seat.exception() is None:
                run.seat.result()[1].release()
            raise
        finally:
            if run in self._queue:
                self._queue.remove(run)
            self.start_runs()

    def start_runs(self) -> None:
        """Start the runs that can start; called after every change of a lane and of the queue."""
        # A cancelled run is there until its task has run: it must not be given a slot that it would not give back.
        self._queue = [run for run in self._queue if not run.seat.done()]
        for run in list(self._queue):
            worker = self._free_worker(run)
            if worker is not None:
                self._queue.remove(run)
                self._pool.note_start(worker.spec.id, run.model)
                run.seat.set_result((worker, worker.lease_nowait()))
            elif self._order == "fcfs":
                break
        orders: dict[str, list[int]] = {}
        for run in self._queue:
            orders.setdefault(run.model, []).append(run.order)
        self._pool.note_waiting(
            {model: Waiting(count=len(all_), first=tuple(all_[:AHEAD])) for model, all_ in orders.items()}
        )

    def _free_worker(self, run: WaitingRun) -> SupervisedWorker | None:
        """Return a worker with a free slot: the agent's last, which has its cache if any has, or else the pinned."""
        last, pin = run.agent.last_lane, run.agent.served.lane
        free = [
            worker
            for worker in self._pool
            if worker.spec.name == run.model
            and worker.now.state is WorkerState.READY
            and worker.slots.in_use < worker.slots.total
        ]
        return min(
            free,
            key=lambda worker: (worker.spec.id != last, worker.spec.id != pin, worker.slots.in_use),
            default=None,
        )

    # Attempts

    async def _attempt(
        self, run: WaitingRun, request: Request, worker: SupervisedWorker, lease: Lease, asked_at: float
    ) -> tuple[Answer, Outcome]:
        answer, began_at = Answer(time.monotonic), time.monotonic()
        lane, known = worker.spec.lane, self._pool.lanes.get(worker.spec.id)
        load_began, load_ended = known.last_load if known is not None else (0.0, 0.0)
        swap_s = max(0.0, min(load_ended, began_at) - max(load_began, asked_at))
        place = {"agent": run.agent.id, "gpu": lane.device.uuid if lane is not None else "", "lane": worker.spec.id}
        self._write(INFER_START, place, prompt_len=len(request.conversation[0].content))
        try:
            with lease:
                if run.half:
                    answer.go_on_from(run.half)
                outcome = await worker.requests.perform(request, answer)
                if self._emulates and isinstance(outcome, Completed) and answer.predicted_ms is not None:
                    await self._hold_until(began_at + answer.predicted_ms / MS)
        finally:
            self.start_runs()
        predicted = answer.predicted_ms
        self._write(
            INFER_DONE,
            place,
            tokens_out=answer.output_tokens,
            latency_ms=_ms(swap_s + time.monotonic() - began_at),
            predicted_ms=None if predicted is None else round(predicted + swap_s * MS, 3),
            queue_ms=_ms(began_at - asked_at - swap_s),
            swap_ms=_ms(swap_s),
            tools_ms=_ms(answer.tools_s),
            outcome=type(outcome).__name__.lower(),
        )
        return answer, outcome

    async def _hold_until(self, at: float) -> None:
        """Keep an answer, and its slot, until its time; a shutdown does not wait for it."""
        while not self.is_closed and (left := at - time.monotonic()) > 0:  # a timer may be a moment early
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), left)

    def _write(self, event: str, place: dict[str, str], **about: object) -> None:
        if self._log is not None:
            self._log.write({"event": event, "time": time.time(), **place, **about})


def _ms(seconds: float) -> float:
    return round(seconds * MS, 3)
