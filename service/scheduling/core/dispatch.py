"""The next ready turn to start, and its worker. Pure: moves turns from the ready pool to the in-flight pool."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

from service.conversations.job.job import Agent, JobId, Mode, TurnKey
from service.scheduling.core import events
from service.scheduling.core.blame import Trial
from service.scheduling.core.costs import Costs
from service.scheduling.core.in_flight_pool import InFlightPool
from service.scheduling.core.kv_budgets import NOTHING, KvNeed
from service.scheduling.core.lending import SlotLending
from service.scheduling.core.live import LiveConversation, LiveJob
from service.scheduling.core.queue.affinity import Deferrals, SpeedEstimates
from service.scheduling.core.queue.groups import GroupedQueue, Shifts
from service.scheduling.core.queue.ready_queue import ReadyQueue, ReadyTurn
from service.scheduling.core.ready_pool import ReadyPool
from service.scheduling.core.room_keeper import RoomKeeper
from service.scheduling.core.trials import Trials

PASSED_AT_ONCE: Final = 1000  # turns of ending or distrusted jobs; they take the event loop some 20 ms


class ReadyVerdict(StrEnum):
    """The verdict on a turn that is first in its queue (``ReadyJudge.verdict``)."""

    ENDED = "ended"
    TRIED = "tried"
    BLOCKED = "blocked"
    PASSED = "passed"
    DEFERRED = "deferred"
    STARTED = "started"


class ReadyJudge:
    """Judges the first turns of their queues by the core's present state; it changes nothing."""

    def __init__(
        self,
        jobs: Mapping[JobId, LiveJob],
        in_flight: InFlightPool,
        room: RoomKeeper,
        deferred: Deferrals,
        speeds: SpeedEstimates,
    ) -> None:
        self._jobs = jobs
        self._in_flight = in_flight
        self._room = room
        self._deferred = deferred
        self._speeds = speeds
        self.distrusted: set[tuple[str, str]] = set()  # pairs of a key and a model; written by the core

    def __repr__(self) -> str:
        return f"<ReadyJudge distrusted={self.distrusted}>"

    def verdict(
        self, turn: ReadyTurn, model: str, without_room: Sequence[ReadyTurn] = (), worker: str | None = None
    ) -> ReadyVerdict:
        """Return the verdict on a turn that is first in its queue while a slot of its model is free.

        The first row that matches decides:

        | | the turn | verdict |
        | --- | --- | --- |
        | 1 | its job is ending | ended: it waits for that, not for a slot |
        | 2 | it was on no slot yet, and its job or key is distrusted | tried: it waits for its trial |
        | 3 | its conversation would be new, and begun ones fill the model's caches | blocked |
        | 4 | it is behind a turn without room in its conversation; in free mode agents keep their order | passed |
        | 5 | it has no room: too few slots of one worker are free, or too few tokens of its cache | passed |
        | 6 | its prompt is in the cache of a full worker that is worth waiting for | deferred |
        | 7 | any other turn | started |

        No turn behind a blocked one starts now; turns behind a passed one may. With a ``worker`` the turn starts there
        or not at all, like the head of a group or a deferred turn; rows 3, 4 and 6 then do not apply.
        """
        live = self._jobs[turn.key.job_id]
        if live.is_cancelled:
            return ReadyVerdict.ENDED
        is_distrusted = live.is_distrusted or (turn.owner is not None and (turn.owner, model) in self.distrusted)
        if is_distrusted and not turn.is_front:
            return ReadyVerdict.TRIED
        if worker is not None:
            on = self._in_flight.worker(worker)
            fits = on.is_offering and on.fits(self.agent(turn).slots, self.need(turn.key))
            return ReadyVerdict.STARTED if fits else ReadyVerdict.PASSED
        if not self._may_begin(model, turn):
            return ReadyVerdict.BLOCKED
        if (without_room and self._is_behind(without_room, turn)) or not self._has_room(model, turn):
            return ReadyVerdict.PASSED
        return ReadyVerdict.STARTED if self.deferral(model, turn) is None else ReadyVerdict.DEFERRED

    def _may_begin(self, model: str, turn: ReadyTurn) -> bool:
        """Whether a turn's conversation has begun, or may begin now."""
        is_new = self._room.is_bounded and not (turn.is_front or self._conversation(turn.key).is_started)
        return not is_new or self._room.working_set.may_begin(model)

    def _is_behind(self, without_room: Sequence[ReadyTurn], turn: ReadyTurn) -> bool:
        place = turn.key[:2]
        return self._jobs[turn.key.job_id].job.mode is Mode.FREE and any(each.key[:2] == place for each in without_room)

    def _has_room(self, model: str, turn: ReadyTurn) -> bool:
        slots = self.agent(turn).slots
        if slots == 1 and not self._room.is_bounded:
            return True
        return self._in_flight.models[model].best(None, self.need(turn.key), slots) is not None

    def deferral(self, model: str, turn: ReadyTurn) -> tuple[str, float] | None:
        """Return the worker whose cache has a turn's prompt, and the time to wait; None if waiting does not pay."""
        conversation = self._conversation(turn.key)
        cached = conversation.cached(turn.agent_order)
        # In free mode agents keep their order: it decides what the others hear.
        if cached is None or turn.is_front or turn.was_deferred or conversation.live.job.mode is Mode.FREE:
            return None
        on = self._in_flight.worker(cached.worker)
        if on.offer or not on.is_offering or on.model != model:
            return None
        seconds = self._speeds.worth_waiting(model, cached, on.total, self._deferred.count(cached.worker))
        return None if seconds is None else (cached.worker, seconds)

    def agent(self, turn: ReadyTurn) -> Agent:
        """Return the agent of a turn."""
        return self._jobs[turn.key.job_id].conversations[turn.key.conversation_id].agents[turn.agent_order]

    def need(self, key: TurnKey) -> KvNeed:
        """Return the KV need of a turn; nothing if only slots bound it."""
        if not self._room.is_bounded:
            return NOTHING
        conversation = self._conversation(key)
        return self._room.need(key, conversation.agent(key), conversation.definition)

    def _conversation(self, key: TurnKey) -> LiveConversation:
        return self._jobs[key.job_id].conversations[key.conversation_id]


