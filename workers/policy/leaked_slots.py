"""Whether an engine frees the slots of requests that are gone. Pure.

The engine's slots and our requests share no name: a slot reports its task, but no endpoint says which request that is.
So they are counted. A task that has been seen for the whole limit belongs to a request at least that old: one still in
flight, or one that was cut off within the limit and may take that long to go. If there are more such tasks than such
requests, some slot is held for no request. Only tasks without progress count: one that progresses may be another
client's, and a rising counter vetoes every kill.
"""

from collections.abc import Collection

import msgspec

from transport.counters import EngineCounters, SlotWork


class SlotTasks:
    """Keeps for each task when it was first seen and when it last progressed, in monotonic seconds."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[SlotWork, float, float]] = {}

    def __repr__(self) -> str:
        return f"<SlotTasks {len(self._seen)}>"

    def observe_slots(self, counters: EngineCounters, now: float) -> None:
        """Take a look at all slots; ended tasks are forgotten."""
        seen = {}
        for work in counters.busy_work:
            before, first_at, advanced_at = self._seen.get(work.task, (work, now, now))
            seen[work.task] = (work, first_at, advanced_at if before == work else now)
        self._seen = seen

    def newest_advance(self, since: float, until: float) -> float | None:
        """Return when a task that was first seen within that time last progressed; None without one."""
        within = (advanced_at for _, first_at, advanced_at in self._seen.values() if since <= first_at <= until)
        return max(within, default=None)


class CutOff(msgspec.Struct, frozen=True, kw_only=True):
    """A generation that was ended before the engine had finished; in monotonic seconds."""

    started_at: float
    ended_at: float


class LeakedSlots:
    """Keeps when each task was first seen, and which requests were cut off lately."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._overdue_since: float | None = None  # since when a slot works for no request
        self._cut_off: dict[CutOff, float | None] = {}  # values: time of the first look after it
        self._seen: dict[int, tuple[SlotWork, float]] = {}  # a task's last progress, and when that was first seen

    def __repr__(self) -> str:
        return f"<LeakedSlots cut_off={len(self._cut_off)} tasks={len(self._seen)}>"

    @property
    def is_armed(self) -> bool:
        """Whether a slot has yet to come free, so that looking makes sense."""
        return bool(self._cut_off)

    def note_cut_off(self, cut_off: CutOff) -> None:
        """Record a generation that we ended."""
        self._cut_off[cut_off] = None

    def drop_before(self, ended_at: float) -> None:
        """Forget older cut-offs: nothing more is learned of them from an engine without counters."""
        self._cut_off = {each: at for each, at in self._cut_off.items() if each.ended_at > ended_at}

    def overdue_s(
        self, counters: EngineCounters, in_flight: Collection[float], asked_at: float, now: float
    ) -> float | None:
        """Take a fresh look, and return for how long a slot has worked for no request; None if none does.

        ``in_flight`` are the starts of all generations that waited for the engine at ``asked_at``, before the look: one
        that ended since may still be in it.
        """
        self._seen = {work.task: self._last_advance(work, now) for work in counters.busy_work}
        since = now - self._limit_s
        held = sum(seen_at <= since for _, seen_at in self._seen.values())
        owners = sum(started_at <= since for started_at in in_flight)
        leaving = sum(each.started_at <= since < each.ended_at for each in self._cut_off)
        if held > owners + leaving:
            self._overdue_since = now if self._overdue_since is None else self._overdue_since
            return now - self._overdue_since
        self._overdue_since = None
        # The first look after a cut-off sees its tasks, which are judged once they have been seen for the limit.
        looked = {each: now if at is None and each.ended_at <= asked_at else at for each, at in self._cut_off.items()}
        self._cut_off = {each: at for each, at in looked.items() if at is None or at > since}
        if not self._cut_off:
            self._seen = {}
        return None

    def _last_advance(self, work: SlotWork, now: float) -> tuple[SlotWork, float]:
        before = self._seen.get(work.task)
        return before if before is not None and before[0] == work else (work, now)
