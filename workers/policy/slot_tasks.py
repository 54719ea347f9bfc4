"""Which tasks of an engine's slots may be one request's. Pure.

No endpoint tells whose request a task is. But a request of ours that has a slot has it from its beginning on: as many
are in flight as there are slots. So a task that was there before the request began is not its own, and neither is one
that came long after. Where no other task gets on, the request is held and not served, whatever else the engine does.
"""

from transport.counters import EngineCounters, SlotWork


class SlotTasks:
    """Keeps of each task when it was first seen and when it last got on, in monotonic seconds."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[SlotWork, float, float]] = {}

    def __repr__(self) -> str:
        return f"<SlotTasks {len(self._seen)}>"

    def take(self, counters: EngineCounters, now: float) -> None:
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
