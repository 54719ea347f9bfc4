"""Which model goes to which lane, and which leaves for it: the present state in, actions out. Pure.

A lane holds one model at a time. Memory decides what fits: models share a device as long as its room lasts. Neither a
request in flight nor a loading engine is ever ended for another: a reassigned lane takes no new turns, and loads the
other model when it is empty.

Source: specification, "Models on demand"; L. Belady, "A study of replacement algorithms for a virtual-storage computer"
(1966), for whom to evict: the model that is needed last. Waiting turns show that need; among models without any, the
one that is requested least stands in for it (``heat``).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final

import msgspec
from msgspec.structs import replace

from workers.policy.lane_life import LanePhase

HALF_LIFE: Final = 8.0  # in requests of all models
PATIENCE_S: Final = 60.0  # how long ``few`` lets a model wait while others on lanes have turns
AHEAD: Final = 16  # turns of a model whose places in the order are known
FIRST: Final = -1  # before every turn that waits
NEVER: Final = 2**62  # after every turn


class Heat:
    """Counts requests of each model; older ones count less."""

    def __init__(self) -> None:
        self._noted: dict[str, tuple[float, int]] = {}  # its heat, and the number of all requests at that time
        self._requests = 0

    def __repr__(self) -> str:
        return f"<Heat of {len(self._noted)} models>"

    def note(self, model: str) -> None:
        """Count a request."""
        self._requests += 1
        self._noted[model] = self.of_model(model) + 1.0, self._requests

    def of_model(self, model: str) -> float:
        """Return a model's present heat."""
        heat, at = self._noted.get(model, (0.0, 0))
        return float(heat * 0.5 ** ((self._requests - at) / HALF_LIFE))


class SwapRule(StrEnum):
    """The rule by which models get a lane when there are more of them than room."""

    FAIR = "fair"  # the model that has waited longest gets the next free lane
    FEW = "few"  # a model stays while turns of it wait, up to a bound


