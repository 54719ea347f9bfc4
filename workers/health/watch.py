"""The watch over one engine: it looks, ``policy.liveness`` judges, and stalled requests end. Beside the token path.

Before an engine is killed it is asked for one token, a canary. An engine that answers is not killed; only the request
that got nothing ends.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Final

import anyio
from anyio.abc import TaskGroup

from transport.exchange import MAX_CHARS
from workers.engine.engine_owner import EngineOwner
from workers.health.calibration import IdleProbe
from workers.health.canary import CanaryResult
from workers.health.evidence import POLL_S, EngineSnapshot, Observations
from workers.health.incident import RequestView
from workers.health.probes import Probes
from workers.health.recovery import SHORTLY_S, may_be_cause
from workers.log_context import line_about
from workers.outcome import Cancelled, Completed, EngineFailed, FailureReason, RequestFailed
from workers.policy.leaked_slots import CutOff, LeakedSlots
from workers.policy.liveness import SEVERITY, Judgement, Scope, Verdict, is_computing, judge, quiet_s
from workers.requests.answer import Phase
from workers.requests.in_flight import InFlightRequest, InFlightRequests
from workers.requests.request_ends import loop_failure
from workers.spec import WorkerTimeouts

TICK_S: Final = 0.5  # with requests in flight: finds repetition, and bounds the overrun of every limit
IDLE_TICK_S: Final = 1.0
TICKS_A_LIMIT: Final = 8
CANARY_S: Final = 5.0  # with the last look, a hang is killed within ten seconds of its limit
LAST_LOOK_S: Final = 3.0
FROZEN_S: Final = 3.0  # a longer gap between two ticks means that we were stopped
TOO_LONG: Final = "the answer exceeds the limit for requests without a bound of their own"
THAW_S: Final = 2 * POLL_S + 1.0  # two looks make a comparison
logger = logging.getLogger(__name__)


class HealthWatch:
    """Judges every request in flight while ``run`` runs."""

    def __init__(
        self,
        in_flight: InFlightRequests,
        probes: Probes,
        timeouts: WorkerTimeouts,
        watched: EngineOwner,
        clock: Callable[[], float],
    ) -> None:
        self._in_flight = in_flight
        self._probes = probes
        self._limits = timeouts.stall
        self._cancel_s = timeouts.cancel_s
        self._release = LeakedSlots(timeouts.cancel_s or 0.0)
        self._watched = watched
        self._clock = clock
        self.observations = Observations(in_flight, probes, clock, may_queue=not watched.owns_engine)
        limits = [limit for limit in (timeouts.prefill_stall_s, timeouts.decode_stall_s, timeouts.cancel_s) if limit]
        self._tightest_s = min(limits, default=CANARY_S * TICKS_A_LIMIT)
        self._look_due_at = clock()
        self._idle_probe = IdleProbe(probes, watched, timeouts.prefill_stall_s, lambda: self._is_idle, clock)
        self._ticked_at: float | None = None
        self._judges_from = clock()
        self._is_looking = False
        self._is_confirming = False
        self._is_paused = False
        self._cut_off_at: float | None = None  # when a request last ended before the engine's own end of it

    def __repr__(self) -> str:
        return f"<HealthWatch {self._in_flight!r} {self.observations!r}>"

    async def run(self) -> None:
        """Watch until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                tick_s = TICK_S if len(self._in_flight) or self._release.is_armed else IDLE_TICK_S
                await anyio.sleep(min(tick_s, self._tightest_s / TICKS_A_LIMIT))
                self.tick(tasks)

    def begin_incarnation(self) -> None:
        """Begin to watch a new incarnation."""
        self.observations.reset()
        self._idle_probe.begin()
        self._release = LeakedSlots(self._cancel_s or 0.0)
        self._is_paused = False

    def pause(self) -> None:
        """Expect nothing of the engine: it was paused, and another limit bounds that."""
        self._is_paused = True
        for running in self._in_flight:
            running.freeze()

    def unpause(self) -> None:
        """Expect progress again; the time until now counts against no request."""
        if self._is_paused:
            self._is_paused = False
            self.observations.reset()
            for running in self._in_flight:
                running.answer.generation.forgive()
                running.thaw()

    def note_end(self, running: InFlightRequest) -> None:
        """Record the end of a request; if it came before the engine's own, a slot must come free."""
        self.observations.note_end(running)
        generation = running.answer.generation
        if _is_cut_off(running):
            self._cut_off_at = self._clock()
            if self._cancel_s is not None:
                self._release.note_cut_off(CutOff(started_at=generation.started_at, ended_at=self._clock()))

    @property
    def has_departed_suspect(self) -> bool:
        """Whether a request was cut off so lately that it may cause a death of the engine."""
        return self._cut_off_at is not None and self._clock() - self._cut_off_at < SHORTLY_S

    def verdict(self) -> Verdict | None:
        """Return the gravest verdict of all requests in flight; None without any."""
        if self._watched.now.is_starting:
            return Verdict.LOADING
        return min((running.judgement.verdict for running in self._in_flight), key=SEVERITY.index, default=None)

    def views(self) -> tuple[RequestView, ...]:
        """Return each request in flight with its verdict and evidence."""
        now, snapshot = self._clock(), self._snapshot()
        return tuple(
            RequestView(
                id=running.id,
                job_name=running.job_name,
                verdict=self.judge(running, snapshot).verdict,
                evidence=self.observations.evidence(running),
                held_s=round(now - running.answer.started_at, 3),
            )
            for running in self._in_flight
        )

    def judge(self, running: InFlightRequest, snapshot: EngineSnapshot | None = None) -> Judgement:
        """Return the present judgement on one request; ``snapshot`` is shared by calls for many."""
        if running.answer.phase is Phase.TOOLS:
            return Judgement(verdict=Verdict.TOOL_WAIT, silent_s=0.0, limit_s=None)
        if self._is_paused:
            return Judgement(verdict=Verdict.PAUSED, silent_s=0.0, limit_s=None)
        is_serving = self._watched.now.is_serving
        if running.answer.phase is Phase.US and is_serving:
            has_token = running.answer.first_token_at is not None
            return Judgement(verdict=Verdict.DECODING if has_token else Verdict.PREFILLING, silent_s=0.0, limit_s=None)
        if running.answer.is_mute and is_serving and not self._watched.owns_engine:  # nothing else shows its progress
            return Judgement(verdict=Verdict.PREFILLING, silent_s=0.0, limit_s=None)
        engine = (snapshot or self._snapshot()).as_seen_by(running, is_serving=is_serving)
        return judge(self._limits, self.observations.of_request(running), engine, self._clock())

    def tick(self, tasks: TaskGroup) -> None:
        """Make all free checks, and start the costly ones that are due."""
        now = self._clock()
        if self._ticked_at is not None and now - self._ticked_at > FROZEN_S:
            # We were stopped or starved: input that came meanwhile has yet to be read and looked at.
            self._judges_from = now + THAW_S
        self._ticked_at = now
        self._in_flight.measure_rate(now)
        snapshot = self._snapshot()
        needs_look = self._release.is_armed
        for running in self._in_flight:
            self.observations.learn_batches(running)
            loop = running.answer.loops.find_loop() if running.answer.phase is Phase.ENGINE else None
            if loop is not None:
                running.end(loop_failure(loop))
                continue
            if running.answer.loops.chars > MAX_CHARS:
                running.end(RequestFailed(reason=FailureReason.ENGINE_REJECTED, detail=TOO_LONG))
                continue
            running.judgement = judgement = self.judge(running, snapshot)
            needs_look = needs_look or judgement.silent_s >= quiet_s(judgement.limit_s)
            if judgement.verdict is Verdict.STALLED and now >= self._judges_from:
                self._take_stall(running, judgement, tasks)
        if needs_look and now >= self._look_due_at and not self._is_looking:
            self._look_due_at = now + min(POLL_S, self._tightest_s / TICKS_A_LIMIT)
            tasks.start_soon(_guarded, self._poll)
        if self._is_idle and self._idle_probe.is_due(now):
            tasks.start_soon(_guarded, self._idle_probe.run)

    @property
    def _is_idle(self) -> bool:
        return not len(self._in_flight) and not self._is_paused and self._watched.now.is_serving

    def _take_stall(self, running: InFlightRequest, judgement: Judgement, tasks: TaskGroup) -> None:
        if judgement.scope is Scope.REQUEST:
            _end_alone(running, judgement, is_proved=True)
        elif not self._is_confirming:
            self._is_confirming = True
            tasks.start_soon(_guarded, self._confirm)

    async def _confirm(self) -> None:
        """Look once more at an engine that shows no life, ask it for a canary, then kill it.

        Only requests that stalled before the canary are suspected, not those that passed their limit during it. An
        answered canary proves that the engine lives, and speaks against them. An engine that is not ours is left alone
        whatever it answers.
        """
        try:
            stalled, is_heard = await self._look_again()
        finally:
            self._is_confirming = False
        if not stalled:
            return
        if is_heard or not self._watched.owns_engine:
            for running, judgement in stalled.items():
                _end_alone(running, judgement, is_proved=is_heard)
            return
        if self._is_paused or any(judgement.scope is not Scope.ENGINE for judgement in map(self.judge, stalled)):
            return  # it has moved for some request meanwhile: slow, but with a sign of life
        running, judgement = next(iter(stalled.items()))
        reason = _reason(running)
        because = f"{reason}: {_silence(running, judgement)}, no counter rose, and it answered no canary"
        self._watched.break_engine(reason, because, {each: _reason(each) for each in stalled if may_be_cause(each)})

    async def _look_again(self) -> tuple[dict[InFlightRequest, Judgement], bool]:
        """Return the requests that have stalled with their engine, and whether it answered a canary meanwhile."""
        with anyio.move_on_after(LAST_LOOK_S):
            await self._poll()
        snapshot = self._snapshot()
        judged = {running: self.judge(running, snapshot) for running in self._in_flight if running.ending is None}
        suspects = [
            (running, judgement, running.answer.generation.last_progress_at)
            for running, judgement in judged.items()
            if judgement.scope is Scope.ENGINE
        ]
        is_heard = bool(suspects) and await self._ask_canary() in {CanaryResult.HEARD, CanaryResult.BROKEN_OFF}
        await self.observations.poll_kernel()  # shows whether it has computed while it did not answer
        stalled = {
            running: judgement
            for running, judgement, progress_at in suspects
            if running.ending is None and running.answer.generation.last_progress_at == progress_at
        }
        return stalled, is_heard

    async def _ask_canary(self) -> CanaryResult:
        """Return the result of a canary; counters that it raises are ignored."""
        self._is_looking = True
        try:
            return await self._probes.ask_canary(max(1.0, min(CANARY_S, self._tightest_s)))
        finally:
            self._is_looking = False
            self.observations.counters = None

    async def is_at_work(self) -> bool:
        """Look at the engine once; return whether counters or processes show work within the limit on silence."""
        with anyio.move_on_after(LAST_LOOK_S):
            await self._poll()
        now, snapshot = self._clock(), self._snapshot()
        limit_s = self._limits.prefill_s or self._tightest_s
        is_rising = snapshot.rose_at is not None and now - snapshot.rose_at < limit_s
        return is_rising or (self._limits.busy_s > 0 and is_computing(self.observations.busy_at, now))

    def _snapshot(self) -> EngineSnapshot:
        return self.observations.snapshot(may_batch=self._release.is_armed)

    async def _poll(self) -> None:
        self._is_looking = True
        asked_at = self._clock()
        starts = [
            running.answer.generation.started_at for running in self._in_flight if running.answer.phase is Phase.ENGINE
        ]
        try:
            counters = await self.observations.poll()
        finally:
            self._is_looking = False
        if counters is None and self._cancel_s is not None:
            self._release.drop_before(self._clock() - self._cancel_s)  # nothing will show whether they have left
        if (
            counters is None
            or self._cancel_s is None
            or self._is_paused
            or not self._release.is_armed
            or not self._watched.now.is_serving
        ):
            return
        now = self._clock()
        overdue_s = self._release.overdue_s(counters, starts, asked_at, now)
        if overdue_s is None:
            return
        is_at_it = is_computing(self.observations.busy_at, now) and overdue_s < self._limits.busy_s
        if not is_at_it:  # else it may be in the batch that it was in when the request ended
            because = f"a slot is still busy {self._cancel_s:g} s after its request has ended"
            self._watched.break_engine(FailureReason.STALLED_DECODE, because, {})


