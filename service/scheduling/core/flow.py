"""Jobs and their conversations from their admission to their end, one turn's end after the other. Pure.

Source: docs/lifecycle.md, "Turns" and "Conversations".
"""

from collections.abc import Callable, Iterable
from itertools import count, islice
from typing import Final

from service.conversations.job.job import GroupBy, JobId, TurnKey
from service.conversations.job.states import ConversationState
from service.conversations.job.until import NOTHING, TurnDigest
from service.conversations.talk.turn_failures import digest_of_failure
from service.conversations.talk.turn_order import Place
from service.scheduling.core import events
from service.scheduling.core.backlog import Estimates
from service.scheduling.core.blame import Trial
from service.scheduling.core.gates import Gates, TurnGate
from service.scheduling.core.in_flight_pool import InFlightPool
from service.scheduling.core.live import LiveConversation, LiveJob
from service.scheduling.core.queue.affinity import CacheLocation
from service.scheduling.core.ready_pool import ReadyPool
from service.scheduling.core.room_keeper import RoomKeeper
from workers.outcome import FailureReason

ENDED_AT_ONCE: Final = 1000  # turns: some 10 ms of the event loop


class ConversationFlow:
    """Owns the jobs; each call appends its actions to ``out``. It shares both pools with the core.

    ``on_job_end`` is called when all of a job has ended or left.
    """

    def __init__(
        self,
        ready: ReadyPool,
        in_flight: InFlightPool,
        room: RoomKeeper,
        group_by: GroupBy | None,
        on_job_end: Callable[[JobId], object],
        out: list[events.Action],
    ) -> None:
        self.jobs: dict[JobId, LiveJob] = {}
        self.gates = Gates()
        self.estimates = Estimates()
        self._ready = ready
        self._in_flight = in_flight
        self._room = room
        self._group_by = group_by
        self._on_job_end = on_job_end
        self._out = out
        self._orders = count(1)

    def __repr__(self) -> str:
        return f"<ConversationFlow jobs={len(self.jobs)}>"

    def conversation(self, key: TurnKey) -> LiveConversation:
        """Return the conversation of a turn; KeyError if it is not here."""
        return self.jobs[key.job_id].conversations[key.conversation_id]

    def find(self, job_id: JobId, conversation_id: str) -> LiveConversation | None:
        """Return a conversation, None if it is not here."""
        live = self.jobs.get(job_id)
        return None if live is None else live.conversations.get(conversation_id)

    # Jobs

    def admit(self, event: events.JobAdmitted, meet: Callable[[LiveConversation], None]) -> None:
        """Add conversations of a job; ``meet`` is called with each before its turns may run."""
        live = self.jobs.get(event.job.id)
        if live is None:
            live = self.jobs[event.job.id] = LiveJob(event, self.estimates)
        else:
            live.extend(event.job, event.suspects)
        ended = event.ended_by_conversation()
        for conversation in live.take_conversations(event, self._orders):
            meet(conversation)
            places = conversation.resume(ended.get(conversation.definition.id, {}), event.digests)
            if conversation.ending is not None:
                self._settle(conversation)
            elif conversation.order.is_over or not live.is_cancelled:  # otherwise cancel_job ends it, a few at a time
                self.go_on(conversation, places)
        if live.is_cancelled:
            self.cancel_job(events.JobCancelled(job_id=event.job.id))
        if live.conversations:
            self._ready.note_load(live.job.id, live.backlog)

    def cancel_job(self, event: events.JobCancelled) -> None:
        """End a job, some thousand turns at a time; conversations with a turn in flight come first."""
        live = self.jobs.get(event.job_id)
        if live is None:
            return
        if not live.is_cancelled:
            live.is_cancelled = True
            for conversation in [live.conversations[name] for name in self._in_flight.conversations_of(event.job_id)]:
                self.end_early(conversation, ConversationState.CANCELLED, "cancelled")
        left = ENDED_AT_ONCE
        for conversation in list(islice((each for each in live.conversations.values() if each.ending is None), left)):
            left -= conversation.definition.rounds * len(live.job.agents)
            self.end_early(conversation, ConversationState.CANCELLED, "cancelled")
            if left <= 0:
                break
        if any(conversation.ending is None for conversation in live.conversations.values()):
            self._out.append(events.ContinueCancel(job_id=event.job_id))

    def end_spoiled(self, event: events.ConversationSpoiled) -> None:
        """End a conversation that cannot be stored."""
        if (conversation := self.find(event.job_id, event.conversation_id)) is not None:
            self.end_early(conversation, ConversationState.FAILED, FailureReason.INTERNAL)

    # Turns

    def go_on(self, conversation: LiveConversation, places: Iterable[Place]) -> None:
        """Release the turns whose order has come; end a conversation without any left."""
        live = conversation.live
        if conversation.order.is_over:
            if not conversation.open:  # in free mode other turns finish after a condition held
                conversation.ending = (ConversationState.COMPLETED, None)
                self._settle(conversation)
            return
        left = conversation.definition.rounds - conversation.order.rounds_completed
        live.backlog.note_rounds(conversation.definition.id, left)
        for place in places:
            if live.job.leader is not None:
                live.backlog.name_speaker(conversation.definition, place.agent)
            gate = self.gates.closed_gate(conversation, place)
            if gate is None:
                self._make_ready(conversation, place)
            elif gate is TurnGate.CALLER:
                self._out.append(events.AwaitTurn(key=conversation.key(place)))
        if self.gates.needs_callers_alone(conversation):
            self.leave_to_others(conversation)

    def open_gates(self, keys: Iterable[TurnKey], cached: CacheLocation | None = None) -> None:
        """Make turns ready that waited for a first reader; ``cached`` is the worker whose cache has their prompt."""
        for key in keys:
            conversation = self.conversation(key)
            if conversation.ending is None:
                if cached is not None:
                    conversation.note_cache(conversation.live.places[key.agent_id], cached)
                self._make_ready(conversation, conversation.place(key))

    def take_end(self, key: TurnKey, digest: TurnDigest) -> None:
        """Go on after a turn that has spoken or was cut off."""
        conversation = self.conversation(key)
        if conversation.ending is not None:
            self._settle(conversation)
        else:
            self.go_on(conversation, self._end_in_order(conversation, conversation.place(key), digest))

    def ask_again(self, key: TurnKey, trial: Trial | None) -> None:
        """Make a turn ready again that was on a slot; with a ``trial`` it is a suspect."""
        conversation = self.conversation(key)
        self._make_ready(conversation, conversation.place(key), is_front=True, trial=trial)
        self.open_gates(self.gates.readers.forget_turn(key))  # it may wait for long: others need not

    def take_words(self, event: events.CallerSpoke) -> None:
        """Go on after a caller's turn; ignore a turn that the conversation does not await."""
        key = event.key
        conversation = self.find(key.job_id, key.conversation_id)
        if conversation is None or key not in conversation.awaited:
            return
        conversation.awaited -= {key}
        conversation.end_turn(key)
        if conversation.ending is None and event.reason is not None:
            self.go_on_without(key, event.reason)
        elif conversation.ending is None:
            self.take_end(key, event.digest)
        self.update_load(key)

    def go_on_without(self, key: TurnKey, reason: str) -> None:
        """Go on after a failed turn, unless its conversation fails with it or all agents have left."""
        conversation = self.conversation(key)
        self.open_gates(self.gates.readers.forget_turn(key))
        digest = digest_of_failure(conversation.agent(key), reason)
        places = [] if digest is None else self._end_in_order(conversation, conversation.place(key), digest)
        if digest is None or conversation.order.is_deserted:
            self.end_early(conversation, ConversationState.FAILED, reason)
        else:
            self.go_on(conversation, places)

    def abandon(self, key: TurnKey) -> None:
        """Fail a turn that no worker will ever take."""
        conversation = self.conversation(key)
        conversation.open.discard(key)
        conversation.leave_line(key)
        self._room.forget_turn(key)
        conversation.end_turn(key)
        self._out.append(events.AbandonTurn(key=key))
        self.go_on_without(key, FailureReason.ENGINE_UNREACHABLE)

    def update_load(self, key: TurnKey) -> None:
        """Set the remaining load of a turn's job, unless its conversation is over."""
        live = self.jobs.get(key.job_id)
        if live is not None and key.conversation_id in live.conversations:
            self._ready.note_load(live.job.id, live.backlog)

    def _make_ready(
        self, conversation: LiveConversation, place: Place, *, is_front: bool = False, trial: Trial | None = None
    ) -> None:
        key = conversation.key(place)
        if not is_front and key in conversation.live.suspects:  # from an earlier life, and on no slot in this one
            is_front, trial = True, conversation.live.suspects[key]
        agent = conversation.agents[place.agent]
        signature = agent.signature(self._group_by) if self._group_by else ""
        turn = conversation.ready_turn(place, next(self._orders), signature, is_front=is_front)
        conversation.open.add(key)
        if not is_front:
            conversation.queue(turn, agent.model)
        self._ready.add(turn, agent.model, trial)
        self._out.append(events.TurnIsReady(key=key))

    def _end_in_order(self, conversation: LiveConversation, place: Place, digest: TurnDigest = NOTHING) -> list[Place]:
        """Record a turn's end; return the turns whose order has come. If a condition holds, drop waiting turns."""
        order = conversation.order
        had_ended, places = order.ending is not None, order.end_turn(place, digest)
        if order.ending is not None and not had_ended:
            for key in [each for each in conversation.open if each not in self._in_flight]:
                self._drop(conversation, key)
        return places

    # Ends

    def end_early(self, conversation: LiveConversation, state: ConversationState, reason: str | None) -> None:
        """End a conversation early: drop its waiting turns, cut off those in flight."""
        if conversation.ending is not None:
            return
        conversation.ending = (state, reason)
        for key in conversation.in_order(conversation.open):
            if key in self._in_flight:
                self._out.append(events.CutOffTurn(key=key))
            else:
                self._drop(conversation, key)
        self._settle(conversation)

    def leave_to_others(self, conversation: LiveConversation, lost: Iterable[str] = ()) -> None:
        """Leave a conversation without turns in flight to a node that has the models it needs next.

        If only callers can move it on, no node takes it until one of them has spoken.
        """
        needed = dict.fromkeys(conversation.model(key) for key in conversation.in_order(conversation.open))
        for key in list(conversation.open):
            self._drop(conversation, key)
        left = events.ConversationReleased(
            job_id=conversation.live.job.id,
            conversation_id=conversation.definition.id,
            models=tuple(model for model in needed if model in set(lost)),
            awaited=frozenset() if needed else conversation.awaited,
        )
        self._leave(conversation, left)

    def _drop(self, conversation: LiveConversation, key: TurnKey) -> None:
        conversation.open.discard(key)
        self._room.forget_turn(key)
        self._ready.drop_turn(key, conversation.model(key))

    def _settle(self, conversation: LiveConversation) -> None:
        """Finish an ending conversation once none of its turns is in flight."""
        if not any(key in self._in_flight for key in conversation.open):
            self._leave(conversation, conversation.ended())

    def _leave(
        self, conversation: LiveConversation, ending: events.ConversationEnded | events.ConversationReleased
    ) -> None:
        live = conversation.live
        live.end_conversation(conversation)
        self.open_gates(self.gates.readers.forget_conversation(live.job.id, conversation.definition.id))
        self._room.forget_conversation(live.job.id, conversation.definition.id)
        self._out.append(ending)
        if live.conversations:
            self._ready.note_load(live.job.id, live.backlog)
            return
        del self.jobs[live.job.id]
        self._room.forget_job(live.job.id, live.places)
        self._on_job_end(live.job.id)
        self._ready.note_load(live.job.id, live.backlog, has_ended=True)
        self._out.append(events.JobEnded(job_id=live.job.id))
