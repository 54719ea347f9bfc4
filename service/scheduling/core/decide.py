"""The decisions of the scheduler: events in, actions out. Pure: no clock, no I/O, no task.

The caller hands in what has happened at one moment and carries out the actions in their order. A turn is in exactly one
of three pools (seed 000): pending with its conversation, ready in the queue of its model, or on a seat; and it is
started at most once until its end, in whatever way, has been told.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Final

from service.conversations.job import Conversation, GroupBy, JobId, TurnKey
from service.conversations.states import ConversationState, TurnState
from service.conversations.turn_order import Place
from service.scheduling.core.backlog import Estimates
from service.scheduling.core.blame.blame import JobDistrusted, JobTrusted, SuspectsCleared, Trial
from service.scheduling.core.dispatch import Dispatcher
from service.scheduling.core.events import (
    AbandonTurn,
    Action,
    ContinueCancel,
    ConversationEnded,
    ConversationReleased,
    CutOffTurn,
    Event,
    HoldOver,
    JobAdmitted,
    JobCancelled,
    JobEnded,
    ModelLost,
    ModelRegained,
    Paused,
    Suspicion,
    TurnCompleted,
    TurnCutOff,
    TurnEvent,
    TurnFailed,
    TurnInterrupted,
    TurnIsReady,
    TurnRejected,
    Unpaused,
    WorkerEvent,
    WorkerNotReady,
    WorkerReady,
)
from service.scheduling.core.in_flight_pool import Seats
from service.scheduling.core.live import LiveJob, Talk
from service.scheduling.core.policies import PolicyFactory
from service.scheduling.core.queue.affinity import Warm
from service.scheduling.core.queue.ready_pool import ReadyPool
from service.scheduling.core.queue.ready_queue import ReadyTurn
from service.scheduling.core.view import PoolsView
from workers.outcome import FailureReason

CANCELLED_AT_ONCE: Final = 1000  # turns: some 10 ms of the event loop


class SchedulingCore:
    """Which turn runs where, of all jobs that have not ended."""

    def __init__(self, policy: PolicyFactory, group_by: GroupBy | None = None) -> None:
        self._ready = ReadyPool(policy, is_grouped=group_by is not None)
        self._group_by = group_by
        self._seats = Seats()
        self._jobs: dict[JobId, LiveJob] = {}
        self._estimates = Estimates()
        self._dispatcher = Dispatcher(self._jobs, self._ready, self._seats)
        self._orders = 0
        self._lost: dict[str, bool] = {}  # models that no turn need wait for, and whether another node has them
        self._is_paused = False
        self.view = PoolsView(self._jobs, self._ready, self._seats, self._lost, group_by)

    def __repr__(self) -> str:
        """State the pools."""
        return f"<SchedulingCore jobs={len(self._jobs)} ready={len(self._ready)} in_flight={len(self._seats)}>"

    def handle(self, *events: Event) -> list[Action]:
        """Return what follows from ``events``; ends at the same moment are all applied before the next start."""
        actions = [action for event in events for action in self._apply(event)]
        actions += self._dispatch()
        return actions

    # Events

    def _apply(self, event: Event) -> Iterator[Action]:
        match event:
            case JobAdmitted():
                yield from self._admit(event)
            case JobCancelled():
                yield from self._cancel(event.job_id)
            case Paused() | Unpaused():
                self._is_paused = isinstance(event, Paused)
            case WorkerReady() | WorkerNotReady() | ModelLost() | ModelRegained():
                self._take_capacity(event)
            case TurnCompleted() | TurnInterrupted() | TurnRejected() | TurnFailed() | TurnCutOff():
                worker = self._seats.rise(event.key)
                if worker is not None:
                    yield from self._land(event, worker)
            case SuspectsCleared() | JobDistrusted() | JobTrusted():
                self._take_finding(event)
            case HoldOver():
                if self._ready.held.worker_of(event.key) is not None:
                    self._ready.unhold(event.key, self._talk(event.key).model(event.key))

    def _take_capacity(self, event: WorkerEvent) -> None:
        match event:
            case WorkerReady():
                self._lost.pop(event.model, None)
                self._seats.open(event.worker, event.model, event.slots)
                self._ready.note_slots(event.model, self._seats.total(event.model))
            case WorkerNotReady():
                model = self._seats.close(event.worker, returns=event.returns)
                if model is not None:
                    self._ready.note_slots(model, self._seats.total(model))
                for turn in self._ready.held.all_for(event.worker):
                    self._ready.unhold(turn.key, self._talk(turn.key).model(turn.key))
            case ModelLost():
                self._lost[event.model] = event.is_elsewhere
            case ModelRegained():
                self._lost.pop(event.model, None)

    def _take_finding(self, event: Suspicion) -> None:
        match event:
            case SuspectsCleared():
                for key in event.keys:
                    live = self._jobs.get(key.job_id)
                    talk = live.talks.get(key.conversation_id) if live else None
                    if talk is not None:
                        self._ready.clear_suspect(key, talk.model(key))
            case JobDistrusted() | JobTrusted():
                if event.job_id in self._jobs:
                    self._jobs[event.job_id].is_distrusted = isinstance(event, JobDistrusted)

    # Jobs

    def _admit(self, event: JobAdmitted) -> Iterator[Action]:
        live = self._jobs.get(event.job.id)
        if live is None:
            live = self._jobs[event.job.id] = LiveJob(event.job, event.suspects, is_cancelled=event.is_cancelled)
        else:
            live.extend(event.job, event.suspects)
        fresh = [self._new_talk(live, conversation) for conversation in event.job.conversations]
        live.talks |= {talk.conversation.id: talk for talk in fresh}
        live.backlog.refresh(self._estimates)
        ended: dict[str, list[TurnKey]] = {}
        for key in event.ended:
            ended.setdefault(key.conversation_id, []).append(key)
        for talk in fresh:
            keys = ended.get(talk.conversation.id, [])
            yield from self._resume(talk, {key: event.ended[key] for key in keys})
        if live.is_cancelled:
            yield from self._cancel(event.job.id)
        if live.talks:
            self._tell_load(live)

    def _new_talk(self, live: LiveJob, conversation: Conversation) -> Talk:
        self._orders += 1
        return Talk(live, conversation, self._orders)

    def _resume(self, talk: Talk, ended: Mapping[TurnKey, tuple[TurnState, str | None]]) -> Iterator[Action]:
        live = talk.live
        spoken: list[Place] = []
        for key, (state, reason) in ended.items():
            talk.end(key)
            if state is TurnState.COMPLETED:
                spoken.append(talk.place(key))
            elif state is TurnState.FAILED:  # its neighbours were cut off because of it, whichever was stored first
                talk.ending = (ConversationState.FAILED, reason)
            elif talk.ending is None:
                talk.ending = (ConversationState.CANCELLED, reason)
        talk.is_started = bool(ended)
        if live.is_cancelled and talk.ending is None and not talk.has_ended_all:
            return  # it is ended with the others, a few at a time
        if talk.ending is not None:
            yield from self._settle(talk)
            return
        yield from self._go_on(talk, talk.order.resume(spoken))

    def _cancel(self, job_id: JobId) -> Iterator[Action]:
        """End a job, or more of it: as much at a time as holds up nobody, what is in flight first."""
        live = self._jobs.get(job_id)
        if live is None:
            return
        if not live.is_cancelled:
            live.is_cancelled = True
            for talk in [live.talks[name] for name in self._seats.talks_of(job_id)]:
                yield from self._end(talk, ConversationState.CANCELLED, "cancelled")
        left = CANCELLED_AT_ONCE
        for talk in list(islice((talk for talk in live.talks.values() if talk.ending is None), left)):
            left -= talk.conversation.rounds * len(live.job.agents)
            yield from self._end(talk, ConversationState.CANCELLED, "cancelled")
            if left <= 0:
                break
        if any(talk.ending is None for talk in live.talks.values()):
            yield ContinueCancel(job_id=job_id)

    def _tell_load(self, live: LiveJob) -> None:
        """Tell the queues what is left of a job."""
        self._ready.note_load(live.job.id, live.backlog)

    # Conversations

    def _go_on(self, talk: Talk, places: Iterable[Place]) -> Iterator[Action]:
        """Make ready whoever may speak now; end a conversation in which nobody has anything left to say."""
        live = talk.live
        if talk.order.is_over:
            talk.ending = (ConversationState.COMPLETED, None)
            yield from self._settle(talk)
            return
        live.backlog.note_rounds(talk.conversation.id, talk.conversation.rounds - talk.order.rounds_completed)
        for place in places:
            yield self._make_ready(talk, place)

    def _make_ready(self, talk: Talk, place: Place, *, is_front: bool = False, trial: Trial | None = None) -> Action:
        self._orders += 1
        job, key = talk.live.job, talk.key(place)
        if key in talk.live.suspects and not is_front:  # of an earlier life: in this one it was on no slot yet
            is_front, trial = True, Trial.NEXT
        turn = ReadyTurn(
            key=key,
            job_priority=job.priority,
            rounds_completed=talk.order.rounds_completed,
            conversation_order=talk.number,
            agent_order=place.agent,
            ready_order=self._orders,
            path=talk.live.backlog.path(place, talk.conversation.rounds),
            is_front=is_front,
            signature=job.agents[place.agent].signature(self._group_by) if self._group_by else "",
        )
        model = job.agents[place.agent].model
        talk.open.add(turn.key)
        if not is_front:
            talk.queue(turn, model)
        self._ready.add(turn, model, trial)
        return TurnIsReady(key=turn.key)

    def _end(self, talk: Talk, state: ConversationState, reason: str | None) -> Iterator[Action]:
        """End a conversation early: drop what waits, cut off what runs."""
        if talk.ending is not None:
            return
        talk.ending = (state, reason)
        for key in talk.in_order(talk.open):
            if key in self._seats:
                yield CutOffTurn(key=key)
            else:
                self._drop(talk, key)
        yield from self._settle(talk)

    def _drop(self, talk: Talk, key: TurnKey) -> None:
        talk.open.discard(key)
        self._ready.discard(key, talk.model(key))

    def _settle(self, talk: Talk) -> Iterator[Action]:
        """Finish a conversation that is to end, once nothing of it is in flight."""
        if talk.ending is None or any(key in self._seats for key in talk.open):
            return
        state, reason = talk.ending
        ended = ConversationEnded(
            job_id=talk.live.job.id,
            conversation_id=talk.conversation.id,
            state=state,
            reason=reason,
            unspoken=talk.unspoken(),
        )
        yield from self._leave(talk, ended)

    def _release(self, talk: Talk) -> Iterator[Action]:
        """Leave a conversation, of which nothing is in flight, to a node that has the models it needs next."""
        models = tuple(dict.fromkeys(talk.model(key) for key in talk.in_order(talk.open)))
        for key in list(talk.open):
            self._drop(talk, key)
        left = ConversationReleased(
            job_id=talk.live.job.id,
            conversation_id=talk.conversation.id,
            models=tuple(model for model in models if model in self._lost),
        )
        yield from self._leave(talk, left)

    def _leave(self, talk: Talk, told: ConversationEnded | ConversationReleased) -> Iterator[Action]:
        live = talk.live
        live.end_talk(talk)
        yield told
        if live.talks:
            self._tell_load(live)
            return
        del self._jobs[live.job.id]
        self._ready.note_load(live.job.id, live.backlog, has_ended=True)
        yield JobEnded(job_id=live.job.id)

    # Turns

    def _land(self, event: TurnEvent, worker: str) -> Iterator[Action]:
        key = event.key
        live = self._jobs[key.job_id]
        talk = live.talks[key.conversation_id]
        place = talk.place(key)
        if isinstance(event, TurnInterrupted | TurnRejected) and talk.ending is None:
            trial = event.trial if isinstance(event, TurnInterrupted) else None
            yield self._make_ready(talk, place, is_front=True, trial=trial)
            return
        talk.open.discard(key)
        if not isinstance(event, TurnInterrupted | TurnRejected):
            talk.end(key)
        if isinstance(event, TurnCompleted):
            tokens = event.reading.context_tokens if event.reading else 0
            talk.keep_warm(place.agent, Warm(worker=worker, tokens=tokens))
            if event.seconds is not None:
                self._dispatcher.learn(talk.model(key), event.seconds, event.reading)
                self._estimates.learn(talk.model(key), key.agent_id, event.seconds)
                live.backlog.refresh(self._estimates)
        if talk.ending is not None:
            yield from self._settle(talk)
        elif isinstance(event, TurnFailed):
            if event.reason == FailureReason.POISONED and talk.model(key) in self._ready.suspects:
                self._ready.suspects[talk.model(key)].postpone(key.job_id)
            yield from self._end(talk, ConversationState.FAILED, event.reason)
        else:
            yield from self._go_on(talk, talk.order.take(place))
        if key.conversation_id in live.talks:
            self._tell_load(live)

    # Starting

    def _dispatch(self) -> Iterator[Action]:
        if self._is_paused:
            return
        for model in [model for model, is_elsewhere in self._lost.items() if not is_elsewhere]:
            yield from self._abandon(model)
        yield from self._dispatcher.start_all()
        # What can be started here is not left to others.
        for model in [model for model, is_elsewhere in self._lost.items() if is_elsewhere]:
            yield from self._release_all(model)

    def _release_all(self, model: str) -> Iterator[Action]:
        """Leave all that waits for a model to other nodes; what has a turn in flight goes when that has ended."""
        for key in self._ready.keys(model):
            job = self._jobs.get(key.job_id)
            talk = job.talks.get(key.conversation_id) if job else None
            if talk is not None and talk.ending is None and not any(each in self._seats for each in talk.open):
                yield from self._release(talk)

    def _abandon(self, model: str) -> Iterator[Action]:
        """Fail all that waits for a model, and with each turn its conversation: better an end than a hang."""
        for key in self._ready.take_all(model):
            talk = self._talk(key)
            talk.open.discard(key)
            talk.end(key)
            yield AbandonTurn(key=key)
            yield from self._end(talk, ConversationState.FAILED, FailureReason.ENGINE_UNREACHABLE)

    def _talk(self, key: TurnKey) -> Talk:
        return self._jobs[key.job_id].talks[key.conversation_id]
