"""Tells workers what was found out of their engines' deaths: what counts against them, and what they cannot bear."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from service.conversations.job import TurnKey
from service.scheduling.core.blame.blame import (
    DeathExplained,
    DeathUnexplained,
    Finding,
    SourceDistrusted,
    SourceTrusted,
    SuspectsCleared,
)
from service.scheduling.core.blame.load_limits import LoadLimits
from service.scheduling.core.events import Suspicion
from workers.fleet import Fleet
from workers.health.snapshot import SlotLimit

logger: Final = logging.getLogger(__name__)


class WorkerFindings:
    """Owned by the scheduler, which tells it of every finding and of every end."""

    def __init__(self, fleet: Fleet, clear_charges: Callable[[Sequence[TurnKey]], None]) -> None:
        self._fleet = fleet
        self._clear_charges = clear_charges
        self._limits = LoadLimits()

    def __repr__(self) -> str:
        return f"<WorkerFindings {self._limits!r}>"

    def take(self, findings: Iterable[Finding]) -> list[Suspicion]:
        """Tell whom findings concern; return what the core is to know of them."""
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
            worker.forgive_failures()
            return
        worker.count_failure()
        if finding.company == 1:
            finding_text = "died by itself: the turn that was alone on it has ended since"
        else:
            slots = self._limits.lower(finding.worker, finding.company)
            finding_text = f"died under load: the {finding.company} turns that were on it have ended since, each alone"
            worker.limit_slots(SlotLimit(slots=slots, because=f"engine {finding.incarnation} {finding_text}"))
            finding_text += f"; {slots} slots for a while"
        worker.recorder.note_finding(finding.incarnation, finding_text)

    def note_answer(self, worker_id: str) -> None:
        """Take an answer: a worker that was lowered may bear more again. The slot of the turn was given back."""
        worker = self._fleet.get(worker_id)
        if worker is None:
            return
        slots = self._limits.note_end(worker.spec.id, worker.slots_in_use + 1, worker.spec.slots)
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
