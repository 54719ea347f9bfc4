"""Which turn an engine's death is blamed on, from evidence alone. Pure; the table stands in the design notes.

A death in company convicts no turn: it makes suspects of all that were on the engine. A suspect is tried alone, and its
end acquits it. A death counts against a turn only where it was alone on an engine that had never served two at once.
How many such deaths convict follows from what this engine is known to do by itself: see ``deaths``.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

from service.conversations.charges import Charges
from service.conversations.job import JobId, TurnKey
from service.scheduling.core.blame.deaths import MOST_DEATHS, TurnRecord

OUTSIDE_DEATHS: Final = 3  # deaths by others' signals, after which a turn is tried like any suspect
DISTRUSTED: Final = 2  # convictions of one job without an end between, after which its other turns are tried first


class Trial(IntEnum):
    """When a suspect is tried."""

    FIRST = 0  # on the next engine, before it has served anything: it has died alone
    NEXT = 1
    LAST = 2  # behind everybody else's turns: others of its job were convicted


@dataclass(frozen=True, slots=True, kw_only=True)
class DeathExplained:
    """A turn was convicted that was on this engine."""

    worker: str
    incarnation: int
    key: TurnKey


@dataclass(frozen=True, slots=True, kw_only=True)
class DeathUnexplained:
    """Every turn that was on this engine has ended since: none of them was the cause; ``company`` is how many."""

    worker: str
    incarnation: int
    company: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectsCleared:
    """Another turn explains the deaths that these were suspected of."""

    keys: tuple[TurnKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDistrusted:
    """Turns of this job were convicted one after the other: those that were never tried are tried, last of all."""

    job_id: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTrusted:
    """A turn of this job has ended: the others are as good as anybody's."""

    job_id: JobId


Finding = DeathExplained | DeathUnexplained | SuspectsCleared | JobDistrusted | JobTrusted


@dataclass(frozen=True, slots=True, kw_only=True)
class BlameVerdict:
    """What a death means for one turn that was on the engine; ``trial`` is None where it is no suspect."""

    charges: Charges
    trial: Trial | None = None
    is_convicted: bool = False
    findings: tuple[Finding, ...] = ()


Place = tuple[str, str, int]  # a worker, a model and an incarnation: models that sleep share a lane, and numbers


