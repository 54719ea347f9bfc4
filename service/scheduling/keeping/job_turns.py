"""The turns of jobs, which are stored: a ``Work`` with prompts, transcripts and records."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import assert_never

from msgspec.structs import replace
from typing_extensions import override

from service.conversations.job.job import Agent, JobId, PromptAt, TurnKey
from service.conversations.job.states import ConversationState, TurnState
from service.conversations.job.until import NOTHING, TurnDigest
from service.conversations.record.awaited_turn import await_agent
from service.conversations.record.transcript import Turn
from service.scheduling.admission import Piece
from service.scheduling.asking.composed import AskingSurroundings
from service.scheduling.asking.lent_slots import LentSlots, Post
from service.scheduling.asking.prompts import JobPrompts
from service.scheduling.attempt import RunningAttempt
from service.scheduling.core import events
from service.scheduling.core.blame import Blame
from service.scheduling.keeping.token_keeper import TokenKeeper
from service.scheduling.keeping.turn import JobTurn, TurnSurroundings
from service.scheduling.keeping.turns import Turns
from service.scheduling.recovery import SET_ASIDE, Recovered
from service.scheduling.work import RunCounters, SchedulerStore, Work
from service.store import records
from service.store.records import Record
from workers.fleet import Fleet
from workers.outcome import CancelReason, FailureReason
from workers.requests.bios_words import BiosPolicy
from workers.supervised import SupervisedWorker

Conversation = events.ConversationStarted | events.ConversationEnded


class JobTurns(Work):
    """The turns of unfinished jobs; written by the scheduler alone. ``prompts`` holds the jobs.

    ``released`` holds the conversations left to other nodes, with the models that they need next. ``post`` reports
    turns whose tools run to the core, which may lend their slots. With ``has_several_keys`` prompt caches are separate
    by key. ``tokens`` packs recorded tokens.
    """

    def __init__(
        self,
        blame: Blame,
        outlet: SchedulerStore,
        counters: RunCounters,
        fleet: Fleet,
        post: Post,
        has_several_keys: Callable[[], bool] = lambda: False,
    ) -> None:
        self.prompts: dict[JobId, JobPrompts] = {}
        self.turns = Turns()
        self.released: list[events.ConversationReleased] = []
        self._blame = blame
        self.tokens = TokenKeeper()
        self._slots = LentSlots(fleet, post)
        self._around = TurnSurroundings(
            jobs=self.prompts,
            note_end=self._note_end,
            counters=counters,
            asking=AskingSurroundings(outlet=outlet, slots=self._slots, has_several_keys=has_several_keys),
            tokens=self.tokens,
        )

    def __repr__(self) -> str:
        return f"<JobTurns jobs={len(self.prompts)} {self.turns!r}>"

    def restore(self, piece: Piece, recovered: Recovered) -> JobPrompts:
        """Restore conversations of a job from their records; return the job's prompts."""
        job = piece.job
        live = self.prompts.get(job.id)
        if live is None:
            live = self.prompts[job.id] = JobPrompts(job)
        else:
            live.talks.extend(job.conversations)
        live.resume_words(piece.words)
        live.memories.resume(piece.cuts)
        live.overruns.resume((each.path, each.pattern) for each in piece.given_up)
        live.hear_again(recovered.spoken, recovered.unfinished)
        self.turns.restore(recovered.unfinished)
        return live

    def set_aside(self, key: TurnKey) -> records.TurnEnded:
        """Fail a turn during which the service itself crashed repeatedly."""
        agent = self.agent_of(key)
        turn = self.turns.end_waiting(key, agent, TurnState.FAILED, FailureReason.POISONED, SET_ASIDE)
        if turn.leaves:
            self.prompts[key.job_id].hear_leave(key)
        return records.TurnEnded(
            turn=turn, at=datetime.now(UTC), model=agent.model, waited_for=agent.waits_for, readers=agent.visible_to
        )

    @property
    @override
    def any_on_slot(self) -> bool:
        return self.turns.any_in_flight

    @override
    def on_slots(self) -> list[JobTurn]:
        return self.turns.in_flight()

    @override
    def name_of(self, job_id: JobId) -> str:
        return self.prompts[job_id].job.name

    def owner_of(self, job_id: JobId) -> str | None:
        """Return the name of the key that posted a job."""
        return self.prompts[job_id].job.owner

    @override
    def agent_of(self, key: TurnKey) -> Agent:
        return self.prompts[key.job_id].casts[key.conversation_id][key.agent_id]

    @override
    def place_of(self, key: TurnKey) -> int:
        return self.prompts[key.job_id].places[key.agent_id]

    @override
    def note_ready(self, key: TurnKey, now: datetime) -> Sequence[Record]:
        if not self.turns.note_ready(key, now):
            return []
        live = self.prompts[key.job_id]
        if live.job.prompt_at is PromptAt.QUEUE:
            live.discussion(key.conversation_id).make_prompt_once(key.agent_id, key.round)
        model = self.agent_of(key).model
        return [records.TurnMoved(key=key, state=TurnState.READY, worker=None, at=now, model=model)]

    def await_turn(self, key: TurnKey, now: datetime) -> Sequence[Record]:
        """Let a turn wait for its caller; the first one begins its conversation."""
        live, agent = self.prompts[key.job_id], self.agent_of(key)
        if live.job.prompt_at is PromptAt.QUEUE:
            live.discussion(key.conversation_id).make_prompt_once(key.agent_id, key.round)
        demand = await_agent(agent, live.conversations[key.conversation_id].until)
        moved = records.TurnMoved(key=key, state=TurnState.AWAITED, worker=None, at=now, demand=demand)
        words = live.begin_words(key.conversation_id, now.astimezone())
        if words is None and live.conversations[key.conversation_id].heritage.source is None:
            return [moved]
        # An heir has the words of its source before it begins. A second begin changes nothing.
        begun = events.ConversationStarted(job_id=key.job_id, conversation_id=key.conversation_id)
        facts: list[Record] = [_moved(begun, ConversationState.RUNNING, None, now)]
        if words is not None:
            facts.append(
                records.ConversationWorded(job_id=key.job_id, conversation_id=key.conversation_id, words=words)
            )
        return [*facts, moved]

    def hear_caller(self, turn: Turn) -> TurnDigest:
        """Record a turn that its caller has spoken or missed; return its digest."""
        live = self.prompts[turn.key.job_id]
        if turn.is_heard:
            words = None if turn.leaves else turn.text
            live.discussion(turn.key.conversation_id).add(turn.key.agent_id, turn.key.round, words)
            if live.memories.are_any:
                live.memories.note_size(turn)
        return live.digests([turn]).get(turn.key, NOTHING)

    @override
    def begin_attempt(self, key: TurnKey, worker: SupervisedWorker, now: datetime) -> tuple[JobTurn, Sequence[Record]]:
        turn = self.turns.begin_attempt(key, RunningAttempt(worker.spec.id, worker.now.incarnation), self._around)
        moved = records.TurnMoved(
            key=key,
            state=TurnState.IN_FLIGHT,
            worker=worker.spec.id,
            at=now,
            model=self.agent_of(key).model,
            waited_s=max(0.0, (now - turn.ready_at).total_seconds()),
        )
        return turn, [*self._choose_words(key, worker.spec.bios, now), moved]

    def _choose_words(self, key: TurnKey, policy: BiosPolicy, now: datetime) -> list[Record]:
        words = self.prompts[key.job_id].choose_words(key, policy, now.astimezone())
        if words is None:
            return []
        return [records.ConversationWorded(job_id=key.job_id, conversation_id=key.conversation_id, words=words)]

    def act(self, action: events.OfSlot, start_soon: Callable[..., None]) -> None:
        """Carry out a decision about a slot whose turn's tools run."""
        self._slots.act(action, start_soon)

    @override
    def cut_off_attempt(self, key: TurnKey) -> None:
        self.turns.cut_off_attempt(key)

    def interrupt_all(self, why: CancelReason) -> None:
        """End all running attempts; their turns are ready again, without charges."""
        self.turns.interrupt_all(why)

    @override
    def abandon(self, key: TurnKey, detail: str) -> Sequence[Record]:
        agent = self.agent_of(key)
        turn = self.turns.end_waiting(key, agent, TurnState.FAILED, FailureReason.ENGINE_UNREACHABLE, detail)
        self._blame.forget([key])
        self._note_end(turn)
        return [records.TurnEnded(turn=turn, at=datetime.now(UTC), model=agent.model)]

    def _note_end(self, turn: Turn) -> None:
        if turn.leaves:
            self.prompts[turn.key.job_id].hear_leave(turn.key)
        self.turns.note_end(turn)

    @override
    def note_off_slot(self, key: TurnKey) -> None:
        self.turns.note_off_slot(key)

    @override
    def clear_charges(self, keys: Iterable[TurnKey]) -> None:
        self.turns.clear_charges(keys)

    @override
    def move(self, action: events.Move, now: datetime) -> Iterable[Record]:
        match action:
            case events.ConversationStarted():
                return [_moved(action, ConversationState.RUNNING, None, now)]
            case events.ConversationEnded():
                self._blame.forget(action.unspoken)
                self.prompts[action.job_id].forget(action.conversation_id)
                # Read it now: the job may have ended when the facts are written.
                live = self.prompts[action.job_id]
                most = live.job.most_turns(live.conversations[action.conversation_id]) if action.absent else None
                return self._end_conversation(action, live.casts[action.conversation_id], most, now)
            case events.ConversationReleased():
                self.prompts[action.job_id].forget(action.conversation_id)
                self._blame.forget(self.turns.forget_conversation(action.job_id, action.conversation_id))
                self.released.append(action)
            case events.JobEnded():
                del self.prompts[action.job_id]
                self._blame.forget_job(action.job_id)
            case _:
                assert_never(action)
        return []

    def _end_conversation(
        self, ended: events.ConversationEnded, agents: Mapping[str, Agent], most: int | None, now: datetime
    ) -> Iterator[Record]:
        for key in ended.unspoken:
            agent = agents[key.agent_id]
            turn = self.turns.end_waiting(key, agent, TurnState.CANCELLED, FailureReason.CANCELLED)
            yield records.TurnEnded(turn=turn, at=now, model=agent.model)
        yield replace(_moved(ended, ended.state, ended.reason, now), ending=ended.ending, most=most)

    def clear(self) -> None:
        """Forget everything; no turn is in flight."""
        self.prompts.clear()
        self.released.clear()
        self.turns.clear()


def _moved(
    action: Conversation, state: ConversationState, reason: str | None, at: datetime
) -> records.ConversationMoved:
    return records.ConversationMoved(
        job_id=action.job_id, conversation_id=action.conversation_id, state=state, reason=reason, at=at
    )
