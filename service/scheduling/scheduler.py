"""Carries out the decisions of the scheduling core: takes slots, runs turns, and records the results.

Each event is handled at once, so core and slots change together. Nothing here waits for the store.
"""

import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final, TypeVarTuple

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup, TaskStatus

from service.conversations.job.job import GroupBy, JobId
from service.conversations.job.states import TurnState
from service.conversations.record.transcript import Turn
from service.scheduling.admission import Admission, Piece
from service.scheduling.core import events
from service.scheduling.core.blame import Blame
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.queue.fair_shares import Shares
from service.scheduling.core.queue.ready_queue import PolicyFactory
from service.scheduling.core.view import PoolsView
from service.scheduling.fact_writer import FactWriter
from service.scheduling.integrity import IntegrityCheck
from service.scheduling.keeping.job_turns import JobTurns
from service.scheduling.keeping.request_queue import QueueRules
from service.scheduling.keeping.requests import RelayedRequests
from service.scheduling.keeping.turn import JobTurn
from service.scheduling.pauses import Pauses
from service.scheduling.recovery import recovered_from
from service.scheduling.reserved_slots import ReservedSlots
from service.scheduling.turn_endings import Ended, EndsOfMoment, TurnRunner
from service.scheduling.work import Pause, RunCounters, SchedulerStore
from service.scheduling.worker_findings import KvUses, WorkerFindings
from service.scheduling.worker_news import WorkerNews
from service.scheduling.works import Works
from service.store.records import Record
from workers.fleet import Fleet
from workers.notifier import Notifier
from workers.outcome import CancelReason

Args = TypeVarTuple("Args")
KV_LOOK_S: Final = 0.5  # seconds between two looks at the KV cache of turns in flight


