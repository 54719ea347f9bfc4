"""One turn from the moment it is ready to its end, over all its attempts."""

from datetime import UTC, datetime
from typing import Final

import msgspec
from msgspec.structs import replace

from service.conversations.job import Agent, TurnKey
from service.conversations.prompt_messages import Rejected
from service.conversations.states import ENDED_TURNS, TurnState
from service.conversations.transcript import Attempt, Charges, Turn, UnfinishedTurn
from service.conversations.validation import Validation
from service.scheduling.jobs.attempt import RunningAttempt
from transport.request import Constraint, Thought
from workers.offload.pool import judge as judge_offloaded
from workers.outcome import FailureReason, Outcome
from workers.policy.liveness import Verdict
from workers.requests.request import Demand

QUIET: Final = frozenset({Verdict.SILENT, Verdict.STALLED, Verdict.DEAD})


async def judge(validation: Validation, answer: str) -> str | None:
    """Return the fault of an answer, or None; an answer that takes too long to judge has one."""
    try:
        return await judge_offloaded(validation.fault_of, answer, size=max(len(answer), validation.chars))
    except TimeoutError:
        return "its validation did not end in time"


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a turn in flight: tokens read of the prompt, written of the answer, and the watch's verdict.

    ``silent_s`` is 0 until the watch calls it silent; ``silence_limit_s`` is how long it may be.
    """

    key: TurnKey
    prompt_tokens_done: int
    prompt_tokens: int | None
    output_tokens: int
    tokens_per_s: float
    verdict: str | None
    silent_s: int
    silence_limit_s: float | None


def constraint_of(agent: Agent) -> Constraint | None:
    """Return the constraint of an agent's answers; None if its author sets one, or wants none."""
    validation = agent.validation
    if validation is None or not validation.is_constrained or agent.is_constrained:
        return None
    return validation.constraint(Thought.OPTIONAL if agent.markup else Thought.NONE)


class TurnRun:
    """A turn that was on a slot and has not ended, as it is known; written by the scheduler alone.

    ``attempt`` is the one that runs, or the last one.
    """

    def __init__(
        self,
        key: TurnKey,
        agent: Agent,
        queued_at: datetime,
        attempt: RunningAttempt,
        so_far: UnfinishedTurn | None = None,
    ) -> None:
        self.key = key
        self.attempt = attempt
        self._agent = agent
        self._fault: str | None = None  # of the answer that was judged
        self.charges = so_far.charges if so_far else Charges()
        self.attempts: list[Attempt] = list(so_far.attempts) if so_far else []
        self.rejected: list[Rejected] = list(so_far.rejected) if so_far else []
        self._queued_at = so_far.queued_at if so_far else queued_at
        self.ready_at = queued_at  # for the attempt that runs, or for the next one
        self._started_at = (so_far.started_at if so_far else None) or attempt.started_at

    def __repr__(self) -> str:
        return f"<TurnRun {self.key} attempts={len(self.attempts)} {self.attempt!r}>"

    @property
    def so_far(self) -> UnfinishedTurn:
        """The attempts and charges of the turn, as the next life of the service would need them."""
        return UnfinishedTurn(
            key=self.key,
            attempts=tuple(self.attempts),
            rejected=tuple(self.rejected),
            charges=self.charges,
            queued_at=self._queued_at,
            started_at=self._started_at,
        )

    def attempts_so_far(self, *, is_running: bool) -> Turn:
        """Return the turn with its attempts and times alone, which costs less than all of it; the running one too."""
        running = (self.attempt.so_far(),) if is_running else ()
        return Turn(
            key=self.key,
            state=TurnState.IN_FLIGHT if is_running else TurnState.READY,
            attempts=(*self.attempts, *running),
            queued_at=self._queued_at,
            started_at=self._started_at,
            first_token_at=self.attempt.first_token_at,
        )

    @property
    def words(self) -> str:
        """The answer's words to others."""
        return self.attempt.said(has_markup=self._agent.markup).words

    @property
    def constraint(self) -> Constraint | None:
        """The constraint for the engine; None where the author gives one, or wants none."""
        return constraint_of(self._agent)

    def demand(self, constraint: Constraint | None, *, is_own: bool = False) -> Demand | None:
        """Return the demand on the answer: ``constraint``, or that of the author's or the model's parameters.

        ``is_own``: the model's say something.
        """
        if constraint is None and not is_own and not self._agent.is_constrained:
            return None
        is_met = self._is_valid if self._agent.validation is not None else None
        return Demand(constraint=constraint, is_met=is_met, at_once=bool(self.rejected))

    async def _is_valid(self, text: str) -> bool:
        return self._agent.validation is None or await judge(self._agent.validation, text) is None

    async def judge_answer(self) -> None:
        """Find out whether a complete answer is valid; its slot may be another turn's meanwhile."""
        if self._agent.validation is not None:
            self._fault = await judge(self._agent.validation, self.attempt.answer.text)

    def take_answer(self) -> str | None:
        """Take a complete answer that was judged; return why it is not valid, if so."""
        fault, self._fault = self._fault, None
        if fault is not None:
            self.rejected.append((self.attempt.answer.text, fault))
            self.refuse_answer(FailureReason.INVALID_ANSWER, fault)
        return fault

    def refuse_answer(self, reason: FailureReason, detail: str) -> None:
        """Mark the last attempt as failed: its answer is complete, and does not stand."""
        self.attempts[-1] = replace(
            self.attempts[-1],
            outcome=TurnState.FAILED,
            reason=reason,
            detail=detail,
            tool_calls=tuple(self.attempt.answer.tool_calls),
        )

    def end_attempt(self, outcome: Outcome) -> None:
        """Keep what an attempt has brought, however it ended."""
        self.attempts.append(self.attempt.end_attempt(outcome))

    def snapshot(self, state: TurnState, reason: str | None = None, detail: str | None = None) -> Turn:
        """Return the turn as it stands in a transcript, in ``state``."""
        turn = Turn(
            key=self.key,
            role=self._agent.role,
            state=state,
            reason=reason,
            detail=detail,
            attempts=tuple(self.attempts),
            queued_at=self._queued_at,
            started_at=self._started_at,
            finished_at=datetime.now(UTC) if state in ENDED_TURNS else None,
        )
        return self.attempt.describe(turn, has_markup=self._agent.markup)

    def progress(self) -> Progress:
        """Return how far the attempt on a slot is."""
        answer, request = self.attempt.answer, self.attempt.request
        read, judged = answer.generation.prompt_progress, request.judgement if request else None
        return Progress(
            key=self.key,
            prompt_tokens_done=read.processed if read else 0,
            prompt_tokens=read.total if read else None,
            output_tokens=answer.output_tokens,
            tokens_per_s=answer.generation.tokens_per_s,
            verdict=judged.verdict if judged else None,
            silent_s=int(judged.silent_s) if judged and judged.verdict in QUIET else 0,
            silence_limit_s=judged.limit_s if judged else None,
        )
