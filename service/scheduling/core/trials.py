"""The trials of suspects: their worker and their time. Pure.

One worker of a model at a time tries suspects, one after the other, and starts nothing else meanwhile. If no other
worker serves the waiting turns, trials and turns alternate as the design notes describe.
"""

from collections.abc import Iterator
from typing import Final

from service.scheduling.core.blame import Trial
from service.scheduling.core.events import TimeTold
from service.scheduling.core.in_flight_pool import InFlightPool
from service.scheduling.core.queue.ready_queue import ReadyTurn
from service.scheduling.core.ready_pool import ReadyPool
from service.scheduling.core.slots import WorkerSlots

# Trials in a row if no other worker serves the waiting turns; a suspect that died alone counts as two
TRIALS_IN_A_ROW: Final = 4
TRIAL_S: Final = 1.25  # a trial counts as one more for each such time: a row ends after five seconds
STARTS_A_SLOT: Final = 4  # waiting turns started after a row, for each slot
STARTS_BEFORE_LAST: Final = 16  # the same before each trial of a distrusted job or key
REST: Final = 3.0  # multiple of the time of such trials, engine starts included, that others get before the next
LEAST_REST_S: Final = 10.0  # an engine may die after the trial, with other turns on it
MOST_REST_S: Final = 900.0


class Trials:
    """Reserves workers for suspects; the core starts the suspects that are due."""

    def __init__(self, ready: ReadyPool, in_flight: InFlightPool) -> None:
        self._ready = ready
        self._in_flight = in_flight
        self._measures: dict[str, TrialMeasure] = {}  # by model that has had suspects
        self.now = 0.0  # monotonic seconds, as last reported

    def __repr__(self) -> str:
        return f"<Trials {self._measures}>"

    def due(self) -> Iterator[tuple[str, ReadyTurn, str]]:
        """Take each suspect that is due for a trial, with its model and worker; the caller starts it there."""
        for model, suspects in self._ready.suspects.items():
            slots = self._in_flight.models[model]
            trial, worker = suspects.next_trial, slots.trial_worker
            if worker is not None and worker.trial is not None:
                continue
            if trial is None or not self._may_try(model, trial):
                slots.release_trial_worker()
                continue
            worker = worker or self._choose(model)
            if worker is None:
                continue
            slots.reserve_for_trials(worker)
            for turn in self._ready.deferred.all_for(worker.name):
                self._ready.end_deferral(turn.key, model)
            if not worker.taken:
                self._measures[model].note_trial(trial, slots.total, self.now)
                yield model, suspects.pop(), worker.name

    def take_time(self, event: TimeTold) -> None:
        """Set the current time."""
        self.now = event.at

    def rests_until(self, model: str) -> float | None:
        """Return when suspects of distrusted jobs and keys may run again; None if they may now."""
        measure = self._measures.get(model)
        return measure.rests_until if measure is not None and measure.rests(self.now) else None

    def note_start(self, model: str) -> None:
        """Record the start of a turn that is no suspect."""
        if model in self._measures:
            self._measures[model].note_start(self.now)

    def note_trial(self, model: str, seconds: float) -> None:
        """Record the length of a trial that has ended."""
        if model in self._measures:
            self._measures[model].note_time(seconds, self._in_flight.models[model].total)

    def _may_try(self, model: str, trial: Trial) -> bool:
        measure, slots = self._measures.setdefault(model, TrialMeasure()), self._in_flight.models[model]
        if trial is Trial.LAST and measure.rests(self.now):
            return False
        has_others, is_alone = self._ready.has_others(model), len(slots.workers) <= 1
        return measure.allows(trial, slots.total, has_others=has_others, is_alone=is_alone)

    def _choose(self, model: str) -> WorkerSlots | None:
        """Return an empty worker, as after a restart, or else one to drain; None to wait."""
        slots = self._in_flight.models[model]
        worker = slots.emptiest
        if worker is None or not worker.taken:
            return worker
        # The next engine comes back empty, so no slot need be idle for a trial until then.
        return None if slots.coming and self._ready.has_others(model) else worker


class TrialMeasure:
    """The measure by which one model's suspects and its waiting turns alternate."""

    def __init__(self) -> None:
        self._trials = 0
        self._owed = 0  # starts of waiting turns before the next trial
        self._owed_last: int | None = None  # the same for a suspect of a distrusted job or key, counted once it is next
        self._last_at: float | None = None  # the start of the trials of such suspects that others have waited for since
        self.rests_until = float("-inf")  # monotonic seconds

    def __repr__(self) -> str:
        return f"<TrialMeasure trials={self._trials} owed={self._owed},{self._owed_last}>"

    def allows(self, trial: Trial, slots: int, *, has_others: bool, is_alone: bool) -> bool:
        """Whether a trial may begin on a model with ``slots``.

        ``has_others`` says that turns without suspicion wait, ``is_alone`` that no other worker takes them.
        """
        if not has_others or not slots or trial is Trial.FIRST:  # few in all, and each ends with its engine
            return bool(slots)
        if trial is Trial.LAST and self._owed_last is None:
            self._owed_last = STARTS_BEFORE_LAST * slots
        is_owed = (self._owed > 0 and is_alone) or (trial is Trial.LAST and self._owed_last != 0)
        return not is_owed

    def rests(self, now: float) -> bool:
        """Whether others had too little time yet since the last suspect of a distrusted job or key."""
        return now < self.rests_until

    def note_trial(self, trial: Trial, slots: int, now: float) -> None:
        """Count the start of a trial on a model with ``slots``."""
        self._count(2 if trial is Trial.FIRST else 1, slots)
        if trial is Trial.LAST:
            self._owed_last = None
            self._last_at = now if self._last_at is None else self._last_at

    def note_time(self, seconds: float, slots: int) -> None:
        """Count the length of a trial: a long one counts as several short ones."""
        self._count(int(seconds / TRIAL_S), slots)

    def _count(self, trials: int, slots: int) -> None:
        self._trials += trials
        if self._trials >= TRIALS_IN_A_ROW:
            self._trials, self._owed = 0, STARTS_A_SLOT * slots

    def note_start(self, now: float) -> None:
        """Count the start of a waiting turn."""
        if self._last_at is not None:
            self.rests_until = now + min(MOST_REST_S, max(LEAST_REST_S, REST * (now - self._last_at))) if now else now
            self._last_at = None
        self._owed -= self._owed > 0
        if self._owed_last:
            self._owed_last -= 1
