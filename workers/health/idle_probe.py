"""Finds an engine that died or hangs while it has nothing to do: the next turn should not be the one to find out."""

from collections.abc import Callable
from typing import Final

from workers.health.engine_owner import EngineOwner
from workers.health.probes import ProbeResult, Probes
from workers.outcome import FailureReason

PROBE_S: Final = 15.0  # between two probes
PROBES_REFUSED: Final = 3


class IdleProbe:
    """Asks whether an engine without work is ready, now and then; ``limit_s`` bounds its silence, None never does."""

    def __init__(
        self,
        probes: Probes,
        owner: EngineOwner,
        limit_s: float | None,
        is_idle: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._probes = probes
        self._owner = owner
        self._limit_s = limit_s
        self._is_idle = is_idle
        self._clock = clock
        self.begin()

    def __repr__(self) -> str:
        return f"<IdleProbe refusals={self._refusals}>"

    def begin(self) -> None:
        """Begin anew, with another engine."""
        self._refusals = 0
        self._silent_since: float | None = None
        self._due_at = self._clock() + PROBE_S

    def is_due(self, now: float) -> bool:
        """Whether the engine is to be asked now; the next time is later."""
        if now < self._due_at:
            return False
        self._due_at = now + PROBE_S
        return True

    async def run(self) -> None:
        """Ask once; have an engine replaced that refuses again and again, or is silent for too long."""
        result = await self._probes.probe()
        now = self._clock()
        if result is ProbeResult.ANSWERED or not self._is_idle():
            self._refusals, self._silent_since = 0, None
            return
        self._silent_since = now if self._silent_since is None else self._silent_since
        self._refusals = self._refusals + 1 if result is ProbeResult.REFUSED else 0
        is_hung = self._limit_s is not None and now - self._silent_since >= self._limit_s
        if self._refusals >= PROBES_REFUSED or is_hung:
            reason = FailureReason.ENGINE_UNREACHABLE
            because = f"{reason}: without work it has not answered for {now - self._silent_since:.0f} s"
            self._owner.break_engine(reason, because, {})
