"""The watch over one engine: it looks, has ``policy.liveness`` judge, and ends what is stalled. Beside the token path.

Before an engine is killed it may sing once more: a canary, one token's worth. An engine that sings is not killed; only
the request that got nothing ends.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol

import anyio
from anyio.abc import TaskGroup

from workers.health.evidence import LOOK_S, EngineSight, Signs
from workers.health.incident import RequestView
from workers.health.probes import Probe, Song, Vitals
from workers.outcome import EngineFailed, FailureReason
from workers.policy.leaked_slots import CutOff, SlotRelease
from workers.policy.liveness import SEVERITY, Judgement, Scope, Verdict, is_computing, judge, quiet_s
from workers.requests.answer import Phase
from workers.requests.in_flight import Flight, Flights
from workers.requests.tool_loop import looped
from workers.spec import WorkerTimeouts

TICK_S: Final = 0.5  # with requests in flight: repetition is found within it, and every limit is overrun by no more
IDLE_TICK_S: Final = 1.0
TICKS_A_LIMIT: Final = 8
PROBE_S: Final = 15.0  # between two probes of an engine that has nothing to do
PROBES_REFUSED: Final = 3
CANARY_S: Final = 5.0  # with the last look, a hang is killed within ten seconds of its limit
LAST_LOOK_S: Final = 3.0
FROZEN_S: Final = 3.0  # between two ticks
THAW_S: Final = 2 * LOOK_S + 1.0  # two looks make a comparison
logger = logging.getLogger(__name__)


class Watched(Protocol):
    """What the watch can do to a worker."""

    @property
    def is_serving(self) -> bool:
        """Whether there is an engine that is ready."""

    @property
    def is_starting(self) -> bool:
        """Whether there is one that is not ready yet."""

    @property
    def owns_engine(self) -> bool:
        """Whether it is ours to kill; of somebody else's only the request that gets nothing ends."""

    def break_engine(self, reason: FailureReason, because: str, suspects: Mapping[Flight, FailureReason]) -> None:
        """Kill the present engine, and start another; ``suspects`` are the requests that may have caused it."""


