"""The effects of findings about engines' deaths on workers: failures, forgiveness, and fewer slots."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from service.conversations.job.job import TurnKey
from service.scheduling.core.blame import (
    DeathExplained,
    DeathUnexplained,
    Finding,
    SourceDistrusted,
    SourceTrusted,
    SuspectsCleared,
)
from service.scheduling.core.events import Suspicion
from service.scheduling.core.kv_budgets import KvUse
from service.scheduling.work import Work
from workers.fleet import Fleet
from workers.outcome import Completed, Outcome
from workers.requests.slots import SlotLimit

KEPT_SHARE: Final = 0.75  # share of the turns on the engine at its death that its worker may run afterwards
PROBATION: Final = 50  # completed turns at full load before the limit rises by one
PROBATION_MAX: Final = 1600
logger: Final = logging.getLogger(__name__)


class KvUses:
    """The KV use of turns, for workers that share their cache by tokens; owned by the scheduler."""

    def __init__(self, fleet: Fleet, works: Iterable[Work]) -> None:
        self._fleet = fleet
        self._works = works
        self._seen: dict[TurnKey, KvUse] = {}

    def __repr__(self) -> str:
        return f"<KvUses of {len(self._seen)} turns>"

    def read_changes(self) -> Mapping[TurnKey, KvUse]:
        """Return the turns whose KV use has changed since the last call, in tokens."""
        lenders = {worker.spec.id for worker in self._fleet if worker.kv.budget is not None}
        if not lenders:
            return {}
        seen: dict[TurnKey, KvUse] = {}
        for turn in (turn for work in self._works for turn in work.on_slots()):
            answer = turn.attempt.answer
            prompt = answer.told_prompt_tokens if turn.attempt.worker in lenders else None
            if prompt is not None:
                seen[turn.key] = KvUse(prompt=prompt, answer=answer.generation.output_tokens)
        before, self._seen = self._seen, seen
        return {key: use for key, use in seen.items() if use != before.get(key)}


class LoadLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The lowered slots of one worker, and the completed turns until the next slot is tried."""

    slots: int
    probation: int
    ends_left: int


class LoadLimits:
    """The workers with lowered slots; written by the scheduler alone."""

    def __init__(self) -> None:
        self._limits: dict[str, LoadLimit] = {}

    def __repr__(self) -> str:
        return f"<LoadLimits {self._limits}>"

    def lower(self, worker: str, company: int) -> int:
        """Return the slots left to a worker whose engine died with ``company`` turns on it."""
        before = self._limits.get(worker)
        slots = max(1, min(company - 1, int(company * KEPT_SHARE)))
        if before is not None:
            slots = min(slots, before.slots)
        probation = min(PROBATION_MAX, 2 * before.probation) if before is not None else PROBATION
        self._limits[worker] = LoadLimit(slots=slots, probation=probation, ends_left=probation)
        return slots

    def learn_from_end(self, worker: str, in_flight: int, full: int) -> int | None:
        """Count an end with ``in_flight`` turns on the worker, itself included; return the new limit if it rises.

        ``full`` is the worker's number of slots without a limit.
        """
        limit = self._limits.get(worker)
        if limit is None or in_flight < limit.slots or limit.slots >= full:
            return None
        if limit.ends_left > 1:
            self._limits[worker] = replace(limit, ends_left=limit.ends_left - 1)
            return None
        self._limits[worker] = LoadLimit(slots=limit.slots + 1, probation=limit.probation, ends_left=limit.probation)
        return limit.slots + 1


class WorkerFindings:
    """Applies findings and outcomes to workers; owned by the scheduler."""

    def __init__(self, fleet: Fleet, clear_charges: Callable[[Sequence[TurnKey]], None]) -> None:
        self._fleet = fleet
        self._clear_charges = clear_charges
        self._limits = LoadLimits()

    def __repr__(self) -> str:
        return f"<WorkerFindings {self._limits!r}>"

    def apply_findings(self, findings: Iterable[Finding]) -> list[Suspicion]:
        """Apply findings to workers and turns; return the suspicions for the core."""
        found: list[Suspicion] = []
        for finding in findings:
            match finding:
                case DeathExplained() | DeathUnexplained():
                    self._tell_worker(finding)
                case SuspectsCleared():
                    self._clear_charges(finding.keys)
                    found.append(finding)
                case SourceDistrusted() | SourceTrusted():
                    _log_trust(finding)
                    found.append(finding)
        return found

    def _tell_worker(self, finding: DeathExplained | DeathUnexplained) -> None:
        worker = self._fleet.get(finding.worker)
        if worker is None:
            return
        if isinstance(finding, DeathExplained):
            place = f"{finding.key.job_id}/{finding.key.conversation_id}"
            finding_text = f"brought down by the turn of {finding.key.agent_id} in round {finding.key.round} of {place}"
            worker.recorder.note_finding(finding.incarnation, finding_text)
            worker.note_cause(is_request=True)
            return
        worker.note_cause(is_request=False)
        if finding.company == 1:
            finding_text = "died by itself: the turn that was alone on it has ended since"
        else:
            slots = self._limits.lower(finding.worker, finding.company)
            finding_text = f"died under load: the {finding.company} turns that were on it have ended since, each alone"
            worker.limit_slots(SlotLimit(slots=slots, because=f"engine {finding.incarnation} {finding_text}"))
            finding_text += f"; {slots} slots for a while"
        worker.recorder.note_finding(finding.incarnation, finding_text)

    def note_outcome(self, worker_id: str, outcome: Outcome) -> None:
        """Count an end: after an answer a worker with lowered slots may get one more. Its slot was given back."""
        worker = self._fleet.get(worker_id) if isinstance(outcome, Completed) else None
        if worker is None:
            return
        slots = self._limits.learn_from_end(worker.spec.id, worker.slots.in_use + 1, worker.spec.slots)
        if slots is not None:
            because = f"it died under load, and has borne {slots - 1} since"
            worker.limit_slots(SlotLimit(slots=slots, because=because) if slots < worker.spec.slots else None)


def _log_trust(finding: SourceDistrusted | SourceTrusted) -> None:
    source = finding.source
    name = f"key {source[0]} at model {source[1]}" if isinstance(source, tuple) else f"job {source}"
    if isinstance(finding, SourceDistrusted):
        logger.warning("%s: engines have died of its turns; others of them are tried alone before they run", name)
    else:
        logger.info("%s: its turns have ended well; they run beside others again", name)
