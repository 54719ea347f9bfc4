"""The blame for an engine's death, from evidence alone. Pure; the table is in the design notes.

A death with several turns on the engine convicts none: all of them become suspects. A suspect is tried alone, and the
end of its trial acquits it. A death counts against a turn only if the turn was alone on an engine that never served two
at once. The number of such deaths that convict depends on the engine's own record (``deaths``).

A source with convictions is distrusted: its other turns are tried before they run beside turns of others. A source is a
key at one model, or a job without a key. A turn that a client of a key left shortly before a death is a suspect that
cannot be tried. Enough of those make the key distrusted too.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from typing import Final

import msgspec
from msgspec.structs import replace

from service.conversations.job.job import JobId, TurnKey
from service.conversations.record.transcript import Charges
from service.scheduling.core.deaths import MOST_DEATHS, TurnRecord
from workers.health.recovery import SHORTLY_S

OUTSIDE_DEATHS: Final = 3  # deaths by signals from outside after which a turn becomes a suspect
DISTRUSTED: Final = 2  # convictions without an acquittal between them, after which a job's other turns are tried first
TRUSTED_ENDS: Final = 50  # good ends in a row after which a key is trusted again
TRUSTED_S: Final = 3600.0  # seconds after its last conviction at which a key is trusted again
EASED: Final = 0.5  # part of one departed suspect that each good end of its key takes off
JUST_S: Final = 1.0  # seconds after an answer in which a death may still be caused by it
KeyAtModel = tuple[str, str]
Source = JobId | KeyAtModel  # the job or key that turns come from
Place = tuple[str, str, int]  # a worker, a model and an incarnation: models in a lane share the worker and its numbers


class Trial(IntEnum):
    """When a suspect is tried."""

    FIRST = 1  # on the next engine, before it has served anything: the suspect has died alone
    NEXT = 2
    LAST = 3  # after all other turns: others of its job or key were convicted


class DeathExplained(msgspec.Struct, frozen=True, kw_only=True):
    """A convicted turn that was on this engine explains its death."""

    worker: str
    incarnation: int
    key: TurnKey


class DeathUnexplained(msgspec.Struct, frozen=True, kw_only=True):
    """Every turn that was on this engine has ended since, so none was the cause; ``company`` is their number."""

    worker: str
    incarnation: int
    company: int


class SuspectsCleared(msgspec.Struct, frozen=True, kw_only=True):
    """Another turn explains the deaths for which these turns were suspects."""

    keys: tuple[TurnKey, ...]


class SourceDistrusted(msgspec.Struct, frozen=True, kw_only=True):
    """Turns of a source were convicted one after the other: its untried turns are tried, after all others."""

    source: Source


class SourceTrusted(msgspec.Struct, frozen=True, kw_only=True):
    """Turns of a source have ended well: its other turns need no trial."""

    source: Source


Finding = DeathExplained | DeathUnexplained | SuspectsCleared | SourceDistrusted | SourceTrusted


class BlameVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one turn that was on an engine when it died; ``trial`` is None if it is no suspect."""

    charges: Charges
    trial: Trial | None = None
    is_convicted: bool = False
    findings: tuple[Finding, ...] = ()


