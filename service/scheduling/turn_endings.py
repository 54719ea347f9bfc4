"""Attempts in flight, run side by side, and the end of each: its blame, and whether its turn runs again."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, assert_never

import anyio.lowlevel
from msgspec.structs import replace

from service.conversations.job.job import JobId, TurnKey
from service.conversations.record.log_fields import Fields, of_turn
from service.scheduling.core import events
from service.scheduling.core.blame import Blame, BlameVerdict, Finding
from service.scheduling.endings import FailureEvidence, Move, Proof, TurnVerdict, decide, proof_of
from service.scheduling.work import End, OnSlot
from service.scheduling.worker_findings import KvUses, WorkerFindings
from service.scheduling.works import Works
from service.store.records import Record
from workers.fleet import Fleet
from workers.log_context import about, line_about
from workers.outcome import Cancelled, CancelReason, EngineFailed, FailureReason, Outcome, RequestFailed
from workers.requests.slots import Lease
from workers.supervised import SupervisedWorker

Ended = tuple[OnSlot, Outcome]
GAVE_WAY: Final = Cancelled(reason=CancelReason.CACHE_FULL)
logger = logging.getLogger(__name__)


class TurnRunner:
    """Runs attempts for the scheduler; ``on_ends`` gets all ends of one moment in one call."""

    def __init__(self, on_ends: Callable[[Sequence[Ended]], None]) -> None:
        self._on_ends = on_ends
        self._ended: list[Ended] = []

    def __repr__(self) -> str:
        return f"<TurnRunner ended={len(self._ended)}>"

    async def run_turn(self, turn: OnSlot, worker: SupervisedWorker, lease: Lease) -> None:
        """Run the attempt that has begun, and give its slot back."""
        outcome: Outcome
        try:
            with about(_place_of(turn)):
                outcome = await turn.run(worker, lease)
        except Exception as error:
            line = line_about(_place_of(turn)())
            logger.exception("turn %s: a defect of Roundhouse", turn.key, extra=line)
            outcome = RequestFailed(reason=FailureReason.INTERNAL, detail=f"{type(error).__name__}: {error}")
        self._ended.append((turn, outcome))
        if len(self._ended) == 1:  # other ends of this moment are applied in the same call
            await anyio.lowlevel.cancel_shielded_checkpoint()
            ended, self._ended = self._ended, []
            self._on_ends(ended)


class TurnEndings:
    """Judges ends, one at a time and at once; it shares its state with the scheduler, in the same task.

    ``model_of`` returns the model of a turn, ``refusal_s`` how long a worker may refuse one.
    """

    def __init__(
        self, blame: Blame, model_of: Callable[[TurnKey], str], refusal_s: Callable[[str], float | None]
    ) -> None:
        self._blame = blame
        self._model_of = model_of
        self._refusal_s = refusal_s

    def __repr__(self) -> str:
        return f"<TurnEndings {self._blame!r}>"

    def take_end(self, turn: OnSlot, outcome: Outcome) -> End:
        """Apply the end of an attempt: its state, then its records, before anything is awaited."""
        with about(_place_of(turn)):  # log lines name this turn
            return self._take_end(turn, outcome)

    def refuse_late(self, turn: OnSlot, outcome: Outcome) -> None:
        """Log that another node runs a turn whose attempt has ended here."""
        line = line_about(_place_of(turn)())
        logger.warning("turn %s: a late result is refused, another node runs it: %s", turn.key, outcome, extra=line)

    def _take_end(self, turn: OnSlot, outcome: Outcome) -> End:
        turn.end_attempt(outcome)
        key, proof, now_s = turn.key, proof_of(outcome), time.monotonic()
        findings: Sequence[Finding] = ()
        death = None
        if proof is Proof.BORNE:
            findings = self._blame.acquit(key, turn.charges, now_s)
        elif isinstance(outcome, EngineFailed) and proof is Proof.DIED:
            death = self._blame.die(key, turn.charges, is_outside=outcome.is_outside, at=now_s)
            findings = death.findings
        else:
            self._blame.end_unproven(key, is_cut_off=proof is Proof.CUT_OFF, at=now_s)
        evidence = self._evidence(turn, death, now_s) if isinstance(outcome, EngineFailed) else None
        verdict = decide(outcome, turn.charges, evidence, may_run_again=turn.may_run_again)
        turn.charges = verdict.charges
        if verdict.move is not Move.RUN_AGAIN and proof is not Proof.BORNE:
            self._blame.forget([key])
        end = _move(turn, verdict)
        return replace(end, findings=findings) if findings else end

    def _evidence(self, turn: OnSlot, death: BlameVerdict | None, now_s: float) -> FailureEvidence:
        model = self._model_of(turn.key)
        return FailureEvidence(
            death=death,
            deaths=self._blame.record(model),
            refusals=self._blame.refusals(model),
            asked_s=max(0.0, now_s - turn.attempt.answer.started_at),
            refusal_s=self._refusal_s(turn.attempt.worker),
            now=time.time(),
        )


class EndsOfMoment:
    """Applies all attempts that ended at one moment together; owned by the scheduler.

    ``is_spent`` says of a turn whether the core needs the time and the tokens of its attempt.
    """

    def __init__(
        self,
        blame: Blame,
        fleet: Fleet,
        works: Works,
        findings: WorkerFindings,
        uses: KvUses,
        is_spent: Callable[[TurnKey], bool],
    ) -> None:
        self._endings = TurnEndings(blame, works.model_of, fleet.refusal_s)
        self._works = works
        self._findings = findings
        self._uses = uses
        self._is_spent = is_spent

    def __repr__(self) -> str:
        return f"<EndsOfMoment {self._endings!r}>"

    def take(self, ended: Sequence[Ended], *, is_late: bool) -> tuple[list[events.Event], list[Record]]:
        """Return the events for the core and the facts for the store; none if another node has the turns."""
        # A turn that gave way is ready again at once, so the core needs the present KV use of all turns.
        uses = self._uses.read_changes() if any(outcome == GAVE_WAY for _, outcome in ended) else {}
        in_order = sorted(ended, key=self._place_of_end) if len(ended) > 1 else ended
        ends = [self._take_off(turn, outcome) for turn, outcome in in_order]
        if is_late:
            for turn, outcome in ended:
                self._endings.refuse_late(turn, outcome)
            return [], []
        found = self._findings.apply_findings(finding for end in ends for finding in end.findings)
        grown = [events.KvUseTold(uses=uses)] if uses else []
        spent = [turn.attempt.spent(turn.key) for turn, _ in ended if self._is_spent(turn.key)]
        return [*grown, *spent, *(end.event for end in ends), *found], [fact for end in ends for fact in end.records]

    def _take_off(self, turn: OnSlot, outcome: Outcome) -> End:
        self._works.of(turn.key.job_id).note_off_slot(turn.key)
        end = self._endings.take_end(turn, outcome)
        self._findings.note_outcome(turn.attempt.worker, outcome)
        return end

    def _place_of_end(self, ended: Ended) -> tuple[float, tuple[JobId, str, int]]:
        """Return the order in which ends are applied: of turns whose engine died, the newest is judged first."""
        turn, outcome = ended
        is_death = isinstance(outcome, EngineFailed) and outcome.brought_down
        newest = -turn.attempt.answer.started_at if is_death else float("-inf")
        return newest, self._works.place(turn.key)


def _place_of(turn: OnSlot) -> Callable[[], Fields]:
    return partial(of_turn, turn.key, turn.attempt.worker, turn.attempt.incarnation)


def _move(turn: OnSlot, verdict: TurnVerdict) -> End:
    match verdict.move:
        case Move.COMPLETE:
            return turn.complete()
        case Move.RUN_AGAIN:
            return turn.run_again(verdict.reason, verdict.detail, verdict.trial)
        case Move.FAIL:
            return turn.fail(verdict.reason, verdict.detail)
        case Move.CUT_OFF:
            return turn.cut_off()
        case _:
            assert_never(verdict.move)