class _Engine:
    """One incarnation and the turns that are on it; written by ``Blame`` alone."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.serves: set[TurnKey] = set()
        self.had_company = False  # two turns at once, or one that was cut off: a later death may have other causes


class _Death:
    """One death whose cause is not known yet; written by ``Blame`` alone."""

    def __init__(self, model: str, company: int) -> None:
        self.model = model
        self.company = company
        self.suspects: set[TurnKey] = set()
        self.is_untried = False  # a suspect is gone, and what it would have done stays unknown


class Blame:
    """What is known of engines, deaths and suspects; told by the scheduler of every start and end of an attempt."""

    def __init__(self) -> None:
        self._engines: dict[Place, _Engine] = {}
        self._newest: dict[tuple[str, str], int] = {}
        self._places: dict[TurnKey, Place] = {}
        self._deaths: dict[Place, _Death] = {}
        self._records: dict[str, TurnRecord] = {}
        self._refusals: dict[str, TurnRecord] = {}
        self._convictions: Counter[JobId] = Counter()

    def __repr__(self) -> str:
        return f"<Blame deaths={len(self._deaths)} on engines={len(self._places)}>"

    def record(self, model: str) -> TurnRecord:
        """Return what is known of a model's engines."""
        return self._records.get(model, TurnRecord())

    def refusals(self, model: str) -> TurnRecord:
        """Return the same of refusals."""
        return self._refusals.get(model, TurnRecord())

    def start(self, key: TurnKey, model: str, worker: str, incarnation: int) -> None:
        """Note that an attempt begins on an engine."""
        place, engine = self._engine(model, worker, incarnation)
        engine.had_company = engine.had_company or bool(engine.serves)
        engine.serves.add(key)
        self._places[key] = place

    def note_company(self, model: str, worker: str, incarnation: int) -> None:
        """Note that an engine is asked something beside turns: a later death may have another cause than these."""
        self._engine(model, worker, incarnation)[1].had_company = True

    def _engine(self, model: str, worker: str, incarnation: int) -> tuple[Place, _Engine]:
        place = (worker, model, incarnation)
        if self._newest.get(place[:2]) != incarnation:
            self._newest[place[:2]] = incarnation
            for old in [old for old, engine in self._engines.items() if old[:2] == place[:2] and not engine.serves]:
                del self._engines[old]
        return place, self._engines.setdefault(place, _Engine(model))

    def end(self, key: TurnKey, charges: Charges) -> tuple[Finding, ...]:
        """Take the end of an attempt that the engine has answered: the turn is acquitted of all its charges."""
        place = self._leave(key)
        engine = self._engines.get(place) if place is not None else None
        if engine is not None:
            self._records[engine.model] = self.record(engine.model).with_acquitted()
            refusals = self.refusals(engine.model).with_acquitted()
            for _ in range(charges.refusals):
                refusals = refusals.with_unexplained()
            self._refusals[engine.model] = refusals
        findings = list(self._acquit(key))
        if self._convictions.pop(key.job_id, 0) >= DISTRUSTED:
            findings.append(JobTrusted(job_id=key.job_id))
        return tuple(findings)

    def leave(self, key: TurnKey, *, is_cut_off: bool) -> None:
        """Take the end of an attempt that proves nothing; what was cut off may still be at work in the engine."""
        place = self._leave(key)
        engine = self._engines.get(place) if place is not None else None
        if engine is not None and is_cut_off:
            engine.had_company = True

    def forget(self, keys: Iterable[TurnKey]) -> None:
        """Note that turns will not run again here; what they would have done stays unknown."""
        if not self._deaths:  # as nearly always, and a cancel may bring a million
            return
        gone = set(keys)
        for place, death in list(self._deaths.items()):
            if not death.suspects.isdisjoint(gone):
                death.suspects -= gone
                death.is_untried = True
                if not death.suspects:
                    del self._deaths[place]

    def forget_job(self, job_id: JobId) -> None:
        """Note that a job has ended."""
        del self._convictions[job_id]

    def die(self, key: TurnKey, charges: Charges, *, is_outside: bool) -> BlameVerdict:
        """Judge one turn whose engine has died under it."""
        place = self._places[key]
        engine = self._engines[place]
        company = len(engine.serves)
        self._leave(key)
        if is_outside:
            return self._judge_outside(key, charges, is_alone=not engine.had_company)
        self._deaths.setdefault(place, _Death(engine.model, company)).suspects.add(key)
        if engine.had_company:
            return BlameVerdict(charges=replace(charges, is_suspect=True), trial=self._trial(key, Trial.NEXT))
        charged = replace(charges, is_suspect=True, deaths=charges.deaths + 1)
        needed = self.record(engine.model).faults_to_convict()
        if charged.deaths >= needed:
            return self._convict(key, charged)
        return BlameVerdict(charges=charged, trial=Trial.FIRST)

    def clear(self) -> None:
        """Forget everything but what engines are known to do."""
        for known in (self._engines, self._newest, self._places, self._deaths, self._convictions):
            known.clear()

    def _judge_outside(self, key: TurnKey, charges: Charges, *, is_alone: bool) -> BlameVerdict:
        charged = replace(charges, outside=charges.outside + 1)
        if charges.is_suspect and is_alone and charged.outside >= OUTSIDE_DEATHS + MOST_DEATHS:
            return self._convict(key, charged)
        if charges.is_suspect or charged.outside >= OUTSIDE_DEATHS:
            return BlameVerdict(charges=replace(charged, is_suspect=True), trial=self._trial(key, Trial.NEXT))
        return BlameVerdict(charges=charged)

    def _trial(self, key: TurnKey, trial: Trial) -> Trial:
        return Trial.LAST if self._convictions[key.job_id] else trial

    def _convict(self, key: TurnKey, charges: Charges) -> BlameVerdict:
        findings: list[Finding] = []
        released: set[TurnKey] = set()
        for place, death in list(self._deaths.items()):
            if key in death.suspects:
                findings.append(DeathExplained(worker=place[0], incarnation=place[-1], key=key))
                released |= {other for other in death.suspects if other.job_id != key.job_id}
                del self._deaths[place]
        still = {other for death in self._deaths.values() for other in death.suspects}
        cleared = tuple(sorted(released - still - self._places.keys()))
        if cleared:
            findings.append(SuspectsCleared(keys=cleared))
        self._convictions[key.job_id] += 1
        if self._convictions[key.job_id] == DISTRUSTED:
            findings.append(JobDistrusted(job_id=key.job_id))
        return BlameVerdict(charges=charges, is_convicted=True, findings=tuple(findings))

    def _acquit(self, key: TurnKey) -> Iterator[Finding]:
        for place, death in list(self._deaths.items()):
            if key not in death.suspects:
                continue
            death.suspects.discard(key)
            if not death.suspects:
                del self._deaths[place]
                if not death.is_untried:
                    self._records[death.model] = self.record(death.model).with_unexplained()
                    yield DeathUnexplained(worker=place[0], incarnation=place[-1], company=death.company)

    def _leave(self, key: TurnKey) -> Place | None:
        place = self._places.pop(key, None)
        if place is not None and place in self._engines:
            self._engines[place].serves.discard(key)
        return place
