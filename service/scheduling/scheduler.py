"""Acts out what the scheduling core decides: takes slots, runs turns, and tells the store what became of them.

Every event is handled at once, without waiting: core and slots change together. Nothing here waits for the store.
"""

import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice
from typing import Final, TypeVarTuple

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup, TaskStatus
from msgspec.structs import replace

from service.conversations.heritage import as_inherited, silent_turns
from service.conversations.job import Conversation, GroupBy, Job, JobId, TurnKey, TurnKind
from service.conversations.log_fields import of_job
from service.conversations.states import ENDED_CONVERSATIONS, TurnState
from service.conversations.transcript import Turn
from service.conversations.until import TurnDigest
from service.scheduling.admission import Admission, Piece
from service.scheduling.attempt import usage_key
from service.scheduling.core import events
from service.scheduling.core.blame import Blame, Finding, Trial
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.queue.fair_shares import Shares
from service.scheduling.core.queue.ready_queue import PolicyFactory
from service.scheduling.core.view import PoolsView
from service.scheduling.integrity import IntegrityCheck
from service.scheduling.jobs.job_turns import JobTurns
from service.scheduling.jobs.turn import JobTurn
from service.scheduling.kept_slots import KeptSlots
from service.scheduling.relayed.requests import QueueRules, RelayedRequests
from service.scheduling.turn_endings import Ended, TurnEndings, TurnRunner
from service.scheduling.work import End, Pause, RunCounters, SchedulerStore, Work
from service.scheduling.worker_findings import KvUses, WorkerFindings
from service.store import records
from service.store.records import Record, UsageKey
from workers.fleet import Fleet
from workers.lanes.swap_log import Swap
from workers.log_context import line_about
from workers.notifier import Notifier
from workers.outcome import Cancelled, CancelReason, Completed, EngineFailed, FailureReason
from workers.spec import EngineKind
from workers.states import WorkerState
from workers.supervised import SupervisedWorker

Args = TypeVarTuple("Args")
KV_LOOK_S: Final = 0.5  # between two looks at what turns take of KV caches
FACTS_A_WRITE: Final = 500  # a cancel may bring a million: other commits must not wait for all of them
MOST_SERVICE_ENDS: Final = 3  # with one turn at work
SHOWN: Final = 10  # conversations in a line of the log
GAVE_WAY: Final = Cancelled(reason=CancelReason.CACHE_FULL)
logger = logging.getLogger(__name__)


