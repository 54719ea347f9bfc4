"""Acts out what the scheduling core decides: takes slots, runs turns, and tells the store what became of them.

Every event is handled at once and without waiting, so the core's state and the slots change together. Slots are given
back before anything is written, and nothing here waits for the store.
"""

import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from typing import TypeVarTuple, assert_never

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup, TaskStatus

from service.conversations.job import Agent, Job, JobId, PromptAt, TurnKey
from service.conversations.states import ENDED_CONVERSATIONS as ENDED_TALKS
from service.conversations.states import ConversationState, JobState, TurnState
from service.conversations.transcript import Turn, UnfinishedTurn
from service.scheduling import events
from service.scheduling.core import SchedulingCore
from service.scheduling.life import LifeCounts
from service.scheduling.policies import PolicyFactory
from service.scheduling.prompts import JobPrompts
from service.scheduling.retry import Suspicion, strike
from service.scheduling.turn import Progress, TurnRun
from service.scheduling.turns import Turns
from service.store import records
from service.store.records import Record
from workers.fleet import Fleet
from workers.outcome import Cancelled, CancelReason, Completed, EngineFailed, FailureReason, Outcome, RequestFailed
from workers.slots import Lease
from workers.states import WorkerState
from workers.supervised import SupervisedWorker

_End = tuple[events.Event, Record]  # what the core is told of the end of an attempt, and the store
Args = TypeVarTuple("Args")
logger = logging.getLogger(__name__)