class LaneView(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a lane: ``resident`` is the model whose engine holds its memory, ``next`` the one it is kept for.

    ``used_at`` is when a turn last started there, in the seconds of ``now``. ``barred`` are models that failed there.
    """

    id: str
    device: str
    memory_mib: int | None
    phase: LanePhase = LanePhase.EMPTY
    resident: str | None = None
    next: str | None = None
    in_flight: int = 0
    slots: int = 1
    used_at: float = 0.0
    barred: frozenset[str] = frozenset()
    idle_since: float = 0.0  # when the last turn there ended, or its engine got ready
    is_held: bool = False  # an operator wants no new turns there
    is_changed: bool = False  # its weights or adapters are being changed or written

    @property
    def planned(self) -> str | None:
        """The model that is or will be there when every begun step is done."""
        return self.next or (None if self.phase is LanePhase.LEAVING else self.resident)


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """The turns that wait for a model: their number, and the places of the first in the order of arrival.

    ``is_full`` says that the KV caches of its ready lanes have no room for the next, whatever slots are free.
    """

    count: int = 0
    first: tuple[int, ...] = ()
    is_full: bool = False
    is_asked: bool = False  # no turn waits: an operator wants it loaded


class ModelDemand(msgspec.Struct, frozen=True, kw_only=True):
    """A model, and the turns that wait for it.

    ``need_mib`` is its need on a device, None if unknown: then a whole lane's part. ``first`` are the numbers of its
    longest waiting turns, up to ``AHEAD``, in the order of arrival over all models; ``is_full`` says that its ready
    lanes have no room for the next of them. ``waits_since`` is the time since which turns wait without a lane of it.
    ``keep_s`` is how long it stays idle, None is until its lane is needed.
    """

    name: str
    need_mib: int | None = None
    is_pinned: bool = False
    keep_s: float | None = None
    waiting: int = 0
    first: tuple[int, ...] = ()
    is_full: bool = False
    is_asked: bool = False
    waits_since: float | None = None
    heat: float = 0.0  # how much it was requested lately
    hint: str | None = None  # the lane that it goes to first

    @property
    def oldest(self) -> int:
        """The number of the turn that has waited longest."""
        return self.first[0] if self.first else NEVER

    def next_after(self, order: int) -> int:
        """Return the number of its first turn after a place in the order of arrival."""
        return next((each for each in self.first if each > order), NEVER)


class AssignLane(msgspec.Struct, frozen=True, kw_only=True):
    """Keep a lane for a model; the lanes in ``leaving``, usually itself among them, take no new turns."""

    lane: str
    model: str
    leaving: tuple[str, ...]
    because: str


class LoadModel(msgspec.Struct, frozen=True, kw_only=True):
    """Start the engine of the model that a lane is kept for: there is room."""

    lane: str
    model: str


class LeaveLane(msgspec.Struct, frozen=True, kw_only=True):
    """End an engine when its turns have ended."""

    lane: str
    because: str


PlacementAction = AssignLane | LoadModel | LeaveLane


class Placement:
    """Decides for the lanes of one machine; ``rooms`` are the MiB that each device's lanes may fill together."""

    def __init__(self, rooms: Mapping[str, int | None], rule: SwapRule, patience_s: float = PATIENCE_S) -> None:
        self._rooms = rooms
        self.rule = rule
        self._patience_s = patience_s

    def __repr__(self) -> str:
        return f"<Placement {self.rule} {dict(self._rooms)}>"

    def decide(self, lanes: Sequence[LaneView], models: Iterable[ModelDemand], now: float) -> list[PlacementAction]:
        """Return the placement actions for now."""
        moment = _Moment(self._rooms, lanes, models)
        return [
            *self._leave_idle(moment, now),
            *(action for model in self._in_order(moment, now) for action in self._place(moment, model, now)),
            *_add_replicas(moment),
            *_load(moment),
        ]

    def next_look(self, lanes: Sequence[LaneView], models: Iterable[ModelDemand], now: float) -> float | None:
        """Return when the next action is due if nothing happens before; None is never."""
        by_name = {model.name: model for model in models}
        ends = [
            lane.idle_since + keep_s
            for lane in lanes
            if lane.phase is LanePhase.READY
            and lane.resident is not None
            and (keep_s := by_name[lane.resident].keep_s) is not None
            and not by_name[lane.resident].is_pinned
        ]
        if self.rule is SwapRule.FEW:
            ends += [
                model.waits_since + self._patience_s for model in by_name.values() if model.waits_since is not None
            ]
        return min((end for end in ends if end > now), default=None)

    def _leave_idle(self, moment: "_Moment", now: float) -> Iterator[LeaveLane]:
        for lane in list(moment.lanes.values()):
            model = moment.models.get(lane.resident or "")
            if lane.phase is not LanePhase.READY or lane.in_flight or model is None or model.keep_s is None:
                continue
            is_idle = not model.waiting and not model.is_pinned and not lane.is_changed
            if is_idle and now - lane.idle_since >= model.keep_s:
                moment.lanes[lane.id] = replace(lane, phase=LanePhase.LEAVING)
                yield LeaveLane(lane=lane.id, because=f"{model.name} was idle for {model.keep_s:g} s")

    def _in_order(self, moment: "_Moment", now: float) -> list[ModelDemand]:
        """Return the models that wait for a lane, in the order in which they get one."""
        there = {lane.planned for lane in moment.lanes.values() if lane.next or _serves(lane)}
        unplaced = [model for model in moment.models.values() if model.name not in there]
        pinned = [model for model in unplaced if model.is_pinned]
        waiting = [model for model in unplaced if model.waiting and not model.is_pinned]
        if self.rule is SwapRule.FAIR:
            return pinned + sorted(waiting, key=lambda model: model.oldest)
        return pinned + sorted(
            waiting,
            key=lambda model: (0, model.oldest) if self._is_overdue(model, now) else (1, -model.waiting, model.oldest),
        )

    def _is_overdue(self, model: ModelDemand, now: float) -> bool:
        return model.waits_since is not None and now - model.waits_since >= self._patience_s

    def _place(self, moment: "_Moment", model: ModelDemand, now: float) -> Iterator[AssignLane]:
        oldest = FIRST if model.is_pinned else model.oldest
        is_patient = self.rule is SwapRule.FEW and not self._is_overdue(model, now) and not model.is_pinned

        def may_swap(resident: ModelDemand, lane: LaneView) -> bool:
            if is_patient:
                return not resident.waiting and not lane.in_flight
            return not resident.waiting or resident.oldest > oldest

        def may_leave(lane: LaneView) -> bool:
            resident = moment.models.get(lane.resident or "")
            if lane.next is not None or lane.phase is LanePhase.LOADING or lane.is_held or lane.is_changed:
                return False
            if resident is None or lane.phase in {LanePhase.EMPTY, LanePhase.LEAVING, LanePhase.BROKEN}:
                return True
            return not resident.is_pinned and may_swap(resident, lane)

        chosen = moment.cheapest(model, may_leave)
        if chosen is not None and (self.rule is SwapRule.FEW or not moment.has_better(chosen, model)):
            yield moment.assign(chosen, model, _reason(model))


class _Moment:
    """The lanes at present, changed by the decisions so far."""

    def __init__(
        self, rooms: Mapping[str, int | None], lanes: Sequence[LaneView], models: Iterable[ModelDemand]
    ) -> None:
        self.rooms = rooms
        self.lanes = {lane.id: lane for lane in lanes}
        self.models = {model.name: model for model in models}
        self._numbers = {lane.id: number for number, lane in enumerate(lanes)}

    def need(self, lane: LaneView, model: str | None) -> int:
        """Return the MiB that a model takes on a lane."""
        if model is None:
            return 0
        known = self.models[model].need_mib if model in self.models else None
        return (lane.memory_mib or 0) if known is None else known

    def cheapest(self, model: ModelDemand, may_leave: Callable[[LaneView], bool]) -> list[LaneView] | None:
        """Return the lane for a model, then those that must leave with it; None if there is no lane."""
        ways = [
            way
            for lane in self.lanes.values()
            if may_leave(lane) and _may_load(lane, model) and (way := self._way(lane, model, may_leave))
        ]
        return min(ways, key=lambda way: self._cost(way, model), default=None)

    def _way(self, lane: LaneView, model: ModelDemand, may_leave: Callable[[LaneView], bool]) -> list[LaneView] | None:
        room = self.rooms[lane.device]
        if room is None:
            return [lane]
        others = [each for each in self.lanes.values() if each.device == lane.device and each.id != lane.id]
        free = room - sum(self.need(each, each.planned) for each in others) - self.need(lane, model.name)
        way = [lane]
        for other in sorted((each for each in others if each.planned and may_leave(each)), key=self._last_needed):
            if free >= 0:
                break
            free += self.need(other, other.planned)
            way.append(other)
        return way if free >= 0 else None

    def _cost(self, way: list[LaneView], model: ModelDemand) -> tuple[object, ...]:
        lane = way[0]
        busy = [each for each in way if each.phase is LanePhase.READY]
        beside = sum(
            each.planned is not None for each in self.lanes.values() if each.device == lane.device and each not in way
        )
        return (
            len(busy),
            lane.id != model.hint if model.hint else False,
            any(each.in_flight for each in busy),  # free lanes are free sooner
            [self._last_needed(each) for each in busy],
            beside,  # distinct devices first
            self._numbers[lane.id],
        )

    def has_better(self, way: list[LaneView], model: ModelDemand) -> bool:
        """Whether to wait for a promised lane, whose model is needed later than those of ``way``.

        Only if one wave of turns frees it; the model it is promised to is older, so the order holds.
        """
        soonest = min((self._next_need(lane, model.oldest) for lane in way), default=NEVER)
        if soonest == NEVER:
            return False
        for lane in self.lanes.values():
            coming = self.models.get(lane.planned or "")
            if coming is None or lane.id in {each.id for each in way} or coming.oldest > model.oldest:
                continue
            older = sum(each < model.oldest for each in coming.first)
            if older <= lane.slots and coming.next_after(model.oldest) > soonest:
                return True
        return False

    def _next_need(self, lane: LaneView, order: int) -> int:
        resident = self.models.get(lane.resident or "")
        return NEVER if resident is None else resident.next_after(order)

    def _last_needed(self, lane: LaneView) -> tuple[float, ...]:
        """Return a key that sorts lanes by their resident's next need, the last one first."""
        resident = self.models.get(lane.resident or "")
        if resident is None:
            return (0, 0.0, lane.used_at)
        return (1, -resident.oldest) if resident.waiting else (0, resident.heat, lane.used_at)

    def assign(self, way: list[LaneView], model: ModelDemand, because: str) -> AssignLane:
        """Keep a lane for a model, and return the action."""
        leaving = tuple(lane.id for lane in way if lane.phase in {LanePhase.READY, LanePhase.BROKEN})
        for lane in way:
            phase = LanePhase.LEAVING if lane.id in leaving else lane.phase
            self.lanes[lane.id] = replace(lane, phase=phase, next=model.name if lane is way[0] else None)
        return AssignLane(lane=way[0].id, model=model.name, leaving=leaving, because=because)


def _reason(model: ModelDemand) -> str:
    if model.is_asked:
        return "an operator asked to load it"
    return "a turn of it waits" if model.waiting else "it is pinned"


def _serves(lane: LaneView) -> bool:
    return lane.phase is not LanePhase.BROKEN and not lane.is_held


def _may_load(lane: LaneView, model: ModelDemand) -> bool:
    """Whether a model may be tried on a lane: where it has just failed it waits for its own next start."""
    return model.name not in lane.barred and not (lane.phase is LanePhase.BROKEN and lane.resident == model.name)


def _add_replicas(moment: _Moment) -> Iterator[AssignLane]:
    """Give empty lanes to models with more waiting turns than room; never evict for it."""
    for model in sorted(moment.models.values(), key=lambda each: each.oldest):
        lanes = [lane for lane in moment.lanes.values() if lane.planned == model.name]
        open_lanes = [lane for lane in lanes if _serves(lane) and not (model.is_full and lane.phase is LanePhase.READY)]
        if not lanes or model.waiting <= sum(lane.slots - lane.in_flight for lane in open_lanes):
            continue

        def is_empty(lane: LaneView) -> bool:
            return lane.phase is LanePhase.EMPTY and lane.next is None and not lane.is_held

        chosen = moment.cheapest(model, is_empty)
        if chosen is not None:
            yield moment.assign(chosen, model, "more turns of it wait than it has room for")


def _load(moment: _Moment) -> Iterator[LoadModel]:
    """Load the models that lanes are kept for, if the memory is free now."""
    for lane in list(moment.lanes.values()):
        if lane.phase is not LanePhase.EMPTY or lane.next is None:
            continue
        room = moment.rooms[lane.device]
        held = sum(
            moment.need(each, each.resident)
            for each in moment.lanes.values()
            if each.device == lane.device and each.phase is not LanePhase.EMPTY
        )
        if room is None or held + moment.need(lane, lane.next) <= room:
            moment.lanes[lane.id] = replace(lane, phase=LanePhase.LOADING, resident=lane.next, next=None)
            yield LoadModel(lane=lane.id, model=lane.next)
