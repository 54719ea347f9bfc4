"""Runs attempts: asks a worker for a turn's answer on the slot that was taken for it, and says how that ended."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import anyio
import anyio.lowlevel

from service.conversations.job import JobId
from service.errors import StoreUnavailable
from service.scheduling.outlet import SchedulerStore
from service.scheduling.prewarmer import RunningPreWarm
from service.scheduling.prompts import JobPrompts
from service.scheduling.tool_calls import TurnCalls, describe_calls
from service.scheduling.turn import TurnRun
from service.store.records import StoredToolCall
from workers.outcome import Cancelled, CancelReason, Completed, FailureReason, Outcome, RequestFailed
from workers.requests.request import CONSTRAINTS, Demand
from workers.requests.slots import Lease
from workers.supervised import SupervisedWorker

STORE_PAUSE_S: Final = 1.0  # before a turn is ready again whose calls of tools could not be read
Ended = tuple[TurnRun, Outcome]
logger = logging.getLogger(__name__)


class TurnRunner:
    """Owned by the scheduler, which takes the ends: all those of one moment in one call of ``on_ends``."""

    def __init__(
        self, jobs: Mapping[JobId, JobPrompts], outlet: SchedulerStore, on_ends: Callable[[Sequence[Ended]], None]
    ) -> None:
        self._jobs = jobs
        self._outlet = outlet
        self._on_ends = on_ends
        self._ended: list[Ended] = []

    def __repr__(self) -> str:
        return f"<TurnRunner ended={len(self._ended)}>"

    async def run_turn(
        self, run: TurnRun, worker: SupervisedWorker, lease: Lease, ahead: RunningPreWarm | None = None
    ) -> None:
        """Run the attempt that has begun, and give its slot back; ``ahead`` is still reading its prompt there."""
        outcome = await self._outcome(run, worker, lease, ahead)
        self._ended.append((run, outcome))
        if len(self._ended) == 1:  # whatever else ends at this moment is applied with it, before the next start
            await anyio.lowlevel.cancel_shielded_checkpoint()
            ended, self._ended = self._ended, []
            self._on_ends(ended)

    async def _outcome(
        self, run: TurnRun, worker: SupervisedWorker, lease: Lease, ahead: RunningPreWarm | None
    ) -> Outcome:
        attempt = run.attempt
        outcome: Outcome
        try:
            with lease, attempt.scope:
                if ahead is not None:
                    await ahead.finish()
                outcome = await self._ask(run, worker)
            if attempt.scope.cancelled_caught:
                reason = CancelReason.LEASE_LOST if attempt.is_interrupted else CancelReason.CONVERSATION_ENDED
                outcome = Cancelled(reason=reason)
            if isinstance(outcome, Completed):
                await run.judge_answer()
        except StoreUnavailable as error:
            logger.warning("turn %s: %s", run.key, error)
            await anyio.sleep(STORE_PAUSE_S)
            return Cancelled(reason=CancelReason.STORE_LOST)
        except Exception as error:
            logger.exception("turn %s: a defect of Roundhouse", run.key)
            return RequestFailed(reason=FailureReason.INTERNAL, detail=f"{type(error).__name__}: {error}")
        return outcome

    async def _ask(self, run: TurnRun, worker: SupervisedWorker) -> Outcome:
        version = worker.weights.version if worker.weights else None
        fault = self._jobs[run.key.job_id].check_weights(run.key, version)
        if fault is not None:
            return RequestFailed(reason=FailureReason.WEIGHTS_CHANGED, detail=fault)
        earlier: Sequence[StoredToolCall] = ()
        if self._jobs[run.key.job_id].has_tools(run.key.agent_id):  # once: what this attempt calls is no earlier one's
            earlier = await self._outlet.calls_of(run.key)
        is_own = not CONSTRAINTS.isdisjoint(worker.spec.params)  # the operator's, who has the last word on a model
        constraint = None if is_own else run.constraint
        if constraint is None:
            return await self._perform(run, worker, earlier, run.demand(None, is_own=is_own), is_told=False)
        plan = worker.constraints.plan(constraint)
        demand = run.demand(constraint) if plan.is_sent else None
        outcome = await self._perform(run, worker, earlier, demand, is_told=plan.is_told)
        if plan.is_sent and isinstance(outcome, Completed) and run.attempt.answer.constrained_by is not None:
            worker.constraints.note_answer(constraint, run.attempt.answer.text)
        if run.attempt.answer.constrained_by is not None and _is_refused(outcome):
            without = await self._perform(run, worker, earlier, None, is_told=True)
            if isinstance(without, Completed):
                logger.warning("turn %s: its constraint is told in words: %s", run.key, outcome)
                worker.constraints.note_refused(constraint)
            return without
        return outcome

    async def _perform(
        self,
        run: TurnRun,
        worker: SupervisedWorker,
        earlier: Sequence[StoredToolCall],
        demand: Demand | None,
        *,
        is_told: bool,
    ) -> Outcome:
        attempt, key, prompts = run.attempt, run.key, self._jobs[run.key.job_id]
        journal = addition = None
        if prompts.has_tools(key.agent_id):
            journal, addition = TurnCalls(key, earlier, self._outlet.append), describe_calls(earlier)
        request, attempt.prompt = prompts.request(
            key, run.rejected, attempt.started_at, worker.spec, is_told=is_told, addition=addition
        )
        asked = replace(request, journal=journal, demand=demand, is_watched=self._outlet.is_followed(key.job_id))
        attempt.request = worker.prepare(asked, attempt.answer)
        return await worker.perform(asked, attempt.answer, attempt.request)


def _is_refused(outcome: Outcome) -> bool:
    return isinstance(outcome, RequestFailed) and outcome.reason is FailureReason.ENGINE_REJECTED
