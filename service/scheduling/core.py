"""The decisions of the scheduler: events in, actions out. Pure: no clock, no I/O, no task.

The caller hands in one event at a time and carries out the actions in their order. A turn is in exactly one of three
pools, and is started at most once until its end, in whatever way, has been told.
"""

from collections.abc import Iterator, Mapping

from service.conversations.job import Conversation, Job, JobId, TurnKey
from service.conversations.states import ConversationState, TurnState, job_state_after
from service.scheduling.events import (
    Action,
    Closing,
    ConversationEnded,
    ConversationStarted,
    CutOffTurn,
    Event,
    JobAdmitted,
    JobCancelled,
    JobEnded,
    JobStarted,
    StartTurn,
    TurnCompleted,
    TurnCutOff,
    TurnFailed,
    TurnInterrupted,
    TurnIsReady,
    WorkerNotReady,
    WorkerReady,
)
from service.scheduling.policy import Candidate, Policy
from service.scheduling.pools import ReadyPool, Seats


class _Talk:
    """One conversation that has not ended."""

    def __init__(self, job: Job, conversation: Conversation, order: int) -> None:
        self.job = job
        self.conversation = conversation
        self.order = order
        self.round = 0
        self.spoken: set[str] = set()  # of this round
        self.ended: set[TurnKey] = set()
        self.pending: set[str] = set()  # agents of this round that wait for others
        self.is_started = False
        self.ending: tuple[ConversationState, str | None] | None = None

    def key(self, agent_id: str, round_number: int) -> TurnKey:
        return TurnKey(self.job.id, self.conversation.id, agent_id, round_number)

    def all_turns(self) -> Iterator[TurnKey]:
        """Iterate over all turns of the conversation."""
        for number in range(self.conversation.rounds):
            for agent in self.job.agents:
                yield self.key(agent.id, number)


class _LiveJob:
    """One job that has not ended."""

    def __init__(self) -> None:
        self.talks: dict[str, _Talk] = {}
        self.endings: set[ConversationState] = set()
        self.is_started = False
        self.is_cancelled = False