class Scheduler:
    """Puts the turns of all jobs on the slots of all workers.

    ``run`` must be running; it owns the tasks of the turns. ``shares`` are those of keys, by their names.
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
        self._is_fair = shares is not None
        self._core = self._new_core()
        self._fleet = fleet
        self._outlet = outlet
        self._tasks: TaskGroup | None = None
        self._pauses: dict[Pause, str] = {}
        self._is_forgetting = False
        self.counters = RunCounters()
        self._blame = Blame(lambda job_id: self.owner(job_id))  # noqa: PLW0108 - its works are not yet there
        self._job_turns = JobTurns(
            self._blame, outlet, self.counters, fleet, self._post, lambda: shares is not None and len(shares) > 1
        )
        self.requests = RelayedRequests(self._blame, self.counters, self._post, queue)
        self.turns = self._job_turns.turns  # others only look
        self._works: tuple[Work, ...] = (self._job_turns, self.requests)
        self._findings = WorkerFindings(fleet, self._clear_charges)
        self._kv_uses = KvUses(fleet, self._works)
        self._kept_slots = KeptSlots(self._whose_use)
        self._runner = TurnRunner(self._take_ends)
        self._turn_endings = TurnEndings(self._blame, self.model_of, fleet.refusal_s)
        self.admission = Admission(self._admit, partial(outlet.append, []), self._start_soon)
        self._integrity = IntegrityCheck(self.counters)
        self._idle = Notifier()
        self.awaits = Notifier()  # that a caller is waited for, or that a conversation was left
        self._at_work: list[JobTurn] = []  # as the service began to end
        fleet.subscribe(self._worker_changed)

    def __repr__(self) -> str:
        return f"<Scheduler {self._core!r}>"

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run turns until cancelled."""
        async with anyio.create_task_group() as self._tasks:
            task_status.started()
            while True:
                await anyio.sleep(KV_LOOK_S)
                self._take_findings(self._blame.expire(time.monotonic()))
                if self._blame.has_distrusted:
                    self._post(events.TimeTold(at=time.monotonic()))
                if uses := self._kv_uses.read_changes():
                    self._post(events.KvUseTold(uses=uses))
                for key in self._core.view.readers:
                    seconds = self._job_turns.turns.first_token_s(key)
                    if seconds is not None:
                        self._post(events.PromptRead(key=key, seconds=seconds))
                self._integrity.check_piece(self._core)

    # Jobs

    def admit(self, piece: Piece) -> None:
        """Take conversations of a job that are stored and ours; one that is here already goes on as it is."""
        job, waiting = piece.job, self.admission.waiting(piece.job.id)
        here = self.view.conversations_of(job.id)
        new = [each for each in job.conversations if each.id not in waiting and each.id not in here]
        if len(new) < len(job.conversations):
            if piece.is_cancelled:
                self.cancel(job.id)
            piece = self._pass_over(piece, new)
        if new:
            self.admission.admit_piece(piece)

    def _admit(self, piece: Piece) -> None:
        job, ended = piece.job, [*_as_own(piece), *piece.ended]
        live = self._job_turns.admit(job)
        live.resume_words(piece.words)
        live.memories.resume(piece.cuts)
        live.overruns.resume((each.path, each.pattern) for each in piece.given_up)
        self.counters.conversations += len(job.conversations)
        spoken = (each for each in ended if each.kind is TurnKind.TURN and each.key.agent_id in live.agents)
        known = {turn.key: (turn.state, turn.reason) for turn in spoken}
        silent: dict[TurnKey, TurnDigest] = {}
        for conversation in job.conversations:
            if conversation.heritage is not None:
                silent |= silent_turns(job, conversation, known)
        known |= dict.fromkeys(silent, (TurnState.COMPLETED, None))
        left = {turn.key: turn for turn in piece.unfinished if turn.key not in known}
        set_aside = [turn for turn in left.values() if turn.charges.service_ends >= MOST_SERVICE_ENDS]
        live.hear_again((turn for turn in ended if turn.is_heard), left.values())
        self._job_turns.turns.restore(left.values())
        if set_aside:
            self._write([self._set_aside(job, turn.key) for turn in set_aside])
            known |= {turn.key: (TurnState.FAILED, FailureReason.POISONED) for turn in set_aside}
        suspects = {
            key: Trial.LAST if turn.charges.service_ends else Trial.NEXT
            for key, turn in left.items()
            if turn.charges.is_suspect or turn.charges.service_ends
        }
        here, is_elsewhere = self._fleet.models(), self._outlet.is_elsewhere
        missing = [model for model in job.models if model not in here and is_elsewhere(model)]
        self._post(
            *(events.ModelLost(model=model, is_elsewhere=True) for model in missing),
            events.JobAdmitted(
                job=job,
                ended=known,
                digests=live.digests(ended) | silent,
                suspects=suspects,
                is_cancelled=piece.is_cancelled,
            ),
        )

    def _pass_over(self, piece: Piece, new: Sequence[Conversation]) -> Piece:
        """Return a piece without conversations that are here: a claim has told them twice, and each runs once."""
        names = {each.id for each in new}
        here = [each.id for each in piece.job.conversations if each.id not in names]
        shown, line = ", ".join(here[:SHOWN]), line_about(of_job(piece.job.id))
        text = "job %s: %d conversations were claimed while they run here, and go on as they are: %s"
        logger.warning(text, piece.job.id, len(here), shown, extra=line)
        return replace(
            piece,
            job=replace(piece.job, conversations=tuple(new)),
            ended=[turn for turn in piece.ended if turn.key.conversation_id in names],
            inherited={name: turns for name, turns in piece.inherited.items() if name in names},
            unfinished=[turn for turn in piece.unfinished if turn.key.conversation_id in names],
            words={name: words for name, words in piece.words.items() if name in names},
            cuts=[cut for cut in piece.cuts if cut.key.conversation_id in names],
        )

    def _set_aside(self, job: Job, key: TurnKey) -> records.TurnEnded:
        """Fail a turn under which the service itself has ended again and again: no job is to end it for good."""
        agent = self._job_turns.agent_of(key)
        detail = f"the service ended by a defect of its own {MOST_SERVICE_ENDS} times while this turn was at work"
        turns = self._job_turns.turns
        turn = turns.end_waiting(key, agent, TurnState.FAILED, FailureReason.POISONED, detail)
        if turn.leaves:
            self._job_turns.prompts[job.id].hear_leave(key)
        return records.TurnEnded(
            turn=turn, at=datetime.now(UTC), model=agent.model, waited_for=agent.waits_for, readers=agent.visible_to
        )

    @asynccontextmanager
    async def leaving(self) -> AsyncIterator[None]:
        """Record the turns at work as a block is left, in any way: engines end next, and then no turn is at work."""
        try:
            yield
        finally:
            self._at_work = self._job_turns.turns.in_flight()

    def note_own_end(self, detail: str) -> None:
        """Note, for the next life of the service, which turns were at work as this one ended by a defect."""
        requeued = self._job_turns.turns.note_own_end(self._at_work, detail, datetime.now(UTC))
        self._outlet.append_nowait(requeued, lambda: None)

    def cancel(self, job_id: JobId) -> None:
        """End a job: what waits is dropped, what runs is cut off."""
        self.admission.cancel(job_id)
        self._post(events.JobCancelled(job_id=job_id))

    def take_words(self, turns: Iterable[Turn]) -> None:
        """Take the stored turns of callers that are waited for here; with one of them a conversation may end."""
        for turn in turns:
            if not self.view.waits_for_caller(turn.key):
                continue
            digest = self._job_turns.hear_caller(turn)
            reason = turn.reason if turn.state is TurnState.FAILED else None
            self._post(events.CallerSpoke(key=turn.key, digest=digest, reason=reason))

    def end_unwritable(self, conversations: Collection[tuple[JobId, str]]) -> None:
        """End conversations of which the store cannot hold what has happened, and has ended them: none goes on here."""
        self._post(*(events.ConversationSpoiled(job_id=job, conversation_id=name) for job, name in conversations))

    # Looking

    @property
    def view(self) -> PoolsView:
        """The pools of this moment."""
        return self._core.view

    def free(self, model: str) -> int:
        """Count the slots of a model that a new turn would have at once."""
        return 0 if self._pauses else max(0, self.view.free(model))

    def rests_until(self, model: str) -> datetime | None:
        """Return until when suspects of a model's distrusted jobs and keys let others go first."""
        at = self._core.rests_until(model)
        return None if at is None else datetime.now(UTC) + timedelta(seconds=at - time.monotonic())

    def slots_on_demand(self, model: str) -> int:
        """Count the slots that a model would have if it were loaded now."""
        return self._fleet.slots_on_demand(model)

    @property
    def is_closing(self) -> bool:
        """Whether nothing more is started before the next life of the service."""
        return Pause.CLOSING in self._pauses

    @property
    def paused_by(self) -> str | None:
        """Why nothing is started at the moment, None where turns are started."""
        return next(iter(self._pauses.values()), None)

    def job_name(self, job_id: JobId) -> str:
        """Return the caller's name of a job that has not ended."""
        return self._work(job_id).name_of(job_id)

    def owner(self, job_id: JobId) -> str | None:
        """Return the name of the key that a job which has not ended was posted with."""
        return self._work(job_id).owner_of(job_id)

    def model_of(self, key: TurnKey) -> str:
        """Return the model that a turn is asked of."""
        return self._work(key.job_id).agent_of(key).model

    def swaps(self, job_id: JobId) -> Sequence[Swap]:
        """Return the newest loads, on lanes, of models that a job's agents have; none of a job that has ended."""
        models = self.view.models_of(job_id)
        return [swap for swap in self._fleet.lanes.swaps if swap.model in models]

    @property
    def unloaded(self) -> frozenset[str]:
        """The models that an operator has unloaded."""
        return self._fleet.unloaded

    # Pausing and ending

    def pause(self, why: Pause, detail: str) -> None:
        """Start nothing more for a reason, in addition to whatever reasons there are; turns in flight go on."""
        self._pauses[why] = detail
        self._post(events.Paused())

    def unpause(self, why: Pause) -> None:
        """Take a reason back; with the last of them turns are started again."""
        if self._pauses.pop(why, None) is not None and not self._pauses:
            self._post(events.Unpaused())

    def interrupt_all(self) -> None:
        """End every attempt that is running; its turn is ready again, and charged with nothing."""
        for work in self._works:
            work.interrupt_all()

    async def forget_all(self) -> None:
        """Drop every job: another node has taken over. Attempts are ended first, and what they bring is refused."""
        self._core.handle(events.Paused())
        self._is_forgetting = True
        try:
            self.interrupt_all()
            await self.wait_idle()
            self.admission.clear()
            self.counters.conversations -= self.view.conversations - len(self.requests)  # until they are counted anew
            for work in self._works:
                work.clear()
            self._blame.clear()
            self._core = self._new_core()
        finally:
            self._is_forgetting = False
        if self._pauses:
            self._core.handle(events.Paused())
        for worker in self._fleet:
            self._worker_changed(worker)

    def close_nowait(self) -> None:
        """Start nothing more; turns in flight go on."""
        self.pause(Pause.CLOSING, "Roundhouse is stopping; its next start goes on with it")
        self.requests.close("the service is stopping")

    async def wait_idle(self) -> None:
        """Return when nothing is in flight; something must keep new turns from starting."""
        await self._idle.wait_until(lambda: not self._any_on_slot)

    @property
    def _any_on_slot(self) -> bool:
        return any(work.any_on_slot for work in self._works)

    # Acting

    def _post(self, *events_: events.Event, made: Sequence[Record] = ()) -> None:
        """Handle what happened at one moment; the only writer of the core and of the pools. Nothing here waits.

        While all is dropped nothing reaches the core: another node runs its turns, and a lease that is good again must
        not start them here. What lasts, pauses and workers, the next core is told.
        """
        if self._is_forgetting:
            return
        facts = list(made)
        self._integrity.last = events_ or self._integrity.last
        for action in self._core.handle(*self._kept_slots.take_over(), *events_):
            facts += self._act(action)
        facts += self._kept_slots.settle(self._core.kept, time.monotonic())
        for begin in range(0, len(facts), FACTS_A_WRITE):
            self._write(facts[begin : begin + FACTS_A_WRITE])
        if self._fleet.lanes.models:
            self._fleet.lanes.note_waiting({} if self._pauses else self.view.waiting_on_demand())
        released = self._job_turns.released
        if released:  # after what was said of them
            self._job_turns.released = []
            self._outlet.release_nowait(released)
            self.counters.conversations -= len(released)  # wherever they come back, they are counted again
            self.awaits.notify()

    def _write(self, facts: Sequence[Record]) -> None:
        ended = [fact.turn.key for fact in facts if isinstance(fact, records.TurnEnded)]
        ended_conversations = sum(
            isinstance(fact, records.ConversationMoved) and fact.state in ENDED_CONVERSATIONS for fact in facts
        )
        self.counters.note_ended(len(ended), ended_conversations)
        self._outlet.append_nowait(facts, partial(self._forget_stored, ended, ended_conversations))

    def _act(self, action: events.Action) -> list[Record]:
        """Carry out one action; return the facts that it makes."""
        now = datetime.now(UTC)
        facts: list[Record] = []
        match action:
            case events.TurnIsReady() | events.AwaitTurn():
                facts += self._wait(action, now)
            case events.StartTurn():
                facts += self._start(action, now)
            case _ if isinstance(action, events.OfSlot):
                self._job_turns.act(action, self._start_soon)
            case events.DeferTurn():
                self._start_soon(self._end_deferral, action)
            case events.HoldSlot():
                self._start_soon(self._end_hold, action)
            case events.AbandonTurn():
                detail = self._fleet.trouble_of(self.model_of(action.key))
                facts += self._work(action.key.job_id).abandon(action.key, detail)
            case events.CutOffTurn():
                self._work(action.key.job_id).cut_off_attempt(action.key)
            case events.ContinueCancel():
                self._start_soon(self._go_on_cancelling, action.job_id)
            case events.ContinueDispatch():
                self._start_soon(self._go_on_dispatching)
            case _:
                facts += self._move(action, now)
        return facts

    def _wait(self, action: events.TurnIsReady | events.AwaitTurn, now: datetime) -> Sequence[Record]:
        if isinstance(action, events.TurnIsReady):
            return self._work(action.key.job_id).note_ready(action.key, now)
        self.awaits.notify()
        return self._job_turns.await_turn(action.key, now)

    def _move(self, action: events.Move, now: datetime) -> list[Record]:
        facts = self._work(action.job_id).move(action, now)
        if isinstance(action, events.ConversationEnded) and len(action.unspoken) > FACTS_A_WRITE:
            self._start_soon(self._write_slowly, iter(facts))
            return []
        return list(facts)

    async def _write_slowly(self, facts: Iterator[Record]) -> None:
        """Write so many facts that all at once would hold up everybody else."""
        while some := list(islice(facts, FACTS_A_WRITE)):
            self._write(some)
            await self._outlet.append([])  # behind those

    async def _go_on_cancelling(self, job_id: JobId) -> None:
        await self._outlet.append([])  # behind all that has followed so far
        self._post(events.JobCancelled(job_id=job_id))

    async def _go_on_dispatching(self) -> None:
        await anyio.lowlevel.checkpoint()
        self._post()

    def _forget_stored(self, keys: Sequence[TurnKey], ended_conversations: int) -> None:
        self.counters.persisted += ended_conversations
        self._job_turns.turns.forget_stored(keys)

    def _work(self, job_id: JobId) -> Work:
        return self.requests if job_id in self.requests else self._job_turns

    def _whose_use(self, key: TurnKey) -> UsageKey:
        work = self._work(key.job_id)
        job_id = "" if work is self.requests else key.job_id
        return usage_key(work.agent_of(key), work.owner_of(key.job_id), job_id)

    def _clear_charges(self, keys: Sequence[TurnKey]) -> None:
        for work in self._works:
            work.clear_charges(keys)

    def _start(self, action: events.StartTurn, now: datetime) -> list[Record]:
        worker = self._fleet.get(action.worker)
        if worker is None:
            raise RuntimeError(f"{action} cannot be carried out")
        self._blame.start(action.key, worker.spec.name, worker.spec.id, worker.now.incarnation)
        self._fleet.lanes.note_start(worker.spec.id, worker.spec.name)
        lease = worker.lease_nowait(action.slots)  # the core counts the slots of ready workers as the workers do
        turn, facts = self._work(action.key.job_id).begin_attempt(action.key, worker, now)
        self._start_soon(self._runner.run_turn, turn, worker, lease)
        return list(facts)

    def look_elsewhere(self) -> None:
        """Look at the models anew after other nodes have come or gone."""
        for model in self._fleet.models():
            self._note_model(model)

    def _note_model(self, model: str) -> None:
        is_here = model in self._fleet.models()
        if self._fleet.is_lost(model) if is_here else self._outlet.is_elsewhere(model):
            self._post(events.ModelLost(model=model, is_elsewhere=self._outlet.is_elsewhere(model)))
        else:
            self._post(events.ModelRegained(model=model))

    async def _end_deferral(self, deferral: events.DeferTurn) -> None:
        await anyio.sleep(deferral.seconds)
        self._post(events.DeferralOver(key=deferral.key))

    async def _end_hold(self, hold: events.HoldSlot) -> None:
        await anyio.sleep(hold.seconds)
        self._post(events.HoldOver(key=hold.key, seconds=hold.seconds))

    def _start_soon(self, what: Callable[[*Args], Coroutine[object, object, None]], *args: *Args) -> None:
        if self._tasks is None:
            raise RuntimeError("the scheduler does not run")
        self._tasks.start_soon(what, *args)

    def _worker_changed(self, worker: SupervisedWorker) -> None:
        spec = worker.spec
        if worker.now.state is WorkerState.READY:
            self._post(
                events.WorkerReady(
                    worker=spec.id,
                    model=spec.name,
                    slots=worker.slots.total,
                    read_s=worker.requests.latency.pace.prefill_s,
                    kv_tokens=worker.kv.budget,
                    kv_block=worker.kv.block,
                    most_answer=spec.most_answer,
                    shares_prefixes=spec.engine is EngineKind.VLLM,
                    has_slot_caches=spec.engine in {EngineKind.LLAMA_SERVER, EngineKind.EMBEDDED},
                )
            )
        else:
            self._post(events.WorkerNotReady(worker=spec.id, returns=worker.now.is_coming))
            if worker.now.is_down:
                self._take_findings(self._blame.note_gone(spec.name, spec.id, worker.now.incarnation, time.monotonic()))
            self._note_model(spec.name)

    def _take_findings(self, findings: Sequence[Finding]) -> None:
        if findings:
            self._post(*self._findings.apply_findings(findings))

    def _take_ends(self, ended: Sequence[Ended]) -> None:
        """Apply all attempts that ended at one moment, before the next turn starts."""
        ends: list[End] = []
        # Who gave way is ready again at once: the core is to know what it takes, and what the others have grown to.
        uses = self._kv_uses.read_changes() if any(outcome == GAVE_WAY for _, outcome in ended) else {}
        for turn, outcome in sorted(ended, key=self._place_of_end):
            self._work(turn.key.job_id).note_off_slot(turn.key)
            ends.append(self._turn_endings.take_end(turn, outcome))
            if isinstance(outcome, Completed):
                self._findings.note_answer(turn.attempt.worker)
        if self._is_forgetting:
            for turn, outcome in ended:
                self._turn_endings.refuse_late(turn, outcome)
        else:
            found = self._findings.apply_findings(finding for end in ends for finding in end.findings)
            told = [events.KvUseTold(uses=uses)] if uses else []
            is_counted = self._core.view.is_on_trial
            spent = [each.attempt.spent(each.key) for each, _ in ended if self._is_fair or is_counted(each.key)]
            facts = [fact for end in ends for fact in end.records]
            self._post(*told, *spent, *(end.event for end in ends), *found, made=facts)
        if not self._any_on_slot:
            self._idle.notify()

    def _place_of_end(self, ended: Ended) -> tuple[float, tuple[JobId, str, int]]:
        """Return the order in which ends are taken: of those whose engine died, the newest is suspected most."""
        turn, outcome = ended
        is_death = isinstance(outcome, EngineFailed) and outcome.brought_down
        newest = -turn.attempt.answer.started_at if is_death else float("-inf")
        return newest, self._place(turn.key)

    def _place(self, key: TurnKey) -> tuple[JobId, str, int]:
        return key.job_id, key.conversation_id, self._work(key.job_id).place_of(key)


def _as_own(piece: Piece) -> Iterator[Turn]:
    """Yield the inherited turns of a piece as those of its conversations."""
    for name, turns in piece.inherited.items():
        for turn in turns:
            yield as_inherited(turn, piece.job.id, name)