class Dispatcher:
    """Starts the turns that can start; it uses the core's pools, room and jobs in the core's task."""

    def __init__(
        self,
        jobs: Mapping[JobId, LiveJob],
        ready: ReadyPool,
        in_flight: InFlightPool,
        room: RoomKeeper,
        out: list[events.Action],
    ) -> None:
        self._jobs = jobs
        self._ready = ready
        self._in_flight = in_flight
        self._out = out
        self._shifts = Shifts()
        self._room = room
        self.trials = Trials(ready, in_flight)
        self.costs = Costs(ready, in_flight, self.trials)
        self.lending = SlotLending(in_flight, self.costs.speeds)
        self.judge = ReadyJudge(jobs, in_flight, room, ready.deferred, self.costs.speeds)
        self.reserved: dict[TurnKey, int] = {}  # idle slots that wait until a turn on several has all it needs

    def __repr__(self) -> str:
        return f"<Dispatcher {self._ready!r} {self._in_flight!r}>"

    def start_all(self) -> None:
        """Start turns until no free slot is left that one of them may take."""
        self.reserved.clear()
        self._start_trials()
        for model, ready in self._ready.queues.items():
            if ready.has_front:
                self._start_ready(model, ready, front_alone=True)
        self._start_deferred()
        for model, ready in self._ready.queues.items():
            if isinstance(ready, GroupedQueue):
                self._start_grouped(model, ready)
            elif ready:
                self._start_ready(model, ready)
        self._start_trials()  # suspects whose jobs turned out to be distrusted

    def _start_trials(self) -> None:
        if not self._ready.suspects:
            return
        for model, turn, worker in self.trials.due():
            self._start(model, turn, is_suspect=True, worker=worker)

    def _start_ready(self, model: str, ready: ReadyQueue, *, front_alone: bool = False) -> None:
        """Start turns of a queue in order; with ``front_alone`` only those that were on a slot before."""
        passed_over, without_room = 0, list[ReadyTurn]()
        while (ready.has_front if front_alone else ready) and self._in_flight.models[model].has_free:
            if passed_over == PASSED_AT_ONCE:
                self._out.append(events.ContinueDispatch())
                break
            turn = self._first_in_line(ready.pop(), model, ready)
            verdict = self.judge.verdict(turn, model, without_room)
            if verdict is ReadyVerdict.STARTED:
                self._room.note_passed(without_room)
                self._start(model, turn)
            elif verdict is ReadyVerdict.DEFERRED:
                self._room.note_passed(without_room)  # it starts ahead of them too
                self._out.append(self._defer(model, turn))
            elif verdict is ReadyVerdict.PASSED:
                without_room.append(turn)
                if front_alone or not self._may_pass(without_room, model):
                    break
            elif verdict is ReadyVerdict.BLOCKED:
                self._put_back(turn, model, ready)
                break
            else:
                self._set_aside(turn, model, verdict)
                passed_over += 1
        for turn in reversed(without_room):
            # A turn that was passed often enough is next, ahead of its order.
            is_next = not turn.is_front and not self._room.may_pass(turn.key, 0)
            self._put_back(turn.after_deferral() if is_next else turn, model, ready)
        self._end_wide(model, others=len(ready) - len(without_room))

    def _put_back(self, turn: ReadyTurn, model: str, ready: ReadyQueue) -> None:
        self._conversation(turn.key).back_in_line(turn, model)
        ready.push_back(turn)

    def _set_aside(self, turn: ReadyTurn, model: str, verdict: ReadyVerdict) -> None:
        """Let a turn wait outside its queue: for the end of its job, or for its trial."""
        if verdict is ReadyVerdict.ENDED:
            self._ready.count_out(turn.key)
        else:
            self._ready.suspect(turn, model, Trial.LAST)

    def _may_pass(self, without_room: Sequence[ReadyTurn], model: str) -> bool:
        """Whether turns may start behind the last of these, which have no room.

        A worker is reserved for a turn that was passed often enough. Others then start on the model's other workers.
        """
        last = without_room[-1]
        if not self._room.may_pass(last.key, len(without_room)):
            slots = self._in_flight.models[model]
            if slots.is_reserved_for_wide:
                return False
            slots.reserve_for_wide(last.key, self.judge.agent(last).slots)
        return True

    def _end_wide(self, model: str, others: int) -> None:
        """Record the idle slots reserved for a turn on several slots; at most ``others`` turns would take them."""
        ended = self._in_flight.models[model].end_wide()
        if ended is None:
            return
        key, free = ended
        agent = self._conversation(key).agent(key)
        idle = min(free, others, agent.slots - 1)
        if idle > 0:
            self.reserved[key] = idle

    def _start_grouped(self, model: str, ready: GroupedQueue) -> None:
        fronts = ready.heads(1) if ready.has_front else []  # without room: those with room have started
        if not fronts or self._may_pass(fronts, model):
            self._fill_grouped(model, ready, fronts)
            self._end_wide(model, others=len(ready) - 1)

    def _fill_grouped(self, model: str, ready: GroupedQueue, fronts: Sequence[ReadyTurn]) -> None:
        passed_over = 0
        for on in self._in_flight.models[model].offering:
            worker = on.name
            while on.offer:
                if passed_over == PASSED_AT_ONCE:
                    self._out.append(events.ContinueDispatch())
                    return
                head = self._shifts.take_turn(worker, ready, slots=on.total, is_empty=on.free == on.total)
                if head is None:
                    break
                turn = self._first_in_line(head, model, ready)
                verdict = self.judge.verdict(turn, model, worker=worker)
                if verdict is ReadyVerdict.STARTED:
                    self._room.note_passed(fronts)
                    self._start(model, turn, worker=worker)
                    continue
                self._shifts.take_back(worker)  # its slot is still free for another turn
                if verdict is ReadyVerdict.PASSED:
                    self._put_back(turn, model, ready)
                    break
                self._set_aside(turn, model, verdict)
                passed_over += 1

    def _first_in_line(self, turn: ReadyTurn, model: str, ready: ReadyQueue) -> ReadyTurn:
        """Return the turn that starts in place of ``turn``: in free mode the first in its conversation's own line."""
        first = self._conversation(turn.key).first_in_line(turn, model)
        if first is not turn:
            ready.discard(first.key)
            ready.push(turn)
        return first

    def _start_deferred(self) -> None:
        """Start the deferred turns whose worker has a slot for them now."""
        for worker in self._ready.deferred.workers:
            for turn in self._ready.deferred.all_for(worker)[: self._in_flight.worker(worker).offer]:
                model = self._conversation(turn.key).model(turn.key)
                verdict = self.judge.verdict(turn, model, worker=worker)
                if verdict is ReadyVerdict.PASSED:
                    break
                self._ready.deferred.discard(turn.key)
                if verdict is ReadyVerdict.STARTED:
                    self._start(model, turn)
                else:
                    self._set_aside(turn, model, verdict)

    def _defer(self, model: str, turn: ReadyTurn) -> events.DeferTurn:
        """Let a turn wait for the worker whose cache has its prompt; its waiting time begins now."""
        deferral = self.judge.deferral(model, turn)
        assert deferral is not None  # noqa: S101 - the verdict says so
        worker, seconds = deferral
        self._ready.deferred.put(turn, worker)
        return events.DeferTurn(key=turn.key, worker=worker, seconds=seconds)

    def _start(self, model: str, turn: ReadyTurn, *, is_suspect: bool = False, worker: str | None = None) -> None:
        key = turn.key
        conversation = self._conversation(key)
        cached = conversation.cached(turn.agent_order)
        need = self.judge.need(key)
        live = conversation.live
        agent = conversation.agents[turn.agent_order]
        if worker is None:
            best = self._in_flight.models[model].best(cached.worker if cached else None, need, agent.slots)
            assert best is not None  # noqa: S101 - the dispatcher has looked
            worker = best.name
        slots = self._in_flight.add(key, worker, need, slots=agent.slots, is_suspect=is_suspect)
        self._ready.note_start(turn, model)
        self._room.note_start(key, agent, hears_all=live.job.mode is not Mode.ROUNDS)
        if not is_suspect:
            self.trials.note_start(model)
        self._ready.count_out(key)
        if not conversation.is_started:
            conversation.is_started = True
            for sibling in conversation.open:
                self._ready.note_begun(sibling, conversation.model(sibling))
            self._out.append(events.ConversationStarted(job_id=key.job_id, conversation_id=key.conversation_id))
        self._out.append(events.StartTurn(key=key, worker=worker, slots=slots, is_suspect=is_suspect))

    def _conversation(self, key: TurnKey) -> LiveConversation:
        return self._jobs[key.job_id].conversations[key.conversation_id]
