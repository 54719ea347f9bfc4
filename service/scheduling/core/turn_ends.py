"""The ends of turns in flight: a turn leaves its slots, and its conversation goes on or is settled. Pure."""

from service.conversations.job.job import TurnKey
from service.conversations.job.until import NOTHING
from service.scheduling.core import events
from service.scheduling.core.dispatch import Dispatcher
from service.scheduling.core.flow import ConversationFlow
from service.scheduling.core.in_flight_pool import InFlightPool
from service.scheduling.core.live import LiveConversation
from service.scheduling.core.queue.affinity import CacheLocation
from service.scheduling.core.ready_pool import ReadyPool
from service.scheduling.core.room_keeper import RoomKeeper
from workers.outcome import FailureReason


class TurnEnds:
    """Handles the ends of turns for the core; it ignores the end of a turn that is not in flight."""

    def __init__(
        self,
        flow: ConversationFlow,
        ready: ReadyPool,
        in_flight: InFlightPool,
        room: RoomKeeper,
        dispatcher: Dispatcher,
        out: list[events.Action],
    ) -> None:
        self._flow = flow
        self._ready = ready
        self._in_flight = in_flight
        self._room = room
        self._dispatcher = dispatcher
        self._out = out

    def __repr__(self) -> str:
        return f"<TurnEnds of {self._in_flight!r}>"

    def _take_off(self, key: TurnKey) -> str | None:
        """Remove a turn from its slots; return its worker, None if it is not in flight."""
        worker = self._in_flight.remove(key)
        self._dispatcher.lending.forget(key)
        if worker is not None:
            self._ready.note_end(key)
        return worker

    def complete(self, event: events.TurnCompleted) -> None:
        """Record a turn that has spoken: learn from it, and go on."""
        key, worker = event.key, self._take_off(event.key)
        if worker is None:
            return
        conversation = self._flow.conversation(key)
        conversation.open.discard(key)
        conversation.end_turn(key)
        self._learn(event, conversation, worker)
        hold = self._dispatcher.costs.programs.end_request(event, worker)
        if hold is not None:
            self._out.append(hold)
        readers = self._flow.gates.readers
        if readers.are_any:
            tokens = event.reading.context_tokens if event.reading is not None else 0
            token_s = self._dispatcher.costs.speeds.read_s(conversation.model(key))
            free = readers.take_answer(key, event.reading, event.seconds, token_s)
            self._flow.open_gates(free, CacheLocation(worker=worker, tokens=tokens))
        self._flow.take_end(key, event.digest)
        self._flow.update_load(key)

    def retry(self, event: events.TurnInterrupted | events.TurnRejected) -> None:
        """Make a turn ready again, unless its conversation is ending."""
        key = event.key
        if self._take_off(key) is None:
            return
        conversation = self._flow.conversation(key)
        if conversation.ending is None:
            self._flow.ask_again(key, event.trial if isinstance(event, events.TurnInterrupted) else None)
            return
        conversation.open.discard(key)
        self._flow.take_end(key, NOTHING)
        self._flow.update_load(key)

    def fail_turn(self, event: events.TurnFailed) -> None:
        """Record a turn that has failed for good."""
        key = event.key
        conversation = self._end_turn(key)
        if conversation is None:
            return
        if conversation.ending is not None:
            self._flow.take_end(key, NOTHING)
        else:
            suspects = self._ready.suspects.get(conversation.model(key))
            if event.reason == FailureReason.POISONED and suspects is not None:
                suspects.postpone(key.job_id, conversation.live.job.owner)
            self._flow.go_on_without(key, event.reason)
        self._flow.update_load(key)

    def cut_off(self, event: events.TurnCutOff) -> None:
        """Record a turn that was ended because its conversation has ended."""
        key = event.key
        if self._end_turn(key) is None:
            return
        self._flow.take_end(key, NOTHING)
        self._flow.update_load(key)

    def _end_turn(self, key: TurnKey) -> LiveConversation | None:
        """Take a turn without an answer off its slots; return its conversation, None where it was on none."""
        if self._take_off(key) is None:
            return None
        conversation = self._flow.conversation(key)
        conversation.open.discard(key)
        conversation.end_turn(key)
        return conversation

    def _learn(self, event: events.TurnCompleted, conversation: LiveConversation, worker: str) -> None:
        key, place = event.key, conversation.live.places[event.key.agent_id]
        agent = conversation.agents[place]
        tokens = event.reading.context_tokens if event.reading else 0
        conversation.note_cache(place, CacheLocation(worker=worker, tokens=tokens))
        self._room.learn(key, agent, conversation.definition, event.reading)
        if event.seconds is not None:
            self._dispatcher.costs.speeds.learn(agent.model, event.seconds, event.reading)
            self._flow.estimates.learn(agent.model, key.agent_id, event.seconds)
            conversation.live.backlog.refresh()