async def _guarded(poll: Callable[[], Awaitable[None]]) -> None:
    """Look; a failure must not end the worker, whose engine may be well."""
    try:
        await poll()
    except Exception:
        logger.exception("the watch could not look at its engine")


def _end_alone(running: InFlightRequest, judgement: Judgement, *, is_proved: bool) -> None:
    """End one request whose engine works for others, or, if ``is_proved``, was seen to answer meanwhile."""
    works = ", while the engine works for others" if judgement.scope is Scope.REQUEST else ""
    reason, detail = _reason(running), f"{_silence(running, judgement)}{works}"
    line = line_about(running.concerns())
    logger.warning("request %d of %s: %s: %s", running.id, running.job_name, reason, detail, extra=line)
    running.end(EngineFailed(reason=reason, detail=detail, brought_down=False, is_proved=is_proved))


def _is_cut_off(running: InFlightRequest) -> bool:
    """Whether a request ended while its engine may have been working on it."""
    answer, generation = running.answer, running.answer.generation
    if generation.finish_reason is not None or isinstance(running.ending, Completed):
        return False
    # A relayed one may not have begun yet; and one whose client has left has no ending of ours.
    was_left = answer.was_asked and (running.ending is None or isinstance(running.ending, Cancelled))
    return was_left or answer.phase is Phase.ENGINE or generation.begun_at is not None


def _reason(running: InFlightRequest) -> FailureReason:
    has_token = running.answer.generation.first_token_at is not None
    return FailureReason.STALLED_DECODE if has_token else FailureReason.STALLED_PREFILL


def _silence(running: InFlightRequest, judgement: Judgement) -> str:
    """Return the time without progress, and the setting that bounds it."""
    key = "decode_stall_s" if _reason(running) is FailureReason.STALLED_DECODE else "prefill_stall_s"
    limit = "" if judgement.limit_s is None else f" (timeouts.{key} allows {judgement.limit_s:.4g} s)"
    return f"no progress for {judgement.silent_s:.1f} s{limit}"