class Watch:
    """Judges every request in flight, for as long as ``run`` runs."""

    def __init__(
        self,
        flights: Flights,
        vitals: Vitals,
        timeouts: WorkerTimeouts,
        watched: Watched,
        clock: Callable[[], float],
    ) -> None:
        self._flights = flights
        self._vitals = vitals
        self._limits = timeouts.stall
        self._cancel_s = timeouts.cancel_s
        self._release = SlotRelease(timeouts.cancel_s or 0.0)
        self._overdue_since: float | None = None  # a slot is busy for nobody
        self._watched = watched
        self._clock = clock
        self.signs = Signs(flights, vitals, clock, may_queue=not watched.owns_engine)
        limits = [limit for limit in (timeouts.prefill_stall_s, timeouts.decode_stall_s, timeouts.cancel_s) if limit]
        self._tightest_s = min(limits, default=CANARY_S * TICKS_A_LIMIT)
        self._look_due_at = clock()
        self._probe_due_at = clock() + PROBE_S
        self._refusals = 0
        self._silent_since: float | None = None
        self._ticked_at: float | None = None
        self._judges_from = clock()
        self._is_looking = False
        self._is_confirming = False
        self._is_paused = False

    def __repr__(self) -> str:
        """State what is watched."""
        return f"<Watch {self._flights!r} {self.signs!r}>"

    async def run(self) -> None:
        """Watch until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                tick_s = TICK_S if len(self._flights) or self._release.is_armed else IDLE_TICK_S
                await anyio.sleep(min(tick_s, self._tightest_s / TICKS_A_LIMIT))
                self.tick(tasks)

    def begin(self) -> None:
        """Take the fact that a new incarnation is there."""
        self.signs.forget()
        self._refusals, self._silent_since = 0, None
        self._release = SlotRelease(self._cancel_s or 0.0)
        self._overdue_since = None
        self._probe_due_at = self._clock() + PROBE_S
        self._is_paused = False

    async def calibrate(self) -> None:
        """Learn how fast the engine reads, where nothing has told: its first prompt may be a long one."""
        if self.signs.pace.tokens_per_s is None:
            read = await self._vitals.calibrate()
            if read is not None:
                self.signs.pace = self.signs.pace.seen(tokens=read.tokens, seconds=read.seconds)

    def pause(self) -> None:
        """Expect nothing of the engine: it was told to stand still, and whoever told it bounds that."""
        self._is_paused = True
        for flight in self._flights:
            flight.freeze()

    def unpause(self) -> None:
        """Expect progress again; the time until now counts against nobody."""
        if self._is_paused:
            self._is_paused = False
            self.signs.forget()
            for flight in self._flights:
                flight.answer.generation.forgive()
                flight.thaw()

    def note_end(self, flight: Flight) -> None:
        """Take the end of a request; where it came before the engine's own, a slot is to come free."""
        self.signs.note_end(flight)
        generation = flight.answer.generation
        was_asked = flight.answer.phase is Phase.ENGINE or generation.begun_at is not None
        if was_asked and generation.finish_reason is None and self._cancel_s is not None:
            self._release.note_cut_off(CutOff(started_at=generation.started_at, ended_at=self._clock()))

    def verdict(self) -> Verdict | None:
        """Return the gravest verdict of all requests in flight; None where there are none."""
        if self._watched.is_starting:
            return Verdict.LOADING
        return min((flight.judgement.verdict for flight in self._flights), key=SEVERITY.index, default=None)

    def views(self) -> tuple[RequestView, ...]:
        """Return each request in flight with its verdict and what that rests on."""
        now, sight = self._clock(), self._sight()
        return tuple(
            RequestView(
                id=flight.id,
                job_name=flight.job_name,
                verdict=self.judge(flight, sight).verdict,
                evidence=self.signs.evidence(flight),
                held_s=round(now - flight.answer.started_at, 3),
            )
            for flight in self._flights
        )

    def judge(self, flight: Flight, sight: EngineSight | None = None) -> Judgement:
        """Return the present judgement on one request; who judges many gives the ``sight`` of all of them."""
        if flight.answer.phase is Phase.TOOLS:
            return Judgement(verdict=Verdict.TOOL_WAIT, silent_s=0.0, limit_s=None)
        if self._is_paused:
            return Judgement(verdict=Verdict.PAUSED, silent_s=0.0, limit_s=None)
        is_serving = self._watched.is_serving
        if flight.answer.phase is Phase.US and is_serving:
            has_token = flight.answer.first_token_at is not None
            return Judgement(verdict=Verdict.DECODING if has_token else Verdict.PREFILLING, silent_s=0.0, limit_s=None)
        engine = (sight or self._sight()).as_seen_by(flight, is_serving=is_serving)
        return judge(self._limits, self.signs.of_request(flight), engine, self._clock())

    def tick(self, tasks: TaskGroup) -> None:
        """Look once at everything that costs nothing, and start what costs something where that is due."""
        now = self._clock()
        if self._ticked_at is not None and now - self._ticked_at > FROZEN_S:
            # We were stopped ourselves, or starved: what came meanwhile has yet to be read, and looked at.
            self._judges_from = now + THAW_S
        self._ticked_at = now
        self._flights.measure_rate(now)
        sight = self._sight()
        needs_look = self._release.is_armed
        for flight in self._flights:
            self.signs.learn_batches(flight)
            loop = flight.answer.find_loop() if flight.answer.phase is Phase.ENGINE else None
            if loop is not None:
                flight.end(looped(loop))
                continue
            flight.judgement = told = self.judge(flight, sight)
            needs_look = needs_look or told.silent_s >= quiet_s(told.limit_s)
            if told.verdict is Verdict.STALLED and now >= self._judges_from:
                self._take_stall(flight, told, tasks)
        if needs_look and now >= self._look_due_at and not self._is_looking:
            self._look_due_at = now + min(LOOK_S, self._tightest_s / TICKS_A_LIMIT)
            tasks.start_soon(self._guarded, self._look)
        is_idle = not len(self._flights) and not self._is_paused
        if is_idle and now >= self._probe_due_at and self._watched.is_serving:
            self._probe_due_at = now + PROBE_S
            tasks.start_soon(self._guarded, self._probe)

    async def _guarded(self, look: Callable[[], Awaitable[None]]) -> None:
        """Look; what goes wrong with it must not end the worker, whose engine may be well."""
        try:
            await look()
        except Exception:
            logger.exception("the watch could not look at its engine")

    def _take_stall(self, flight: Flight, told: Judgement, tasks: TaskGroup) -> None:
        if told.scope is Scope.REQUEST or not self._watched.owns_engine:
            self._end_alone(flight, told)
        elif not self._is_confirming:
            self._is_confirming = True
            tasks.start_soon(self._guarded, self._confirm)

    async def _confirm(self) -> None:
        """Look at an engine that shows nothing once more, give it a last chance to sing, then kill it.

        Only requests that were stalled before the canary are suspected; those that outran their limit with it are not.
        """
        try:
            with anyio.move_on_after(LAST_LOOK_S):
                await self._look()
            suspects = [
                (flight, told, flight.answer.generation.last_progress_at)
                for flight, told in self._judged()
                if told.scope is Scope.ENGINE
            ]
            is_heard = bool(suspects) and await self._sing() in {Song.HEARD, Song.BROKEN_OFF}
            await self.signs.look_at_kernel()  # has it computed while it did not sing?
        finally:
            self._is_confirming = False
        stalled = {
            flight: told
            for flight, told, progress_at in suspects
            if flight.ending is None and flight.answer.generation.last_progress_at == progress_at
        }
        if not stalled:
            return
        if is_heard:
            for flight, told in stalled.items():
                self._end_alone(flight, told)
            return
        if self._is_paused or any(told.scope is not Scope.ENGINE for told in map(self.judge, stalled)):
            return  # it has moved for somebody meanwhile: slow, and no longer without a sign
        flight, told = next(iter(stalled.items()))
        reason = _reason(flight)
        because = f"{reason}: no progress for {told.silent_s:.1f} s, no counter rose, and it answered no canary"
        self._watched.break_engine(reason, because, {flight: _reason(flight) for flight in stalled})

    async def _sing(self) -> Song:
        """Return whether the engine answers a canary; what its counters show meanwhile is the canary's own."""
        self._is_looking = True
        try:
            return await self._vitals.sing(max(1.0, min(CANARY_S, self._tightest_s)))
        finally:
            self._is_looking = False
            self.signs.counters = None

    def _sight(self) -> EngineSight:
        return self.signs.sight(may_batch=self._release.is_armed)

    def _judged(self) -> list[tuple[Flight, Judgement]]:
        sight = self._sight()
        return [(flight, self.judge(flight, sight)) for flight in self._flights if flight.ending is None]

    def _end_alone(self, flight: Flight, told: Judgement) -> None:
        """End one request whose engine works for others."""
        works = ", while the engine works for others" if told.scope is Scope.REQUEST else ""
        detail = f"no progress for {told.silent_s:.1f} s{works}"
        logger.warning("request %d of %s: %s: %s", flight.id, flight.job_name, _reason(flight), detail)
        flight.end(EngineFailed(reason=_reason(flight), detail=detail, brought_down=False))

    async def _look(self) -> None:
        self._is_looking = True
        asked_at = self._clock()
        starts = [
            flight.answer.generation.started_at for flight in self._flights if flight.answer.phase is Phase.ENGINE
        ]
        try:
            counters = await self.signs.look()
        finally:
            self._is_looking = False
        if (
            counters is None
            or self._cancel_s is None
            or self._is_paused
            or not self._release.is_armed
            or not self._watched.is_serving
        ):
            return
        if not self._release.is_overdue(counters, starts, asked_at, self._clock()):
            self._overdue_since = None
            return
        now = self._clock()
        self._overdue_since = now if self._overdue_since is None else self._overdue_since
        is_at_it = is_computing(self.signs.busy_at, now) and now - self._overdue_since < self._limits.busy_s
        if not is_at_it:  # else it may be in the batch that it was in when the request ended
            because = f"a slot is still busy {self._cancel_s:g} s after its request has ended"
            self._watched.break_engine(FailureReason.STALLED_DECODE, because, {})

    async def _probe(self) -> None:
        """See whether an engine without work is still there: the next turn should not be the one to find out."""
        probe = await self._vitals.probe()
        now = self._clock()
        if probe is Probe.ANSWERED or len(self._flights) or self._is_paused or not self._watched.is_serving:
            self._refusals, self._silent_since = 0, None
            return
        self._silent_since = now if self._silent_since is None else self._silent_since
        self._refusals = self._refusals + 1 if probe is Probe.REFUSED else 0
        limit_s = self._limits.prefill_s
        is_hung = limit_s is not None and now - self._silent_since >= limit_s
        if self._refusals >= PROBES_REFUSED or is_hung:
            reason = FailureReason.ENGINE_UNREACHABLE
            because = f"{reason}: without work it has not answered for {now - self._silent_since:.0f} s"
            self._watched.break_engine(reason, because, {})


def _reason(flight: Flight) -> FailureReason:
    has_token = flight.answer.generation.first_token_at is not None
    return FailureReason.STALLED_DECODE if has_token else FailureReason.STALLED_PREFILL