class _Engine:
    """One incarnation and the turns that are on it; written by ``Blame`` alone."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.serves: set[TurnKey] = set()
        self.had_company = False  # two turns at once, or one that was cut off: a later death may have other causes
        self.departed: dict[Source, float] = {}  # when each key last left a turn on it
        self.answered: dict[KeyAtModel, deque[float]] = {}  # when it has lately answered turns of each key
        self.just_answered: frozenset[KeyAtModel] = frozenset()  # keys that it answered just before it died
        self.is_judged = False  # it has died, and its departed and answered turns were judged
        self.ended_at = float("-inf")  # when it last answered a turn, which may still kill it

    def outlived(self, now: float) -> Iterator[KeyAtModel]:
        """Remove the answers that the engine has outlived, which are good ends; yield the key of each."""
        for source, ends in self.answered.items():
            while ends and ends[0] <= now - JUST_S:
                ends.popleft()
                yield source


class _Death:
    """One death whose cause is not known yet; written by ``Blame`` alone."""

    def __init__(self, model: str, company: int, answered: frozenset[KeyAtModel]) -> None:
        self.model = model
        self.company = company
        self.answered = answered  # keys whose turns it had just answered, and that had none on it
        self.suspects: set[TurnKey] = set()
        self.is_untried = False  # a suspect left before its trial, so its guilt stays unknown


class Trust:
    """The convictions of each source, and the distrusted sources; written by ``Blame`` alone."""

    def __init__(self) -> None:
        self._convictions: Counter[Source] = Counter()
        self.distrusted: set[Source] = set()
        self._good_ends: Counter[Source] = Counter()  # by key, since its last conviction
        self._convicted_at: dict[Source, float] = {}  # by key, as of the next look
        self._departures: dict[Source, float] = {}  # deaths shortly after a client of a key had left

    def __repr__(self) -> str:
        return f"<Trust distrusted={self.distrusted}>"

    def trial(self, source: Source) -> Trial:
        """Return the kind of trial for a suspect that was not alone on its engine."""
        is_last = source in self.distrusted or (source in self._convictions and not isinstance(source, tuple))
        return Trial.LAST if is_last else Trial.NEXT

    def convict(self, source: Source) -> Iterator[Finding]:
        """Count a conviction of a source's turn."""
        yield from self._distrust(source, self._convictions[source] + 1)

    def note_departures(self, sources: Iterable[Source], needed: int) -> Iterator[Finding]:
        """Count a death shortly after clients of these sources had left; ``needed`` such deaths distrust a source."""
        for source in sources:
            self._departures[source] = self._departures.get(source, 0.0) + 1
            if self._departures[source] > needed - 1:
                yield from self._distrust(source, max(DISTRUSTED, self._convictions[source]))

    def _distrust(self, source: Source, convictions: int) -> Iterator[Finding]:
        self._convictions[source] = convictions
        self._good_ends.pop(source, None)
        self._convicted_at.pop(source, None)
        # A job needs two, since few of its turns follow. A key goes on, and each of its deaths hits turns of others.
        needed = 1 if isinstance(source, tuple) else DISTRUSTED
        if convictions >= needed and source not in self.distrusted:
            self.distrusted.add(source)
            yield SourceDistrusted(source=source)

    def note_good_ends(self, sources: Iterable[Source]) -> Iterator[Finding]:
        """Count a good end for each source: a job is trusted after one, a key after many in a row."""
        for source in sources:
            if not isinstance(source, tuple):
                yield from self._restore(source)
                continue
            if source in self._departures:
                self._departures[source] = max(0.0, self._departures[source] - EASED)
            if source in self._convictions:
                self._good_ends[source] += 1
                if self._good_ends[source] >= TRUSTED_ENDS:
                    yield from self._restore(source)
                elif self._convictions[source] < DISTRUSTED:
                    yield from self._put_faith_in(source)  # although its next conviction is the second

    def expire(self, now: float) -> Iterator[Finding]:
        """Trust keys again whose last conviction is long ago."""
        for source in [source for source in self._convictions if isinstance(source, tuple)]:
            if now - self._convicted_at.setdefault(source, now) >= TRUSTED_S:
                yield from self._restore(source)

    def forget_job(self, job_id: JobId) -> None:
        """Forget the convictions of an ended job."""
        del self._convictions[job_id]
        self.distrusted.discard(job_id)

    def _restore(self, source: Source) -> Iterator[Finding]:
        self._convictions.pop(source, None)
        for known in (self._good_ends, self._convicted_at, self._departures):
            known.pop(source, None)
        yield from self._put_faith_in(source)

    def _put_faith_in(self, source: Source) -> Iterator[Finding]:
        if source in self.distrusted:
            self.distrusted.discard(source)
            yield SourceTrusted(source=source)


