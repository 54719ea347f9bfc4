"""The decisions of the scheduler: events in, actions out. Pure: no clock, no I/O, no task.

The caller passes the events of one moment and carries out the actions in order. `docs/lifecycle.md` describes the
states of a turn in the core and its pools. A turn is started at most once until its end is passed in.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

from service.conversations.job.job import GroupBy, TurnKey
from service.scheduling.core import events
from service.scheduling.core.blame import SourceDistrusted, SourceTrusted, SuspectsCleared
from service.scheduling.core.dispatch import Dispatcher
from service.scheduling.core.flow import ConversationFlow
from service.scheduling.core.in_flight_pool import InFlightPool
from service.scheduling.core.live import LiveConversation
from service.scheduling.core.pool_faults import pool_faults
from service.scheduling.core.queue.fair_shares import Shares
from service.scheduling.core.queue.ready_queue import PolicyFactory
from service.scheduling.core.ready_pool import ReadyPool
from service.scheduling.core.room_keeper import RoomKeeper
from service.scheduling.core.turn_ends import TurnEnds
from service.scheduling.core.view import PoolsView

ABANDONED_AT_ONCE: Final = 1000  # turns; they take the event loop some 10 ms
Handler = Callable[[Any], None]


class SchedulingCore:
    """Decides which turn of all unfinished jobs runs where; ``shares`` is None without keys."""

    def __init__(
        self,
        policy: PolicyFactory,
        group_by: GroupBy | None = None,
        on_demand: Iterable[str] = (),
        shares: Shares = None,
    ) -> None:
        self._out: list[events.Action] = []  # actions of the events that are being handled
        self._in_flight = InFlightPool()
        self._room = RoomKeeper(self._in_flight)
        self._ready = ReadyPool(
            policy,
            is_grouped=group_by is not None,
            on_demand=on_demand,
            is_begun=lambda key: self._flow.conversation(key).is_started,
            is_pressed=self._room.working_set.is_pressed,
            shares=shares,
        )
        self._flow = ConversationFlow(
            self._ready,
            self._in_flight,
            self._room,
            group_by,
            lambda job_id: self._dispatcher.costs.programs.forget_request(job_id),  # noqa: PLW0108 - the dispatcher is made next
            self._out,
        )
        self._dispatcher = Dispatcher(self._flow.jobs, self._ready, self._in_flight, self._room, self._out)
        self._lost: dict[str, bool] = {}  # lost models, and whether another node has each of them
        self._is_paused = False
        self.handled = 0  # number of calls to handle
        readers = self._flow.gates.readers
        self.view = PoolsView(self._flow.jobs, self._ready, self._in_flight, self._lost, group_by, self._room, readers)
        self._handlers = self._table()

    def __repr__(self) -> str:
        return f"<SchedulingCore {self._flow!r} ready={len(self._ready)} in_flight={len(self._in_flight)}>"

    def handle(self, *happened: events.Event) -> list[events.Action]:
        """Return the actions after ``happened``; all ends of the moment are applied before the next start."""
        self.handled += 1
        for event in happened:
            self._handlers[type(event)](event)
        self._out += self._dispatcher.lending.give_back()  # before other starts, even while paused
        if not self._is_paused:
            self._dispatch()
        actions = list(self._out)
        self._out.clear()
        return actions

    def _table(self) -> Mapping[type[events.Event], Handler]:
        """Return the handler of each kind of event."""
        ends = TurnEnds(self._flow, self._ready, self._in_flight, self._room, self._dispatcher, self._out)
        return {
            events.JobAdmitted: self._admit,
            events.JobCancelled: self._flow.cancel_job,
            events.ConversationSpoiled: self._flow.end_spoiled,
            events.CallerSpoke: self._flow.take_words,
            events.WorkerReady: self._open,
            events.WorkerNotReady: self._close,
            events.ModelLost: self._lose_model,
            events.ModelRegained: self._regain_model,
            events.TurnCompleted: ends.complete,
            events.TurnInterrupted: ends.retry,
            events.TurnRejected: ends.retry,
            events.TurnFailed: ends.fail_turn,
            events.TurnCutOff: ends.cut_off,
            events.ToolsBegan: self._apply_slot_event,
            events.LendingDue: self._apply_slot_event,
            events.ToolsEnded: self._apply_slot_event,
            events.AnswerWhole: self._apply_slot_event,
            events.PromptRead: self._take_reading,
            events.KvUseTold: self._take_kv_uses,
            events.DeferralOver: self._end_deferral,
            events.TurnSpent: self._dispatcher.costs.settle,
            events.HoldOver: self._dispatcher.costs.end_hold,
            events.SlotsReserved: self._dispatcher.costs.charge_reserved,
            events.TimeTold: self._dispatcher.trials.take_time,
            events.Paused: self._pause,
            events.Unpaused: self._unpause,
            SuspectsCleared: self._clear_suspects,
            SourceDistrusted: self._judge_source,
            SourceTrusted: self._judge_source,
        }

    @property
    def reserved(self) -> Mapping[TurnKey, int]:
        """The slots that the last decision left idle until a turn on several slots has all it needs."""
        return self._dispatcher.reserved

    def rests_until(self, model: str) -> float | None:
        """Return when suspects of a model's distrusted jobs and keys may run again (monotonic seconds)."""
        return self._dispatcher.trials.rests_until(model)

    def check(self) -> Iterator[str | None]:
        """Yield a fault of the tables between two events, or None, step by step; change nothing.

        Ask for the next one only if nothing was handled since: compare ``handled``.
        """
        yield from pool_faults(self._flow, self._ready, self._in_flight)
        yield from (f"{count} turns are {state}" if count < 0 else None for state, count in self.view.of_all().items())

    # Jobs

    def _admit(self, event: events.JobAdmitted) -> None:
        def meet(conversation: LiveConversation) -> None:
            if event.program is not None:
                self._dispatcher.costs.meet_program(conversation, event.program)

        self._flow.admit(event, meet)

    # Workers and models

    def _open(self, event: events.WorkerReady) -> None:
        self._lost.pop(event.model, None)
        self._in_flight.open(event.worker, event.model, event.slots, event.kv_tokens, event.kv_block)
        self._room.note_worker(event)
        self._flow.gates.readers.note_worker(event)
        self._dispatcher.costs.note_worker(event)
        self._ready.note_slots(event.model, self._in_flight.models[event.model].total)

    def _close(self, event: events.WorkerNotReady) -> None:
        model = self._in_flight.close(event.worker, returns=event.returns)
        if model is not None:
            self._ready.note_slots(model, self._in_flight.models[model].total)
        for turn in self._ready.deferred.all_for(event.worker):
            self._ready.end_deferral(turn.key, self._flow.conversation(turn.key).model(turn.key))

    def _lose_model(self, event: events.ModelLost) -> None:
        self._lost[event.model] = event.is_elsewhere

    def _regain_model(self, event: events.ModelRegained) -> None:
        self._lost.pop(event.model, None)

    def _pause(self, _: events.Paused) -> None:
        self._is_paused = True

    def _unpause(self, _: events.Unpaused) -> None:
        self._is_paused = False

    # Findings

    def _clear_suspects(self, event: SuspectsCleared) -> None:
        for key in event.keys:
            conversation = self._flow.find(key.job_id, key.conversation_id)
            if conversation is not None:
                self._ready.clear_suspect(key, conversation.model(key))

    def _judge_source(self, event: SourceDistrusted | SourceTrusted) -> None:
        source, is_distrusted = event.source, isinstance(event, SourceDistrusted)
        if isinstance(source, tuple):
            keys = self._dispatcher.judge.distrusted
            (keys.add if is_distrusted else keys.discard)(source)
        elif source in self._flow.jobs:
            self._flow.jobs[source].is_distrusted = is_distrusted

    # Turns

    def _apply_slot_event(self, event: events.SlotEvent) -> None:
        self._out += self._dispatcher.lending.apply_event(event)

    def _take_reading(self, event: events.PromptRead) -> None:
        if event.key in self._in_flight:
            model = self._flow.conversation(event.key).model(event.key)
            self._flow.open_gates(self._flow.gates.readers.note_read(event.key, model, event.seconds))

    def _take_kv_uses(self, event: events.KvUseTold) -> None:
        for key, use in event.uses.items():
            if key in self._in_flight:
                conversation = self._flow.conversation(key)
                self._room.correct(key, conversation.agent(key), conversation.definition, use)

    def _end_deferral(self, event: events.DeferralOver) -> None:
        if self._ready.deferred.worker_of(event.key) is not None:
            self._ready.end_deferral(event.key, self._flow.conversation(event.key).model(event.key))

    # Starting

    def _dispatch(self) -> None:
        hopeless = [model for model, is_elsewhere in self._lost.items() if not is_elsewhere] if self._lost else ()
        for model in hopeless:
            self._abandon(model)
        self._dispatcher.start_all()
        # After the starts: turns that can start here are not left to other nodes.
        elsewhere = [model for model, is_elsewhere in self._lost.items() if is_elsewhere] if self._lost else ()
        for model in elsewhere:
            self._release_all(model)

    def _release_all(self, model: str) -> None:
        """Leave all that waits for a model to other nodes; conversations with a turn in flight go when it has ended."""
        was_waited_for = False
        for key in self._ready.keys(model):
            conversation = self._flow.find(key.job_id, key.conversation_id)
            if conversation is None or conversation.ending is not None:
                continue
            if not any(each in self._in_flight for each in conversation.open):
                was_waited_for |= conversation.definition.heritage.source is not None
                self._flow.leave_to_others(conversation, self._lost)
        # Turns that waited for one of them as first reader are ready now
        if was_waited_for and self._ready.waiting(model):
            self._out.append(events.ContinueDispatch())

    def _abandon(self, model: str) -> None:
        """Fail the turns that wait for a model, and their conversations: otherwise they would wait forever."""
        for key in islice(self._ready.take_all(model), ABANDONED_AT_ONCE):
            self._flow.abandon(key)
        if self._ready.waiting(model):  # conversations that go on after a failure may have made further turns ready
            self._out.append(events.ContinueDispatch())