class Scheduler:
    """Puts the turns of all jobs on the slots of all workers.

    ``run`` must be running; it owns the tasks of the turns. ``append`` takes the facts for the store, in order,
    and what to call when they are durable.
    """

    def __init__(
        self,
        policy: PolicyFactory,
        fleet: Fleet,
        append: Callable[[Sequence[Record], Callable[[], None]], None],
    ) -> None:
        self._core = SchedulingCore(policy)
        self._fleet = fleet
        self._append = append
        self._tasks: TaskGroup | None = None
        self._jobs: dict[JobId, JobPrompts] = {}
        self._turns = Turns()
        self._landed: list[tuple[TurnRun, Outcome]] = []
        self._is_closing = False
        self.life = LifeCounts()
        self._suspicion = Suspicion()
        self._idle = anyio.Event()
        fleet.subscribe(self._worker_changed)

    def __repr__(self) -> str:
        """State the pools."""
        return f"<Scheduler {self._core!r}>"

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run turns until cancelled."""
        async with anyio.create_task_group() as self._tasks:
            task_status.started()
            await anyio.sleep_forever()

    # Jobs

    def admit(
        self,
        job: Job,
        ended: Sequence[Turn] = (),
        unfinished: Sequence[UnfinishedTurn] = (),
        *,
        is_cancelled: bool = False,
    ) -> None:
        """Take a job that is stored; the rest is what an earlier life of the service has recorded of it."""
        if job.id in self._jobs:
            return
        live = self._jobs[job.id] = JobPrompts(job)
        self.life.conversations += len(job.conversations)
        live.hear_again(turn for turn in ended if turn.state is TurnState.COMPLETED)
        known = {turn.key: (turn.state, turn.reason) for turn in ended}
        left = {turn.key: turn for turn in unfinished if turn.key not in known}
        self._turns.resume(left.values())
        suspects = frozenset(key for key, turn in left.items() if turn.deaths)
        self._post(events.JobAdmitted(job=job, ended=known, suspects=suspects, is_cancelled=is_cancelled))

    def cancel(self, job_id: JobId) -> None:
        """End a job: what waits is dropped, what runs is cut off."""
        self._post(events.JobCancelled(job_id=job_id))

    def free(self, model: str) -> int:
        """Count the slots of a model that nobody has and nobody waits for."""
        return self._core.free(model)

    # Looking

    @property
    def live_jobs(self) -> int:
        """How many jobs have not ended."""
        return len(self._jobs)

    def pools(self) -> Mapping[TurnState, int]:
        """Count the turns that are pending, ready and in flight, of all jobs."""
        return self._core.pools()

    @property
    def is_closing(self) -> bool:
        """Whether nothing more is started."""
        return self._is_closing

    def ready_heads(self, count: int) -> list[tuple[TurnKey, bool]]:
        """Return the ready turns that go next, and whether each is a suspect of an engine's death."""
        return self._core.ready_heads(count)

    def held_for(self, key: TurnKey) -> str | None:
        """Return the worker that a ready turn waits for though another has a free slot."""
        return self._core.held_for(key)

    def pending_heads(self, count: int) -> list[tuple[TurnKey, tuple[str, ...], int]]:
        """Return turns that wait for others to speak, for whom, and in which round."""
        return self._core.pending_heads(count)

    def job_name(self, job_id: JobId) -> str:
        """Return the caller's name of a job that has not ended."""
        return self._jobs[job_id].job.name

    def model_of(self, key: TurnKey) -> str:
        """Return the model that a turn is asked of."""
        return self._jobs[key.job_id].agents[key.agent_id].model

    def counts(self, job_id: JobId) -> Mapping[TurnState, int]:
        """Count the turns of a job that are ready and in flight."""
        return self._core.counts(job_id)

    def turns_in_flight(self, job_id: JobId, conversation_id: str) -> list[Turn]:
        """Return the turns of a conversation that are or were on slots, with what they have said so far."""
        return self._turns.of_conversation(job_id, conversation_id)

    def progress(self, job_id: JobId) -> list[Progress]:
        """Return how far each turn of a job that is on a slot is."""
        return self._turns.progress(job_id)

    # Ending

    def close_nowait(self) -> None:
        """Start nothing more; turns in flight go on."""
        self._is_closing = True
        self._post(events.Closing())

    async def wait_idle(self) -> None:
        """Return when nothing is in flight; call it after ``close_nowait``."""
        while self._turns.any_in_flight:
            await self._idle.wait()

    # Acting

    def _post(self, *events_: events.Event, told: Sequence[Record] = ()) -> None:
        """Handle what happened at one moment; the only writer of the core and of the pools. Nothing here waits."""
        facts = list(told)
        for action in self._core.handle(*events_):
            facts += self._act(action)
        if facts:
            ended = [fact.turn.key for fact in facts if isinstance(fact, records.TurnEnded)]
            talks = sum(isinstance(fact, records.ConversationMoved) and fact.state in ENDED_TALKS for fact in facts)
            self.life.finished += talks
            self._append(facts, lambda: self._forget_stored(ended, talks))

    def _act(self, action: events.Action) -> list[Record]:
        """Carry out one action; return the facts that it makes."""
        now = datetime.now(UTC)
        facts: list[Record] = []
        match action:
            case events.TurnIsReady():
                facts += self._note_ready(action.key, now)
            case events.StartTurn():
                facts += self._start(action, now)
            case events.HoldTurn():
                self._start_soon(self._end_hold, action)
            case events.AbandonTurn():
                facts.append(self._abandon(action.key, now))
            case events.CutOffTurn():
                self._turns.cut_off(action.key)
            case _:
                facts += self._move(action, now)
        return facts

    def _move(self, action: events.Progress, now: datetime) -> list[Record]:
        """Note how far a conversation or a job has come."""
        match action:
            case events.ConversationStarted():
                return [_conversation(action, ConversationState.RUNNING, None, now)]
            case events.ConversationEnded():
                dropped = [self._drop(key, now) for key in action.unspoken]
                self._jobs[action.job_id].forget(action.conversation_id)
                return [*dropped, _conversation(action, action.state, action.reason, now)]
            case events.JobStarted():
                return [records.JobMoved(job_id=action.job_id, state=JobState.RUNNING, at=now)]
            case events.JobEnded():
                del self._jobs[action.job_id]
                return [records.JobMoved(job_id=action.job_id, state=action.state, at=now)]
            case _:
                assert_never(action)

    def _forget_stored(self, keys: Sequence[TurnKey], talks: int) -> None:
        self.life.persisted += talks
        self._turns.forget_stored(keys)

    def _note_ready(self, key: TurnKey, now: datetime) -> list[Record]:
        if not self._turns.note_ready(key, now):
            return []
        live = self._jobs[key.job_id]
        if live.job.prompt_at is PromptAt.QUEUE:
            live.discussion(key.conversation_id).make_prompt_once(key.agent_id, key.round)
        return [records.TurnMoved(key=key, state=TurnState.READY, worker=None, at=now)]

    def _start(self, action: events.StartTurn, now: datetime) -> list[Record]:
        worker = self._fleet.get(action.worker)
        if worker is None:
            raise RuntimeError(f"{action} cannot be carried out")
        if action.is_suspect:
            self._suspicion.board(worker.spec.id, worker.incarnation, action.key)
        lease = worker.lease_nowait()  # the core counts the slots of ready workers as the workers do
        self._turns.begin(action.key, self._jobs[action.key.job_id].agents[action.key.agent_id])
        self._start_soon(self._run_turn, action.key, worker, lease)
        return [records.TurnMoved(key=action.key, state=TurnState.IN_FLIGHT, worker=action.worker, at=now)]

    def _abandon(self, key: TurnKey, now: datetime) -> Record:
        """Fail a turn that waits for what cannot come, and say what that is."""
        reason, detail = FailureReason.ENGINE_UNREACHABLE, self._fleet.trouble_of(self.model_of(key))
        turn = self._turns.end_waiting(key, TurnState.FAILED, reason, detail)
        self._turns.keep_unstored(turn)
        return records.TurnEnded(turn=turn, at=now)

    def _drop(self, key: TurnKey, now: datetime) -> Record:
        turn = self._turns.end_waiting(key, TurnState.CANCELLED, FailureReason.CANCELLED)
        return records.TurnEnded(turn=turn, at=now)

    async def _end_hold(self, hold: events.HoldTurn) -> None:
        await anyio.sleep(hold.seconds)
        self._post(events.HoldOver(key=hold.key))

    def _start_soon(self, what: Callable[[*Args], Coroutine[object, object, None]], *args: *Args) -> None:
        if self._tasks is None:
            raise RuntimeError("the scheduler does not run")
        self._tasks.start_soon(what, *args)

    def _worker_changed(self, worker: SupervisedWorker) -> None:
        if worker.state is WorkerState.READY:
            spec = worker.spec
            self._post(events.WorkerReady(worker=spec.id, model=spec.name, slots=worker.slots))
        else:
            self._post(events.WorkerNotReady(worker=worker.spec.id))
            model = worker.spec.name
            is_lost = self._fleet.is_lost(model)
            self._post(events.ModelLost(model=model) if is_lost else events.ModelRegained(model=model))

    # Turns

    async def _run_turn(self, key: TurnKey, worker: SupervisedWorker, lease: Lease) -> None:
        run = self._turns.run(key)
        answer, scope = run.begin_attempt(worker.spec.id, worker.incarnation)
        outcome: Outcome
        try:
            with lease, scope:
                request = self._jobs[key.job_id].request(key, run.rejected)
                run.flight = worker.prepare(request, answer)
                outcome = await worker.perform(request, answer, run.flight)
            if scope.cancelled_caught:
                outcome = Cancelled(reason=CancelReason.CONVERSATION_ENDED)
        except Exception as error:
            logger.exception("turn %s: a defect of Roundhouse", key)
            outcome = RequestFailed(reason=FailureReason.INTERNAL, detail=f"{type(error).__name__}: {error}")
        self._landed.append((run, outcome))
        if len(self._landed) == 1:  # whatever else ends at this moment is applied with it, before the next start
            await anyio.lowlevel.cancel_shielded_checkpoint()
            self._land_all()

    def _land_all(self) -> None:
        landed, self._landed = self._landed, []
        ends: list[_End] = []
        for run, outcome in sorted(landed, key=lambda each: self._place(each[0].key)):
            self._turns.land(run.key)
            if not (isinstance(outcome, Cancelled) and outcome.reason is CancelReason.SHUTDOWN):
                ends.append(self._land(run, outcome))
            # else the turn stays as it is stored: the next life of the service runs it
        self._post(*(event for event, _ in ends), told=[record for _, record in ends])
        self._tell_idle()

    def _place(self, key: TurnKey) -> tuple[JobId, str, int]:
        return key.job_id, key.conversation_id, self._jobs[key.job_id].places[key.agent_id]

    def _land(self, run: TurnRun, outcome: Outcome) -> "_End":
        """Take the end of an attempt: state first, records with it, before anything is awaited."""
        run.end_attempt(outcome)
        key = run.key
        if not (isinstance(outcome, EngineFailed) and outcome.brought_down):
            self._suspicion.leave(key)  # after a death it stays, for the neighbours that land after it
        match outcome:
            case Completed():
                agent = self._jobs[key.job_id].agents[key.agent_id]
                fault = run.take_answer()
                if fault is not None:
                    return self._reject(run, agent, fault)
                self._jobs[key.job_id].discussion(key.conversation_id).add(key.agent_id, key.round, run.said.words)
                completed = events.TurnCompleted(key=key, seconds=run.seconds, reading=run.reading)
                return self._finish(run, completed, TurnState.COMPLETED)
            case Cancelled():
                return self._finish(run, events.TurnCutOff(key=key), TurnState.CANCELLED, FailureReason.CANCELLED)
            case RequestFailed():
                failed = events.TurnFailed(key=key, reason=outcome.reason)
                return self._finish(run, failed, TurnState.FAILED, outcome.reason, outcome.detail)
            case EngineFailed():
                return self._interrupt(run, outcome)
            case _:
                assert_never(outcome)

    def _reject(self, run: TurnRun, agent: Agent, fault: str) -> "_End":
        """Ask again for an answer that is not valid, unless that was done often enough."""
        key, last = run.key, run.attempts[-1]
        reason = FailureReason.VALIDATION_EXHAUSTED
        if agent.validation is not None and run.rejections <= agent.validation.retries:
            told = records.TurnRequeued(
                key=key, so_far=run.so_far, worker=last.worker, reason=reason, detail=fault, at=datetime.now(UTC)
            )
            return events.TurnRejected(key=key, is_suspect=run.strikes.deaths > 0), told
        failed = events.TurnFailed(key=key, reason=reason)
        return self._finish(run, failed, TurnState.FAILED, reason, f"the last of {run.rejections} answers: {fault}")

    def _interrupt(self, run: TurnRun, failed: EngineFailed) -> "_End":
        """Run a turn again whose engine has failed, unless that was once too often."""
        key, last = run.key, run.attempts[-1]
        is_other = self._suspicion.falls_on_another(last.worker, last.incarnation, key)
        run.strikes, reason = strike(run.strikes, failed, has_other_suspect=is_other)
        if reason is not None:
            ended = events.TurnFailed(key=key, reason=reason)
            return self._finish(run, ended, TurnState.FAILED, reason, failed.detail)
        logger.warning("turn %s: %s: %s; it runs again", key, failed.reason, failed.detail)
        told = records.TurnRequeued(
            key=key,
            so_far=run.so_far,
            worker=last.worker,
            reason=failed.reason,
            detail=failed.detail,
            at=datetime.now(UTC),
        )
        return events.TurnInterrupted(key=key, is_suspect=run.strikes.deaths > 0), told

    def _finish(
        self, run: TurnRun, event: events.Event, state: TurnState, reason: str | None = None, detail: str | None = None
    ) -> "_End":
        key = run.key
        turn = self._turns.finish(key, state, reason, detail)
        if state is TurnState.COMPLETED:
            reusable, reused = self._jobs[key.job_id].compare_cache(turn)
            self.life.reusable_tokens += reusable
            self.life.reused_tokens += reused
        return event, records.TurnEnded(turn=turn, at=datetime.now(UTC))

    def _tell_idle(self) -> None:
        if not self._turns.any_in_flight:
            self._idle.set()
            self._idle = anyio.Event()


def _conversation(
    action: events.ConversationStarted | events.ConversationEnded,
    state: ConversationState,
    reason: str | None,
    at: datetime,
) -> Record:
    return records.ConversationMoved(
        job_id=action.job_id, conversation_id=action.conversation_id, state=state, reason=reason, at=at
    )