class Blame:
    """The known engines, deaths and suspects; the scheduler reports every start and end of an attempt.

    ``owner_of`` returns the name of a job's key. Times are monotonic seconds.
    """

    def __init__(self, owner_of: Callable[[JobId], str | None] = lambda _: None) -> None:
        self._owner_of = owner_of
        self._engines: dict[Place, _Engine] = {}
        self._newest: dict[tuple[str, str], int] = {}
        self._places: dict[TurnKey, Place] = {}
        self._deaths: dict[Place, _Death] = {}
        self._records: dict[str, TurnRecord] = {}
        self._refusals: dict[str, TurnRecord] = {}
        self.trust = Trust()

    def __repr__(self) -> str:
        return f"<Blame deaths={len(self._deaths)} on engines={len(self._places)}>"

    def record(self, model: str) -> TurnRecord:
        """Return the record of a model's engines."""
        return self._records.get(model, TurnRecord())

    def refusals(self, model: str) -> TurnRecord:
        """Return the record of refusals of a model's engines."""
        return self._refusals.get(model, TurnRecord())

    def start(self, key: TurnKey, model: str, worker: str, incarnation: int) -> None:
        """Record the start of an attempt on an engine."""
        place, engine = self._engine(model, worker, incarnation)
        engine.had_company = engine.had_company or bool(engine.serves)
        engine.serves.add(key)
        self._places[key] = place

    def _engine(self, model: str, worker: str, incarnation: int) -> tuple[Place, _Engine]:
        place = (worker, model, incarnation)
        if self._newest.get(place[:2]) != incarnation:
            self._newest[place[:2]] = incarnation
            for old in [old for old, engine in self._engines.items() if old[:2] == place[:2] and not engine.serves]:
                del self._engines[old]
        return place, self._engines.setdefault(place, _Engine(model))

    def acquit(self, key: TurnKey, charges: Charges, at: float) -> tuple[Finding, ...]:
        """Record an attempt that the engine answered: the turn is acquitted of all its charges."""
        engine = self._leave(key)
        if engine is not None:
            engine.ended_at = at
            self._records[engine.model] = self.record(engine.model).with_acquitted()
            refusals = self.refusals(engine.model).with_acquitted()
            for _ in range(charges.refusals):
                refusals = refusals.with_unexplained()
            self._refusals[engine.model] = refusals
        findings = list(self._acquit(key))
        source = self._source(key, engine.model if engine is not None else "")
        if not isinstance(source, tuple):
            findings += self.trust.note_good_ends([source])
        elif engine is not None:
            engine.answered.setdefault(source, deque()).append(at)
            findings += self.trust.note_good_ends(engine.outlived(at))
        return tuple(findings)

    def end_unproven(self, key: TurnKey, *, is_cut_off: bool, at: float) -> None:
        """Record an end that proves nothing; a turn that was cut off may still run in the engine."""
        engine = self._leave(key)
        if engine is not None and is_cut_off:
            engine.had_company = True
            source = self._source(key, engine.model)
            if isinstance(source, tuple):
                engine.departed[source] = at

    def note_gone(self, model: str, worker: str, incarnation: int, at: float) -> tuple[Finding, ...]:
        """Record the death of an engine; a turn that was cut off shortly before may have caused it."""
        place = (worker, model, incarnation)
        engine = self._engines.get(place)
        return () if engine is None else tuple(self._judge_departed(engine, at))

    def expire(self, now: float) -> tuple[Finding, ...]:
        """Trust keys whose last conviction is long ago; count answers that their engines have outlived as good ends."""
        findings: list[Finding] = []
        for engine in self._engines.values():
            findings += self.trust.note_good_ends(engine.outlived(now))
        return (*findings, *self.trust.expire(now))

    def forget(self, keys: Iterable[TurnKey]) -> None:
        """Remove turns that will not run again here from the suspects; their guilt stays unknown."""
        if not self._deaths:  # usual, and a cancel may bring a million keys
            return
        gone = set(keys)
        for place, death in list(self._deaths.items()):
            if not death.suspects.isdisjoint(gone):
                death.suspects -= gone
                death.is_untried = True
                if not death.suspects:
                    del self._deaths[place]

    def forget_job(self, job_id: JobId) -> None:
        """Forget the convictions of an ended job."""
        self.trust.forget_job(job_id)

    def die(self, key: TurnKey, charges: Charges, *, is_outside: bool, at: float) -> BlameVerdict:
        """Judge one turn that was on an engine when it died."""
        place = self._places[key]
        engine = self._engines[place]
        company = len(engine.serves)
        findings = () if is_outside else tuple(self._judge_departed(engine, at))
        aboard = {self._source(each, engine.model) for each in engine.serves} if place not in self._deaths else ()
        self._leave(key)
        source = self._source(key, engine.model)
        if is_outside:
            return self._judge_outside(key, source, charges, is_alone=not engine.had_company)
        death = self._deaths.setdefault(place, _Death(engine.model, company, engine.just_answered.difference(aboard)))
        death.suspects.add(key)
        death.is_untried |= bool(engine.departed)
        if not self._counts(engine, source, death.company, at):
            suspected = replace(charges, is_suspect=True)
            # A turn that was alone is tried on a new engine.
            trial = Trial.FIRST if death.company == 1 else self.trust.trial(source)
            return BlameVerdict(charges=suspected, trial=trial, findings=findings)
        charged = replace(charges, is_suspect=True, deaths=charges.deaths + 1)
        needed = self.record(engine.model).faults_to_convict()
        if charged.deaths >= needed:
            return self._convict(key, source, charged)
        return BlameVerdict(charges=charged, trial=Trial.FIRST, findings=findings)

    def _counts(self, engine: _Engine, source: Source, company: int, at: float) -> bool:
        """Whether a death counts against the turn: no other turn may have caused it.

        A turn of a distrusted key need only have been alone: it has had its trial.
        """
        if isinstance(source, tuple) and source in self.trust.distrusted:
            return company == 1
        return not engine.had_company and at - engine.ended_at >= JUST_S

    def clear(self) -> None:
        """Forget everything but the records of engines."""
        for known in (self._engines, self._newest, self._places, self._deaths):
            known.clear()
        self.trust = Trust()

    def _source(self, key: TurnKey, model: str) -> Source:
        owner = self._owner_of(key.job_id)
        return key.job_id if owner is None else (owner, model)

    def _judge_departed(self, engine: _Engine, at: float) -> Iterator[Finding]:
        """Suspect the keys that left a turn on an engine shortly before it died; such turns cannot be tried."""
        if engine.is_judged:
            return
        engine.is_judged = True
        yield from self.trust.note_good_ends(engine.outlived(at))
        engine.just_answered = frozenset(source for source, ends in engine.answered.items() if ends)
        engine.answered.clear()
        engine.departed = {source: left_at for source, left_at in engine.departed.items() if at - left_at < SHORTLY_S}
        # Turns on the engine are tried first. Its last answers are suspected if none of those turns was the cause.
        answered = frozenset() if engine.serves else engine.just_answered
        yield from self._suspect_departed({*engine.departed, *answered}, engine.model)

    def _suspect_departed(self, sources: Iterable[Source], model: str) -> Iterator[Finding]:
        yield from self.trust.note_departures(sources, self.record(model).faults_to_convict())

    def _judge_outside(self, key: TurnKey, source: Source, charges: Charges, *, is_alone: bool) -> BlameVerdict:
        charged = replace(charges, outside=charges.outside + 1)
        if charges.is_suspect and is_alone and charged.outside >= OUTSIDE_DEATHS + MOST_DEATHS:
            return self._convict(key, source, charged)
        if charges.is_suspect or charged.outside >= OUTSIDE_DEATHS:
            return BlameVerdict(charges=replace(charged, is_suspect=True), trial=self.trust.trial(source))
        return BlameVerdict(charges=charged)

    def _convict(self, key: TurnKey, source: Source, charges: Charges) -> BlameVerdict:
        findings: list[Finding] = []
        released: set[TurnKey] = set()
        for place, death in list(self._deaths.items()):
            if key in death.suspects:
                findings.append(DeathExplained(worker=place[0], incarnation=place[-1], key=key))
                released |= {other for other in death.suspects if self._source(other, death.model) != source}
                del self._deaths[place]
        still = {other for death in self._deaths.values() for other in death.suspects}
        cleared = tuple(sorted(released - still - self._places.keys()))
        if cleared:
            findings.append(SuspectsCleared(keys=cleared))
        findings += self.trust.convict(source)
        return BlameVerdict(charges=charges, is_convicted=True, findings=tuple(findings))

    def _acquit(self, key: TurnKey) -> Iterator[Finding]:
        for place, death in list(self._deaths.items()):
            if key not in death.suspects:
                continue
            death.suspects.discard(key)
            if not death.suspects:
                del self._deaths[place]
                yield from self._suspect_departed(death.answered, death.model)
                if not death.is_untried and not death.answered:
                    self._records[death.model] = self.record(death.model).with_unexplained()
                    yield DeathUnexplained(worker=place[0], incarnation=place[-1], company=death.company)

    def _leave(self, key: TurnKey) -> _Engine | None:
        place = self._places.pop(key, None)
        engine = self._engines.get(place) if place is not None else None
        if engine is not None:
            engine.serves.discard(key)
        return engine
