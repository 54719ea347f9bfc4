"""The decisions of the scheduler: events in, actions out. Pure: no clock, no I/O, no task.

The caller hands in what has happened at one moment and carries out the actions in their order. A turn is in exactly one
of three pools: pending with its conversation, ready in the queue of its model, or in flight; and it is
started at most once until its end, in whatever way, has been told.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Final

from service.conversations.job import GroupBy, JobId, SpokenBy, TurnKey
from service.conversations.states import ConversationState, TurnState
from service.conversations.turn_failures import digest_of_failure
from service.conversations.turn_order import Place
from service.conversations.until import NOTHING, TurnDigest
from service.scheduling.core import events
from service.scheduling.core.backlog import Estimates
from service.scheduling.core.blame import SourceDistrusted, SourceTrusted, SuspectsCleared, Trial
from service.scheduling.core.dispatch import Dispatcher
from service.scheduling.core.first_readers import FirstReaders
from service.scheduling.core.in_flight_pool import InFlightPool
from service.scheduling.core.live import LiveConversation, LiveJob
from service.scheduling.core.queue.affinity import CacheLocation
from service.scheduling.core.queue.fair_shares import Shares
from service.scheduling.core.queue.ready_queue import PolicyFactory, ReadyTurn
from service.scheduling.core.ready_pool import ReadyPool
from service.scheduling.core.room_keeper import RoomKeeper
from service.scheduling.core.view import PoolsView
from workers.outcome import FailureReason

ENDED_AT_ONCE: Final = 1000  # turns: some 10 ms of the event loop


class SchedulingCore:
    """Which turn runs where, of all jobs that have not ended; ``shares`` are those of keys, None is for no keys."""

    def __init__(
        self,
        policy: PolicyFactory,
        group_by: GroupBy | None = None,
        on_demand: Iterable[str] = (),
        shares: Shares = None,
    ) -> None:
        self._in_flight = InFlightPool()
        self._room = RoomKeeper(self._in_flight)
        self._ready = ReadyPool(
            policy,
            is_grouped=group_by is not None,
            on_demand=on_demand,
            is_begun=lambda key: self._conversation(key).is_started,
            is_pressed=self._room.working_set.is_pressed,
            shares=shares,
        )
        self._group_by = group_by
        self._jobs: dict[JobId, LiveJob] = {}
        self._estimates = Estimates()
        self._dispatcher = Dispatcher(self._jobs, self._ready, self._in_flight, self._room)
        self._readers = FirstReaders()
        self._orders = count(1)
        self._lost: dict[str, bool] = {}  # models that no turn need wait for, and whether another node has them
        self._is_paused = False
        self.handled = 0  # how often events were
        self.view = PoolsView(self._jobs, self._ready, self._in_flight, self._lost, group_by, self._room, self._readers)

    def __repr__(self) -> str:
        return f"<SchedulingCore jobs={len(self._jobs)} ready={len(self._ready)} in_flight={len(self._in_flight)}>"

    def handle(self, *told: events.Event) -> list[events.Action]:
        """Return the actions after ``told``; ends at the same moment are all applied before the next start."""
        self.handled += 1
        actions = [action for event in told for action in self._apply(event)]
        actions += self._dispatcher.lending.give_back()  # before others start, and though nothing is to be started
        return [*actions, *self._dispatch()]

    @property
    def kept(self) -> Mapping[TurnKey, int]:
        """The slots that stand idle, since the last decision, until a turn on several has as many as it needs."""
        return self._dispatcher.kept

    def rests_until(self, model: str) -> float | None:
        """Return until when suspects of a model's distrusted jobs and keys let others go first, as time is told."""
        return self._dispatcher.trials.rests_until(model)

    def check(self) -> Iterator[str | None]:
        """Tell what does not add up between two events, or None, for one thing after another; nothing is changed.

        Pools, slots, reservations, charges. It is to be asked on only while nothing is handled: ``handled`` counts.
        """
        ready: set[TurnKey] = set()
        for key in self._ready:
            ready.add(key)
            yield f"{key} is ready and in flight" if key in self._in_flight else None
        begun = 0
        for live in self._jobs.values():
            for conversation in live.conversations.values():
                begun += len(conversation.open)
                lost = [key for key in conversation.open if key not in ready and key not in self._in_flight]
                yield f"{lost} are of a conversation, and in no pool" if lost else None
        if begun != len(ready) + len(self._in_flight):
            yield f"{len(ready)} turns are ready, {len(self._in_flight)} in flight, {begun} of conversations"
        if self._ready.fair is not None and (charged := self._ready.fair.charged - set(self._in_flight.keys())):
            yield f"{sorted(charged)} are charged for, and not in flight"
        yield from (f"{count} turns are {state}" if count < 0 else None for state, count in self.view.of_all().items())
        yield from self._ready.check(lambda key: self._jobs[key.job_id].job.owner)
        yield from self._in_flight.check()

    # Events

    def _apply(self, event: events.Event) -> Iterator[events.Action]:
        match event:
            case events.JobAdmitted():
                yield from self._admit(event)
            case events.JobCancelled() | events.ConversationSpoiled():
                yield from self._end_early(event)
            case events.CallerSpoke():
                yield from self._take_words(event)
            case events.Paused() | events.Unpaused():
                self._is_paused = isinstance(event, events.Paused)
            case events.WorkerReady() | events.WorkerNotReady() | events.ModelLost() | events.ModelRegained():
                self._take_capacity(event)
            case _ if isinstance(event, events.TurnEvent):
                worker = self._in_flight.remove(event.key)
                self._dispatcher.lending.forget(event.key)
                if worker is not None:
                    yield from self._end_turn(event, worker)
            case _ if isinstance(event, events.SlotEvent):
                yield from self._dispatcher.lending.apply_event(event)
            case SuspectsCleared() | SourceDistrusted() | SourceTrusted():
                self._take_finding(event)
            case _:
                yield from self._take_note(event)

    def _take_capacity(self, event: events.WorkerEvent) -> None:
        match event:
            case events.WorkerReady():
                self._lost.pop(event.model, None)
                self._in_flight.open(event.worker, event.model, event.slots, event.kv_tokens, event.kv_block)
                self._room.note_worker(event)
                self._readers.note_worker(event)
                self._dispatcher.note_worker(event)
                self._ready.note_slots(event.model, self._in_flight.total(event.model))
            case events.WorkerNotReady():
                model = self._in_flight.close(event.worker, returns=event.returns)
                if model is not None:
                    self._ready.note_slots(model, self._in_flight.total(model))
                for turn in self._ready.deferred.all_for(event.worker):
                    self._ready.end_deferral(turn.key, self._conversation(turn.key).model(turn.key))
            case events.ModelLost():
                self._lost[event.model] = event.is_elsewhere
            case events.ModelRegained():
                self._lost.pop(event.model, None)

    def _take_note(self, event: events.Note) -> Iterator[events.Action]:
        if isinstance(event, events.PromptRead):
            yield from self._take_reading(event)
        elif isinstance(event, events.TurnSpent):
            self._dispatcher.settle(event)
        elif isinstance(event, events.HoldOver):
            self._dispatcher.end_hold(event.key, event.seconds)
        elif isinstance(event, events.DeferralOver) and self._ready.deferred.worker_of(event.key) is not None:
            self._ready.end_deferral(event.key, self._conversation(event.key).model(event.key))
        elif isinstance(event, events.SlotsKept):
            self._dispatcher.charge_idle(event.owner, event.model, event.slot_s)
        elif isinstance(event, events.TimeTold):
            self._dispatcher.trials.now = event.at
        elif isinstance(event, events.KvUseTold):
            for key, use in event.uses.items():
                if key in self._in_flight:
                    conversation = self._conversation(key)
                    self._room.correct(key, conversation.agent(key), conversation.definition, use)

    def _take_reading(self, event: events.PromptRead) -> Iterator[events.Action]:
        if event.key in self._in_flight:
            model = self._conversation(event.key).model(event.key)
            yield from self._end_waits(self._readers.note_read(event.key, model, event.seconds))

    def _take_finding(self, event: events.Suspicion) -> None:
        match event:
            case SuspectsCleared():
                for key in event.keys:
                    live = self._jobs.get(key.job_id)
                    conversation = live.conversations.get(key.conversation_id) if live else None
                    if conversation is not None:
                        self._ready.clear_suspect(key, conversation.model(key))
            case SourceDistrusted() | SourceTrusted():
                source, is_distrusted = event.source, isinstance(event, SourceDistrusted)
                if isinstance(source, tuple):
                    keys = self._dispatcher.distrusted
                    (keys.add if is_distrusted else keys.discard)(source)
                elif source in self._jobs:
                    self._jobs[source].is_distrusted = is_distrusted

    # Jobs

    def _admit(self, event: events.JobAdmitted) -> Iterator[events.Action]:
        live = self._jobs.get(event.job.id)
        if live is None:
            live = self._jobs[event.job.id] = LiveJob(
                event.job, self._estimates, event.suspects, is_cancelled=event.is_cancelled
            )
        else:
            live.extend(event.job, event.suspects)
        fresh = [LiveConversation(live, each, next(self._orders)) for each in event.job.conversations]
        live.conversations |= {conversation.definition.id: conversation for conversation in fresh}
        live.backlog.refresh()
        ended: dict[str, list[TurnKey]] = {}
        for key in event.ended:
            ended.setdefault(key.conversation_id, []).append(key)
        for key, location in event.cached.items():
            conversation = live.conversations[key.conversation_id]
            conversation.note_cache(live.places[key.agent_id], location)
        for conversation in fresh:
            if event.program is not None:
                idle_s = self._dispatcher.programs.admit_request(live.job, event.program)
                if idle_s is not None:
                    conversation.is_awaited = True
                    self._dispatcher.charge_idle(live.job.owner, live.job.agents[0].model, idle_s)
            keys = ended.get(conversation.definition.id, [])
            yield from self._resume(conversation, {key: event.ended[key] for key in keys}, event.digests)
        if live.is_cancelled:
            yield from self._cancel(event.job.id)
        if live.conversations:
            self._ready.note_load(live.job.id, live.backlog)

    def _resume(
        self,
        conversation: LiveConversation,
        ended: Mapping[TurnKey, tuple[TurnState, str | None]],
        digests: Mapping[TurnKey, TurnDigest],
    ) -> Iterator[events.Action]:
        live = conversation.live
        spoken: dict[Place, TurnDigest] = {}
        failure: str | None = None
        for key, (state, reason) in ended.items():
            conversation.end_turn(key, is_earlier=True)
            digest = digests.get(key, NOTHING)
            if digest.is_inherited:
                spoken[conversation.place(key)] = digest
                continue
            conversation.is_started = True
            if state is TurnState.COMPLETED:
                spoken[conversation.place(key)] = digest
            elif state is TurnState.FAILED:
                silence, failure = digest_of_failure(conversation.agent(key), reason), reason
                if silence is not None:
                    spoken[conversation.place(key)] = silence
                else:  # its neighbours were cut off because of it, whichever was stored first
                    conversation.ending = (ConversationState.FAILED, reason)
            elif conversation.ending is None:
                conversation.ending = (ConversationState.CANCELLED, reason)
        places = conversation.order.replay(spoken)
        if failure is not None and conversation.order.is_deserted:
            conversation.ending = (ConversationState.FAILED, failure)
        if conversation.ending is not None:
            yield from self._settle(conversation)
        elif conversation.order.is_over or not live.is_cancelled:  # else it is ended with others, a few at a time
            yield from self._go_on(conversation, places)

    def _end_early(self, event: events.JobCancelled | events.ConversationSpoiled) -> Iterator[events.Action]:
        if isinstance(event, events.JobCancelled):
            yield from self._cancel(event.job_id)
            return
        live = self._jobs.get(event.job_id)
        conversation = live.conversations.get(event.conversation_id) if live else None
        if conversation is not None:
            yield from self._end(conversation, ConversationState.FAILED, FailureReason.INTERNAL)

    def _cancel(self, job_id: JobId) -> Iterator[events.Action]:
        """End a job, some thousand turns at a time; those in flight come first."""
        live = self._jobs.get(job_id)
        if live is None:
            return
        if not live.is_cancelled:
            live.is_cancelled = True
            for conversation in [live.conversations[name] for name in self._in_flight.conversations_of(job_id)]:
                yield from self._end(conversation, ConversationState.CANCELLED, "cancelled")
        left = ENDED_AT_ONCE
        going_on = (conversation for conversation in live.conversations.values() if conversation.ending is None)
        for conversation in list(islice(going_on, left)):
            left -= conversation.definition.rounds * len(live.job.agents)
            yield from self._end(conversation, ConversationState.CANCELLED, "cancelled")
            if left <= 0:
                break
        if any(conversation.ending is None for conversation in live.conversations.values()):
            yield events.ContinueCancel(job_id=job_id)

    # Conversations

    def _go_on(self, conversation: LiveConversation, places: Iterable[Place]) -> Iterator[events.Action]:
        """Make ready the turns that may run now; end a conversation that has none left."""
        live = conversation.live
        if conversation.order.is_over:
            if not conversation.open:  # in free mode turns run to their ends beside one with which a condition held
                conversation.ending = (ConversationState.COMPLETED, None)
                yield from self._settle(conversation)
            return
        left = conversation.definition.rounds - conversation.order.rounds_completed
        live.backlog.note_rounds(conversation.definition.id, left)
        for place in places:
            if live.job.leader is not None:
                live.backlog.name_speaker(conversation.definition, place.agent)
            if conversation.agents[place.agent].by is SpokenBy.CALLER:
                key = conversation.key(place)
                conversation.awaited |= {key}
                yield events.AwaitTurn(key=key)
            elif conversation.definition.heritage is None or not self._reads_later(conversation, place):
                yield self._make_ready(conversation, place)
        if (
            conversation.awaited
            and not conversation.open
            and not self._readers.is_any_held(conversation.live.job.id, conversation.definition.id)
        ):
            yield from self._release(conversation)

    def _reads_later(self, conversation: LiveConversation, place: Place) -> bool:
        """Whether the first turn of an heir waits for another that begins alike; none that was on a slot before."""
        key = conversation.key(place)
        if conversation.is_started or key in conversation.live.suspects:
            return False
        job, agent = conversation.live.job, conversation.agents[place.agent]
        return self._readers.hold(key, (job.priority, job.owner), agent, conversation.definition)

    def _end_waits(self, keys: Iterable[TurnKey], cached: CacheLocation | None = None) -> Iterator[events.Action]:
        """Make turns ready whose prompt another has begun with, on the worker that has it."""
        for key in keys:
            conversation = self._conversation(key)
            if conversation.ending is None:
                if cached is not None:
                    conversation.note_cache(conversation.live.places[key.agent_id], cached)
                yield self._make_ready(conversation, conversation.place(key))

    def _make_ready(
        self, conversation: LiveConversation, place: Place, *, is_front: bool = False, trial: Trial | None = None
    ) -> events.Action:
        job, key = conversation.live.job, conversation.key(place)
        if key in conversation.live.suspects and not is_front:  # of an earlier life: in this one it was on no slot yet
            is_front, trial = True, conversation.live.suspects[key]
        agent = conversation.agents[place.agent]
        turn = ReadyTurn(
            key=key,
            job_priority=job.priority,
            rounds_completed=conversation.order.rounds_completed,
            conversation_order=conversation.number,
            agent_order=place.agent,
            ready_order=next(self._orders),
            path=conversation.live.backlog.path(place, conversation.definition.rounds),
            is_front=is_front,
            was_deferred=conversation.is_awaited,
            signature=agent.signature(self._group_by) if self._group_by else "",
            owner=job.owner,
        )
        conversation.open.add(turn.key)
        if not is_front:
            conversation.queue(turn, agent.model)
        self._ready.add(turn, agent.model, trial)
        return events.TurnIsReady(key=turn.key)

    def _end(
        self, conversation: LiveConversation, state: ConversationState, reason: str | None
    ) -> Iterator[events.Action]:
        """End a conversation early: drop what waits, cut off what runs."""
        if conversation.ending is not None:
            return
        conversation.ending = (state, reason)
        for key in conversation.in_order(conversation.open):
            if key in self._in_flight:
                yield events.CutOffTurn(key=key)
            else:
                self._drop(conversation, key)
        yield from self._settle(conversation)

    def _drop(self, conversation: LiveConversation, key: TurnKey) -> None:
        conversation.open.discard(key)
        self._room.forget_turn(key)
        self._ready.drop_turn(key, conversation.model(key))

    def _settle(self, conversation: LiveConversation) -> Iterator[events.Action]:
        """Finish a conversation that is to end, once nothing of it is in flight."""
        if conversation.ending is None or any(key in self._in_flight for key in conversation.open):
            return
        state, reason = conversation.ending
        job, is_completed = conversation.live.job, state is ConversationState.COMPLETED
        unspoken: Sequence[TurnKey] = () if is_completed else conversation.unspoken()
        ended = events.ConversationEnded(
            job_id=job.id,
            conversation_id=conversation.definition.id,
            state=state,
            reason=reason,
            unspoken=unspoken,
            ending=conversation.order.ending if is_completed else None,
            absent=job.most_turns(conversation.definition) - conversation.turns_spoken - len(unspoken),
        )
        yield from self._leave(conversation, ended)

    def _release(self, conversation: LiveConversation) -> Iterator[events.Action]:
        """Leave a conversation, of which nothing is in flight, to a node that has the models it needs next.

        One that only callers can move is left to nobody, until one of them has spoken.
        """
        models = tuple(dict.fromkeys(conversation.model(key) for key in conversation.in_order(conversation.open)))
        for key in list(conversation.open):
            self._drop(conversation, key)
        left = events.ConversationReleased(
            job_id=conversation.live.job.id,
            conversation_id=conversation.definition.id,
            models=tuple(model for model in models if model in self._lost),
            awaited=frozenset() if models else conversation.awaited,
        )
        yield from self._leave(conversation, left)

    def _leave(
        self, conversation: LiveConversation, ending: events.ConversationEnded | events.ConversationReleased
    ) -> Iterator[events.Action]:
        live = conversation.live
        live.end_conversation(conversation)
        if conversation.definition.heritage is not None:
            free = self._readers.forget_conversation(live.job.id, conversation.definition.id)
            yield from self._end_waits(free)
        self._room.forget_conversation(live.job.id, conversation.definition.id)
        yield ending
        if live.conversations:
            self._ready.note_load(live.job.id, live.backlog)
            return
        del self._jobs[live.job.id]
        self._room.forget_job(live.job.id, live.places)
        self._dispatcher.programs.stays.pop(live.job.id, None)
        self._ready.note_load(live.job.id, live.backlog, has_ended=True)
        yield events.JobEnded(job_id=live.job.id)

    # Turns

    def _end_turn(self, event: events.TurnEvent, worker: str) -> Iterator[events.Action]:
        key = event.key
        self._ready.note_end(key)
        live = self._jobs[key.job_id]
        conversation = live.conversations[key.conversation_id]
        place = conversation.place(key)
        if isinstance(event, events.TurnInterrupted | events.TurnRejected) and conversation.ending is None:
            yield from self._ask_again(event, conversation, place)
            return
        conversation.open.discard(key)
        if not isinstance(event, events.TurnInterrupted | events.TurnRejected):
            conversation.end_turn(key)
        if isinstance(event, events.TurnCompleted):
            self._learn(event, conversation, worker)
            programs = self._dispatcher.programs
            if key.job_id in programs.stays and (hold := programs.end_request(event, worker)) is not None:
                yield hold
            if conversation.definition.heritage is not None:
                tokens = event.reading.context_tokens if event.reading is not None else 0
                token_s = self._dispatcher.read_s(conversation.model(key))
                free = self._readers.take_answer(key, event.reading, event.seconds, token_s)
                yield from self._end_waits(free, CacheLocation(worker=worker, tokens=tokens))
        if conversation.ending is not None:
            yield from self._settle(conversation)
        elif isinstance(event, events.TurnFailed):
            if event.reason == FailureReason.POISONED and conversation.model(key) in self._ready.suspects:
                self._ready.suspects[conversation.model(key)].postpone(key.job_id, live.job.owner)
            yield from self._go_on_without(conversation, key, event.reason)
        else:
            digest = event.digest if isinstance(event, events.TurnCompleted) else NOTHING
            yield from self._go_on(conversation, self._end_in_order(conversation, place, digest))
        if key.conversation_id in live.conversations:
            self._ready.note_load(live.job.id, live.backlog)

    def _ask_again(
        self, event: events.TurnInterrupted | events.TurnRejected, conversation: LiveConversation, place: Place
    ) -> Iterator[events.Action]:
        trial = event.trial if isinstance(event, events.TurnInterrupted) else None
        yield self._make_ready(conversation, place, is_front=True, trial=trial)
        if conversation.definition.heritage is not None:  # it may wait for long: others need not wait for that
            yield from self._end_waits(self._readers.forget_turn(event.key))

    def _take_words(self, event: events.CallerSpoke) -> Iterator[events.Action]:
        """Go on after a turn that was awaited; one that its conversation does not await is known by now."""
        key = event.key
        live = self._jobs.get(key.job_id)
        conversation = live.conversations.get(key.conversation_id) if live is not None else None
        if live is None or conversation is None or key not in conversation.awaited:
            return
        conversation.awaited -= {key}
        conversation.end_turn(key)
        if conversation.ending is None and event.reason is not None:
            yield from self._go_on_without(conversation, key, event.reason)
        elif conversation.ending is None:
            place = conversation.place(key)
            yield from self._go_on(conversation, self._end_in_order(conversation, place, event.digest))
        if key.conversation_id in live.conversations:
            self._ready.note_load(live.job.id, live.backlog)

    def _go_on_without(self, conversation: LiveConversation, key: TurnKey, reason: str) -> Iterator[events.Action]:
        """Go on after a failed turn, unless its conversation fails with it, or everybody has left by now."""
        if conversation.definition.heritage is not None:
            yield from self._end_waits(self._readers.forget_turn(key))
        digest = digest_of_failure(conversation.agent(key), reason)
        places = [] if digest is None else self._end_in_order(conversation, conversation.place(key), digest)
        if digest is None or conversation.order.is_deserted:
            yield from self._end(conversation, ConversationState.FAILED, reason)
        else:
            yield from self._go_on(conversation, places)

    def _end_in_order(self, conversation: LiveConversation, place: Place, digest: TurnDigest) -> list[Place]:
        """Take a turn's end; return what is ready. Where a condition holds with it, what waits never runs."""
        order = conversation.order
        had_ended, places = order.ending is not None, order.end_turn(place, digest)
        if order.ending is not None and not had_ended:
            for key in [each for each in conversation.open if each not in self._in_flight]:
                self._drop(conversation, key)
        return places

    def _learn(self, event: events.TurnCompleted, conversation: LiveConversation, worker: str) -> None:
        key, place = event.key, conversation.live.places[event.key.agent_id]
        agent = conversation.agents[place]
        tokens = event.reading.context_tokens if event.reading else 0
        conversation.note_cache(place, CacheLocation(worker=worker, tokens=tokens))
        self._room.learn(key, agent, conversation.definition, event.reading)
        if event.seconds is not None:
            self._dispatcher.learn(agent.model, event.seconds, event.reading)
            self._estimates.learn(agent.model, key.agent_id, event.seconds)
            conversation.live.backlog.refresh()

    # Starting

    def _dispatch(self) -> Iterator[events.Action]:
        if self._is_paused:
            return
        for model in [model for model, is_elsewhere in self._lost.items() if not is_elsewhere]:
            yield from self._abandon(model)
        yield from self._dispatcher.start_all()
        # What can be started here is not left to others.
        for model in [model for model, is_elsewhere in self._lost.items() if is_elsewhere]:
            yield from self._release_all(model)

    def _release_all(self, model: str) -> Iterator[events.Action]:
        """Leave all that waits for a model to other nodes; what has a turn in flight goes when that has ended."""
        was_waited_for = False
        for key in self._ready.keys(model):
            job = self._jobs.get(key.job_id)
            conversation = job.conversations.get(key.conversation_id) if job else None
            if conversation is None or conversation.ending is not None:
                continue
            if not any(each in self._in_flight for each in conversation.open):
                was_waited_for |= conversation.definition.heritage is not None
                yield from self._release(conversation)
        if was_waited_for and self._ready.waiting(model):  # who waited for one of them to read is ready by now
            yield events.ContinueDispatch()

    def _abandon(self, model: str) -> Iterator[events.Action]:
        """Fail all that waits for a model, and with each turn its conversation: better an end than a hang."""
        for key in islice(self._ready.take_all(model), ENDED_AT_ONCE):
            conversation = self._conversation(key)
            conversation.open.discard(key)
            self._room.forget_turn(key)
            conversation.end_turn(key)
            yield events.AbandonTurn(key=key)
            yield from self._go_on_without(conversation, key, FailureReason.ENGINE_UNREACHABLE)
        if self._ready.waiting(model):  # some may be of agents without whom their conversations go on
            yield events.ContinueDispatch()

    def _conversation(self, key: TurnKey) -> LiveConversation:
        return self._jobs[key.job_id].conversations[key.conversation_id]