class SchedulingCore:
    """Which turn runs where, of all jobs that have not ended."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._ready = ReadyPool()
        self._suspects = ReadyPool()  # ready turns, each of which may have brought down an engine
        self._seats = Seats()
        self._jobs: dict[JobId, _LiveJob] = {}
        self._retried: set[TurnKey] = set()
        self._orders = 0
        self._is_closing = False

    def __repr__(self) -> str:
        """State the pools."""
        ready = len(self._ready) + len(self._suspects)
        return f"<SchedulingCore jobs={len(self._jobs)} ready={ready} in_flight={len(self._seats)}>"

    def handle(self, event: Event) -> list[Action]:
        """Return what follows from ``event``."""
        actions = list(self._apply(event))
        actions += self._dispatch()
        return actions

    def counts(self, job_id: JobId) -> dict[TurnState, int]:
        """Count the turns of one job that are ready and in flight."""
        return {
            TurnState.READY: self._ready.by_job[job_id] + self._suspects.by_job[job_id],
            TurnState.IN_FLIGHT: self._seats.by_job[job_id],
        }

    def free(self, model: str) -> int:
        """Count the slots of a model that nobody has and nobody waits for."""
        waiting = self._ready.count(model) + self._suspects.count(model)
        return 0 if self._is_closing else max(0, self._seats.free(model) - waiting)

    def _apply(self, event: Event) -> Iterator[Action]:
        match event:
            case JobAdmitted():
                yield from self._admit(event)
            case JobCancelled():
                yield from self._cancel(event.job_id)
            case WorkerReady():
                self._seats.open(event.worker, event.model, event.slots)
            case WorkerNotReady():
                self._seats.close(event.worker)
            case Closing():
                self._is_closing = True
            case TurnCompleted() | TurnInterrupted() | TurnFailed() | TurnCutOff():
                if self._seats.rise(event.key):
                    yield from self._land(event)

    # Jobs

    def _admit(self, event: JobAdmitted) -> Iterator[Action]:
        live = _LiveJob()
        live.is_cancelled = event.is_cancelled
        self._jobs[event.job.id] = live
        for conversation in event.job.conversations:
            self._orders += 1
            live.talks[conversation.id] = _Talk(event.job, conversation, self._orders)
        for talk in list(live.talks.values()):
            yield from self._resume(talk, event.ended)

    def _resume(self, talk: _Talk, ended: Mapping[TurnKey, tuple[TurnState, str | None]]) -> Iterator[Action]:
        for key in talk.all_turns() if ended else ():
            if key not in ended:
                continue
            talk.ended.add(key)
            state, reason = ended[key]
            if state is TurnState.FAILED:  # its neighbours were cut off because of it, whichever was stored first
                talk.ending = (ConversationState.FAILED, reason)
            elif state is TurnState.CANCELLED and talk.ending is None:
                talk.ending = (ConversationState.CANCELLED, reason)
        live = self._jobs[talk.job.id]
        talk.is_started = bool(talk.ended)
        live.is_started |= talk.is_started
        if live.is_cancelled and len(talk.ended) < len(talk.job.agents) * talk.conversation.rounds:
            talk.ending = talk.ending or (ConversationState.CANCELLED, "cancelled")
        if talk.ending is not None:
            yield from self._settle(talk)
            return
        agents = {agent.id for agent in talk.job.agents}
        while talk.round < talk.conversation.rounds:
            talk.spoken = {agent for agent in agents if talk.key(agent, talk.round) in talk.ended}
            if talk.spoken != agents:
                break
            talk.round += 1
        yield from self._open_round(talk)

    def _cancel(self, job_id: JobId) -> Iterator[Action]:
        live = self._jobs.get(job_id)
        if live is None or live.is_cancelled:
            return
        live.is_cancelled = True
        for talk in list(live.talks.values()):
            yield from self._end(talk, ConversationState.CANCELLED, "cancelled")

    # Conversations

    def _open_round(self, talk: _Talk) -> Iterator[Action]:
        if talk.round == talk.conversation.rounds:
            talk.ending = (ConversationState.COMPLETED, None)
            yield from self._settle(talk)
            return
        talk.pending = {agent.id for agent in talk.job.agents} - talk.spoken
        yield from self._release(talk)

    def _release(self, talk: _Talk) -> Iterator[Action]:
        """Make ready whoever waits for nobody any more."""
        for number, agent in enumerate(talk.job.agents):
            if agent.id in talk.pending and agent.waits_for <= talk.spoken:
                talk.pending.discard(agent.id)
                yield self._make_ready(talk, talk.key(agent.id, talk.round), number, self._ready)

    def _make_ready(self, talk: _Talk, key: TurnKey, agent_order: int, pool: ReadyPool) -> Action:
        self._orders += 1
        candidate = Candidate(
            job_priority=talk.job.priority,
            is_retry=key in self._retried,
            rounds_completed=talk.round,
            conversation_order=talk.order,
            round=key.round,
            agent_order=agent_order,
            ready_order=self._orders,
        )
        pool.push(key, talk.job.agents[agent_order].model, self._policy(candidate))
        return TurnIsReady(key=key)

    def _end(self, talk: _Talk, state: ConversationState, reason: str | None) -> Iterator[Action]:
        """End a conversation early: drop what waits, cut off what runs."""
        if talk.ending is not None:
            return
        talk.ending = (state, reason)
        talk.pending.clear()
        for agent in talk.job.agents:
            key = talk.key(agent.id, talk.round)
            self._ready.discard(key)
            self._suspects.discard(key)
            if key in self._seats:
                yield CutOffTurn(key=key)
        yield from self._settle(talk)

    def _settle(self, talk: _Talk) -> Iterator[Action]:
        """Finish a conversation that is to end, once nothing of it is in flight."""
        if talk.ending is None or any(talk.key(agent.id, talk.round) in self._seats for agent in talk.job.agents):
            return
        state, reason = talk.ending
        job_id = talk.job.id
        live = self._jobs[job_id]
        del live.talks[talk.conversation.id]
        live.endings.add(state)
        unspoken = tuple(key for key in talk.all_turns() if key not in talk.ended)
        yield ConversationEnded(
            job_id=job_id, conversation_id=talk.conversation.id, state=state, reason=reason, unspoken=unspoken
        )
        if not live.talks:
            del self._jobs[job_id]
            state_of_job = job_state_after(frozenset(live.endings), was_cancelled=live.is_cancelled)
            yield JobEnded(job_id=job_id, state=state_of_job)

    # Turns

    def _land(self, event: TurnCompleted | TurnInterrupted | TurnFailed | TurnCutOff) -> Iterator[Action]:
        key = event.key
        talk = self._jobs[key.job_id].talks[key.conversation_id]
        if isinstance(event, TurnInterrupted) and talk.ending is None:
            self._retried.add(key)
            number = [agent.id for agent in talk.job.agents].index(key.agent_id)
            pool = self._suspects if event.is_suspect else self._ready
            yield self._make_ready(talk, key, number, pool)
            return
        self._retried.discard(key)
        if not isinstance(event, TurnInterrupted):
            talk.ended.add(key)
        if isinstance(event, TurnCompleted):
            talk.spoken.add(key.agent_id)
        if talk.ending is not None:
            yield from self._settle(talk)
        elif isinstance(event, TurnFailed):
            yield from self._end(talk, ConversationState.FAILED, event.reason)
        elif len(talk.spoken) == len(talk.job.agents):
            talk.round += 1
            talk.spoken = set()
            yield from self._open_round(talk)
        else:
            yield from self._release(talk)

    def _dispatch(self) -> Iterator[Action]:
        if self._is_closing:
            return
        for model in self._suspects.models():
            while self._suspects.count(model) and (worker := self._seats.best(model, for_suspect=True)) is not None:
                yield from self._start(self._suspects.pop(model), worker, is_suspect=True)
        for model in self._ready.models():
            while self._ready.count(model) and (worker := self._seats.best(model)) is not None:
                yield from self._start(self._ready.pop(model), worker)

    def _start(self, key: TurnKey, worker: str, *, is_suspect: bool = False) -> Iterator[Action]:
        self._seats.seat(key, worker, is_suspect=is_suspect)
        live = self._jobs[key.job_id]
        talk = live.talks[key.conversation_id]
        if not live.is_started:
            live.is_started = True
            yield JobStarted(job_id=key.job_id)
        if not talk.is_started:
            talk.is_started = True
            yield ConversationStarted(job_id=key.job_id, conversation_id=key.conversation_id)
        yield StartTurn(key=key, worker=worker, is_suspect=is_suspect)