class Scheduler:
    """Puts the turns of all jobs on the slots of all workers.

    ``run`` must be running; it owns the tasks of the turns. ``shares`` holds the share of each key by name.
    """

    def __init__(
        self,
        policy: PolicyFactory,
        fleet: Fleet,
        outlet: SchedulerStore,
        group_by: GroupBy | None = None,
        shares: Shares = None,
        *,
        queue: QueueRules,
    ) -> None:
        self._new_core = partial(SchedulingCore, policy, group_by, fleet.lanes.models, shares)
        self._core = self._new_core()
        self.fleet = fleet
        self._outlet = outlet
        self._tasks: TaskGroup | None = None
        self._is_forgetting = False
        self.counters = RunCounters()
        self.pauses = Pauses(self._post)
        self._blame = Blame(lambda job_id: self.works.owner(job_id))  # noqa: PLW0108 - the works are made later
        self._job_turns = JobTurns(
            self._blame, outlet, self.counters, fleet, self._post, lambda: shares is not None and len(shares) > 1
        )
        self.requests = RelayedRequests(self._blame, self.counters, self._post, queue)
        self.turns, self.tokens = self._job_turns.turns, self._job_turns.tokens  # read by other parts
        self.works = Works(self._job_turns, self.requests)
        self._facts = FactWriter(outlet, self.counters, self.turns, self._start_soon)
        findings, uses = WorkerFindings(fleet, self.works.clear_charges), KvUses(fleet, self.works)
        self._news = WorkerNews(fleet, outlet, self._blame, findings, uses, self._post)
        self._reserved_slots = ReservedSlots(self.works.usage_key)
        self._runner = TurnRunner(self._take_ends)
        self._ends = EndsOfMoment(
            self._blame, fleet, self.works, findings, uses, lambda key: shares is not None or self.view.is_on_trial(key)
        )
        self.admission = Admission(self._admit, self._facts.settle, self._start_soon)
        self._integrity = IntegrityCheck(self.counters)
        self._idle = Notifier()
        self.awaits = Notifier()  # notified when a turn waits for its caller, or a conversation was released
        self._at_work: list[JobTurn] = []  # turns at work when the service began to end
        self.look_elsewhere = self._news.look_elsewhere
        fleet.subscribe(self._news.note_worker_state)

    def __repr__(self) -> str:
        return f"<Scheduler {self._core!r}>"

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run turns until cancelled."""
        async with anyio.create_task_group() as self._tasks:
            task_status.started()
            while True:
                await anyio.sleep(KV_LOOK_S)
                self._news.look()
                for key in self._core.view.readers:
                    seconds = self.turns.first_token_s(key)
                    if seconds is not None:
                        self._post(events.PromptRead(key=key, seconds=seconds))
                self._integrity.check_piece(self._core)

    # Jobs

    def admit(self, piece: Piece) -> None:
        """Admit conversations of a job that are stored and belong to this node; those already here go on unchanged."""
        new = self.admission.without_known(piece, self.view.conversations_of(piece.job.id))
        if piece.is_cancelled and new is not piece:
            self.cancel(piece.job.id)
        if new is not None:
            self.admission.admit_piece(new)

    def _admit(self, piece: Piece) -> None:
        job, recovered = piece.job, recovered_from(piece)
        live = self._job_turns.restore(piece, recovered)
        self.counters.conversations += len(job.conversations)
        if recovered.set_aside:
            self._facts.record([self._job_turns.set_aside(key) for key in recovered.set_aside])
        admitted = events.JobAdmitted(
            job=job,
            ended=recovered.ended,
            digests={**live.digests(recovered.spoken), **recovered.silent},
            suspects=recovered.suspects,
            is_cancelled=piece.is_cancelled,
        )
        self._post(*self._news.lost_elsewhere(job.models), admitted)

    @asynccontextmanager
    async def leaving(self) -> AsyncIterator[None]:
        """Record the turns at work when a block is left in any way: engines end next, and all attempts with them."""
        try:
            yield
        finally:
            self._at_work = self.turns.in_flight()

    def note_own_end(self, detail: str) -> None:
        """Record, for the next life of the service, the turns that were at work when this one crashed."""
        requeued = self.turns.note_own_end(self._at_work, detail, datetime.now(UTC))
        self._outlet.append_nowait(requeued, lambda: None)

    def cancel(self, job_id: JobId) -> None:
        """End a job: its waiting turns are dropped, those in flight are cut off."""
        self.admission.cancel(job_id)
        self._post(events.JobCancelled(job_id=job_id))

    def take_words(self, turns: Iterable[Turn]) -> None:
        """Handle stored turns of callers that conversations here wait for; one may end its conversation."""
        for turn in turns:
            if not self.view.waits_for_caller(turn.key):
                continue
            digest = self._job_turns.hear_caller(turn)
            reason = turn.reason if turn.state is TurnState.FAILED else None
            self._post(events.CallerSpoke(key=turn.key, digest=digest, reason=reason))

    def end_unwritable(self, conversations: Collection[tuple[JobId, str]]) -> None:
        """End conversations whose facts the store cannot hold; they have already failed in the store."""
        self._post(*(events.ConversationSpoiled(job_id=job, conversation_id=name) for job, name in conversations))

    # Looking

    @property
    def view(self) -> PoolsView:
        """The present pools."""
        return self._core.view

    def free(self, model: str) -> int:
        """Count the slots of a model that new turns could take at once."""
        return 0 if self.pauses.are_any else max(0, self.view.free(model))

    def rests_until(self, model: str) -> datetime | None:
        """Return when suspects of a model's distrusted jobs and keys may run again; None if they may now."""
        at = self._core.rests_until(model)
        return None if at is None else datetime.now(UTC) + timedelta(seconds=at - time.monotonic())

    # Ending

    async def forget_all(self) -> None:
        """Drop all jobs: another node has taken over. Attempts are ended first, and their results are refused."""
        self._core.handle(events.Paused())
        self._is_forgetting = True
        try:
            self.works.interrupt_all(CancelReason.LEASE_LOST)
            await self.wait_idle()
            self.admission.clear()
            self.counters.conversations -= self.view.conversations - len(self.requests)  # counted again on return
            self.works.clear()
            self._blame.clear()
            self._core = self._new_core()
        finally:
            self._is_forgetting = False
        paused = [events.Paused()] if self.pauses.are_any else []
        self._post(*paused, *(events.JobAdmitted(job=each.job) for each in self.requests.queue.by_job.values()))
        self._news.tell_all()

    def close_nowait(self) -> None:
        """Start no more turns; turns in flight go on."""
        self.pauses.pause(Pause.CLOSING, "Roundhouse is stopping; its next start goes on with it")
        self.requests.close("the service is stopping")

    async def wait_idle(self) -> None:
        """Return when no turn is in flight; the caller must keep new turns from starting."""
        await self._idle.wait_until(lambda: not self.works.any_on_slot)

    # Acting

    def _post(self, *events_: events.Event, made: Sequence[Record] = ()) -> None:
        """Handle the events of one moment; the only writer of the core and of the pools. Nothing here waits.

        While all jobs are dropped, no event reaches the core: another node runs its turns, and a renewed lease must not
        start them here. The next core gets the lasting events, pauses and workers.
        """
        if self._is_forgetting:
            return
        facts = list(made)
        self._integrity.last = events_ or self._integrity.last
        for action in self._core.handle(*self._reserved_slots.take_over(), *events_):
            facts += self._act(action)
        facts += self._reserved_slots.settle(self._core.reserved, time.monotonic())
        self._facts.record(facts)
        if self.fleet.lanes.models:
            self.fleet.lane_pool.note_waiting({} if self.pauses.are_any else self.view.waiting_on_demand())
        if released := self._job_turns.released:  # after their records
            self._job_turns.released = []
            self._outlet.release_nowait(released)
            self.counters.conversations -= len(released)  # they are counted again wherever they return
            self.awaits.notify()

    def _act(self, action: events.Action) -> Sequence[Record]:
        """Carry out one action; return its facts."""
        now = datetime.now(UTC)
        match action:
            case events.TurnIsReady():
                return self.works.of(action.key.job_id).note_ready(action.key, now)
            case events.StartTurn():
                return self._start(action, now)
            case events.AwaitTurn():
                self.awaits.notify()
                return self._job_turns.await_turn(action.key, now)
            case events.AbandonTurn():
                detail = self.fleet.trouble_of(self.works.model_of(action.key))
                return self.works.of(action.key.job_id).abandon(action.key, detail)
            case events.CutOffTurn():
                self.works.of(action.key.job_id).cut_off_attempt(action.key)
            case _ if isinstance(action, events.OfSlot):
                self._job_turns.act(action, self._start_soon)
            case _ if isinstance(action, events.Move):
                return self._facts.in_pieces(self.works.of(action.job_id).move(action, now), action)
            case _:
                self._start_soon(self._follow, action)
        return ()

    async def _follow(self, action: events.Later) -> None:
        """Post the event that follows an action, when its time has come."""
        match action:
            case events.DeferTurn():
                await anyio.sleep(action.seconds)
                self._post(events.DeferralOver(key=action.key))
            case events.HoldSlot():
                await anyio.sleep(action.seconds)
                self._post(events.HoldOver(key=action.key, seconds=action.seconds))
            case events.ContinueCancel():
                await self._facts.settle()
                self._post(events.JobCancelled(job_id=action.job_id))
            case events.ContinueDispatch():
                await anyio.lowlevel.checkpoint()
                self._post()

    def _start(self, action: events.StartTurn, now: datetime) -> Sequence[Record]:
        worker = self.fleet.get(action.worker)
        if worker is None:
            raise RuntimeError(f"{action} cannot be carried out")
        self._blame.start(action.key, worker.spec.name, worker.spec.id, worker.now.incarnation)
        self.fleet.lane_pool.note_start(worker.spec.id, worker.spec.name)
        lease = worker.lease_nowait(action.slots)  # core and worker count the same slots
        turn, facts = self.works.of(action.key.job_id).begin_attempt(action.key, worker, now)
        self._start_soon(self._runner.run_turn, turn, worker, lease)
        return facts

    def _start_soon(self, what: Callable[[*Args], Coroutine[object, object, None]], *args: *Args) -> None:
        if self._tasks is None:
            raise RuntimeError("the scheduler does not run")
        self._tasks.start_soon(what, *args)

    def _take_ends(self, ended: Sequence[Ended]) -> None:
        """Apply all attempts that ended at one moment, before the next turn starts."""
        happened, facts = self._ends.take(ended, is_late=self._is_forgetting)
        self._post(*happened, made=facts)
        if not self.works.any_on_slot:
            self._idle.notify()
