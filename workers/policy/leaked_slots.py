"""Whether an engine frees the slots of requests that are gone. Pure.

The engine's slots and our requests are two lists without a common name: a slot tells its task, and which request that
is, no endpoint says. So they are counted. A task that has been seen for the whole limit belongs to a request that is as
old: one that is still in flight, or one that was cut off within the limit and may take that long to go. Where there are
more such tasks than such requests, some slot is held for no request. Only tasks that do not get on are counted: one
that does may be another client's, and a counter that rises vetoes every kill.
"""

from collections.abc import Collection

import msgspec

from transport.counters import EngineCounters, SlotWork


class SlotTasks:
    """Keeps of each task when it was first seen and when it last got on, in monotonic seconds."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[SlotWork, float, float]] = {}

    def __repr__(self) -> str:
        return f"<SlotTasks {len(self._seen)}>"

    def observe_slots(self, counters: EngineCounters, now: float) -> None:
        """Take a look at all slots; tasks that are over are forgotten."""
        seen = {}
        for work in counters.busy_work:
            before, first_at, advanced_at = self._seen.get(work.task, (work, now, now))
            seen[work.task] = (work, first_at, advanced_at if before == work else now)
        self._seen = seen

    def newest_advance(self, since: float, until: float) -> float | None:
        """Return when one that was first seen within that time last got on; None where there is none."""
        within = (advanced_at for _, first_at, advanced_at in self._seen.values() if since <= first_at <= until)
        return max(within, default=None)


class CutOff(msgspec.Struct, frozen=True, kw_only=True):
    """A generation that was ended before the engine had; in monotonic seconds."""

    started_at: float
    ended_at: float


class LeakedSlots:
    """Keeps when each task was first seen, and which requests were cut off lately."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._cut_off: dict[CutOff, float | None] = {}  # to the first look after it
        self._seen: dict[int, tuple[SlotWork, float]] = {}  # a task's last advance, and when it was first seen

    def __repr__(self) -> str:
        return f"<LeakedSlots cut_off={len(self._cut_off)} tasks={len(self._seen)}>"

    @property
    def is_armed(self) -> bool:
        """Whether any slot has still to come free, so that looking makes sense."""
        return bool(self._cut_off)

    def note_cut_off(self, cut_off: CutOff) -> None:
        """Take a generation that was ended from our side."""
        self._cut_off[cut_off] = None

    def drop_before(self, ended_at: float) -> None:
        """Forget what was cut off longer ago: of an engine that tells no counters nothing else is learned of it."""
        self._cut_off = {each: at for each, at in self._cut_off.items() if each.ended_at > ended_at}

    def is_overdue(self, counters: EngineCounters, in_flight: Collection[float], asked_at: float, now: float) -> bool:
        """Take a fresh look, and return whether a slot works for no request.

        ``in_flight`` are the starts of all generations that waited for the engine at ``asked_at``, before it was asked:
        one that has ended since may be in the look.
        """
        self._seen = {work.task: self._last_advance(work, now) for work in counters.busy_work}
        since = now - self._limit_s
        held = sum(seen_at <= since for _, seen_at in self._seen.values())
        owners = sum(started_at <= since for started_at in in_flight)
        leaving = sum(each.started_at <= since < each.ended_at for each in self._cut_off)
        if held > owners + leaving:
            return True
        # What a cut-off has left was seen by its first look, and is judged once it has been seen for the limit.
        looked = {each: now if at is None and each.ended_at <= asked_at else at for each, at in self._cut_off.items()}
        self._cut_off = {each: at for each, at in looked.items() if at is None or at > since}
        if not self._cut_off:
            self._seen = {}
        return False

    def _last_advance(self, work: SlotWork, now: float) -> tuple[SlotWork, float]:
        before = self._seen.get(work.task)
        return before if before is not None and before[0] == work else (work, now)
