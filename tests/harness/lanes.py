"""Models that swap in virtual time, compared with Belady and LRU.

Requests of several models arrive at fewer lanes; the decisions are those of a service (``workers.policy.placement``).
Belady and LRU serve strictly in the order of arrival.
"""

import heapq
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from workers.policy.lane_life import LanePhase
from workers.policy.placement import (
    AHEAD,
    AssignLane,
    Heat,
    LaneView,
    LeaveLane,
    LoadModel,
    ModelDemand,
    Placement,
    PlacementAction,
    SwapRule,
)

LOAD_S = 2.0
PART_MIB = 100
Arrival = tuple[float, str, float]  # time, model and duration


@dataclass
class Lane:
    """A lane with one slot."""

    id: str
    phase: LanePhase = LanePhase.EMPTY
    resident: str | None = None
    next: str | None = None
    in_flight: int = 0
    used_at: float = 0.0

    def view(self) -> LaneView:
        """Return the lane as decisions see it."""
        return LaneView(
            id=self.id,
            device="gpu",
            memory_mib=PART_MIB,
            phase=self.phase,
            resident=self.resident,
            next=self.next,
            in_flight=self.in_flight,
            used_at=self.used_at,
        )


@dataclass
class Outcome:
    """The result of one run."""

    swaps: int = 0
    waits: list[tuple[float, float]] = field(default_factory=list)  # each with the work that was there before, in s
    queued: list[int] = field(default_factory=list)  # how many waited, at each arrival

    @property
    def worst(self) -> float:
        """The longest wait, relative to the work that arrived before it and its own load."""
        return max(wait / (before + LOAD_S) for wait, before in self.waits)


class Simulation:
    """Runs arrivals to their ends in virtual time."""

    def __init__(self, arrivals: Sequence[Arrival], lanes: int, rule: SwapRule) -> None:
        self.outcome = Outcome()
        self._arrivals = arrivals
        self._lanes = {f"lane-{number}": Lane(id=f"lane-{number}") for number in range(lanes)}
        self._placement = Placement({"gpu": lanes * PART_MIB}, rule)
        self._names = sorted({model for _, model, _ in arrivals})
        self._waiting: dict[str, deque[int]] = {name: deque() for name in self._names}
        self._since: dict[str, float] = {}
        self._heat = Heat()
        self._open: dict[int, float] = {}  # unfinished requests, and their largest cost
        self._before: dict[int, float] = {}
        self._count = len(arrivals)
        self._pending = [(at, number, "arrival", "", number) for number, (at, _, _) in enumerate(arrivals)]

    def run(self) -> Outcome:
        """Return the result."""
        while self._pending:
            now, _, kind, lane, number = heapq.heappop(self._pending)
            self._take(now, kind, lane, number)
            while self._act(now):
                pass
        assert len(self.outcome.waits) == len(self._arrivals)
        return self.outcome

    def _later(self, at: float, kind: str, lane: str = "", number: int = 0) -> None:
        self._count += 1
        heapq.heappush(self._pending, (at, self._count, kind, lane, number))

    def _take(self, now: float, kind: str, lane: str, number: int) -> None:
        if kind == "arrival":
            _, model, work_s = self._arrivals[number]
            self.outcome.queued.append(sum(map(len, self._waiting.values())))
            self._before[number] = sum(self._open.values())
            self._open[number] = work_s + LOAD_S
            self._waiting[model].append(number)
            self._heat.note(model)
        elif kind == "ended":
            self._lanes[lane].in_flight = 0
            del self._open[number]
        elif kind == "ready":
            self._lanes[lane].phase, self._lanes[lane].used_at = LanePhase.READY, now

    def _act(self, now: float) -> bool:
        """Do what is due at one moment; return whether more may follow from it at once."""
        for lane in self._lanes.values():
            self._start(lane, now)
            if lane.phase is LanePhase.LEAVING and not lane.in_flight:
                lane.phase, lane.resident = LanePhase.EMPTY, None
        views, models = [lane.view() for lane in self._lanes.values()], self._demand(now)
        for action in self._placement.decide(views, models, now):
            self._carry_out(action, now)
        look = self._placement.next_look(views, models, now)
        if look is not None and any(self._waiting.values()):
            self._later(look, "look")
        return any(lane.phase is LanePhase.LEAVING and not lane.in_flight for lane in self._lanes.values())

    def _start(self, lane: Lane, now: float) -> None:
        if lane.phase is not LanePhase.READY or lane.in_flight or not self._waiting[str(lane.resident)]:
            return
        number = self._waiting[str(lane.resident)].popleft()
        lane.in_flight, lane.used_at = 1, now
        self.outcome.waits.append((now - self._arrivals[number][0], self._before[number]))
        self._later(now + self._arrivals[number][2], "ended", lane.id, number)

    def _demand(self, now: float) -> list[ModelDemand]:
        there = {lane.next or lane.resident for lane in self._lanes.values()}
        for name in self._names:
            if name in there or not self._waiting[name]:
                self._since.pop(name, None)
            else:
                self._since.setdefault(name, now)
        return [
            ModelDemand(
                name=name,
                waiting=len(self._waiting[name]),
                first=tuple(islice(self._waiting[name], AHEAD)),
                waits_since=self._since.get(name),
                heat=self._heat.of_model(name),
            )
            for name in self._names
        ]

    def _carry_out(self, action: PlacementAction, now: float) -> None:
        lane = self._lanes[action.lane]
        match action:
            case AssignLane():
                lane.next = action.model
                for leaving in action.leaving:
                    self._lanes[leaving].phase = LanePhase.LEAVING
            case LoadModel():
                lane.phase, lane.resident, lane.next = LanePhase.LOADING, action.model, None
                self.outcome.swaps += 1
                self._later(now + LOAD_S, "ready", lane.id)
            case LeaveLane():
                lane.phase = LanePhase.LEAVING


def lru(models: Sequence[str], room: int) -> int:
    """Count the loads of evicting the least recently used model."""
    there: list[str] = []
    loads = 0
    for model in models:
        if model in there:
            there.remove(model)
        else:
            loads += 1
            del there[: max(0, len(there) - room + 1)]
        there.append(model)
    return loads


def belady(models: Sequence[str], room: int) -> int:
    """Count the loads with a known future, evicting the model that is needed last."""
    after: dict[str, deque[int]] = {}
    for place, model in enumerate(models):
        after.setdefault(model, deque()).append(place)
    there: set[str] = set()
    loads = 0
    for model in models:
        after[model].popleft()
        if model in there:
            continue
        loads += 1
        if len(there) == room:
            there.remove(max(there, key=lambda each: after[each][0] if after[each] else len(models)))
        there.add(model)
    return loads


def mixes(requests: int, models: int, rate: float, seed: int = 1) -> Iterator[tuple[str, list[Arrival]]]:
    """Yield three mixes: equal demand, unequal demand, and demand in bursts."""
    names = [chr(ord("a") + number) for number in range(models)]
    for kind in ("uniform", "skewed", "bursts"):
        chance, at, arrivals, last = random.Random(f"{kind}{seed}"), 0.0, [], names[0]  # noqa: S311
        for _ in range(requests):
            at += chance.expovariate(rate)
            if kind == "uniform":
                last = chance.choice(names)
            elif kind == "skewed":
                last = chance.choices(names, [1 / (place + 1) for place in range(models)])[0]
            elif chance.random() < 0.2:
                last = chance.choice(names)
            arrivals.append((at, last, chance.uniform(0.2, 0.6)))
        yield kind, arrivals
