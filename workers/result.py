"""How far a submitted request is, and what it has brought: what ``Worker`` answers.

Source: specification, "Worker interface" and "Request results".
"""

from dataclasses import dataclass
from enum import StrEnum

from workers.health.incident import Evidence
from workers.outcome import Cancelled, CancelReason, Completed, EngineFailed, FailureReason, Outcome, RequestFailed
from workers.policy.liveness import Verdict
from workers.requests.in_flight import InFlightRequest
from workers.requests.request import RequestId
from workers.tools.calls import Signal, ToolRecord


class RequestState(StrEnum):
    """Where a request is."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatus:
    """A request at one moment; ``verdict`` and ``evidence`` are None once it has ended."""

    id: RequestId
    job_name: str
    state: RequestState
    reason: FailureReason | CancelReason | None
    detail: str | None
    verdict: Verdict | None
    evidence: Evidence | None
    output_chars: int
    output_tokens: int
    tokens_per_s: float
    tool_iterations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCount:
    """What a request has cost over all its generations, in tokens; None where the engine has not told."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """How a request ended, and all that it has brought until then, whole or not; times are in seconds."""

    id: RequestId
    job_name: str
    state: RequestState
    reason: FailureReason | CancelReason | None
    detail: str | None
    text: str
    thinking: str
    tool_calls: tuple[ToolRecord, ...]
    signals: tuple[Signal, ...]
    finish_reason: str | None
    usage: TokenCount
    incarnation: int
    duration_s: float
    first_token_s: float | None


def state_of(outcome: Outcome | None) -> tuple[RequestState, FailureReason | CancelReason | None, str | None]:
    """Return where a request with such an ending is, and why; None is none yet."""
    match outcome:
        case None:
            return RequestState.RUNNING, None, None
        case Completed():
            return RequestState.COMPLETED, None, None
        case EngineFailed() | RequestFailed():
            return RequestState.FAILED, outcome.reason, outcome.detail
        case Cancelled():
            return RequestState.CANCELLED, outcome.reason, None


def result_of(running: InFlightRequest, incarnation: int, ended_at: float) -> RequestResult:
    """Return the result of an ended request, in the incarnation that it was submitted to."""
    answer = running.answer
    state, reason, detail = state_of(running.ending)
    usage = answer.usage
    first_at = answer.first_token_at
    return RequestResult(
        id=running.id,
        job_name=running.job_name,
        state=state,
        reason=reason,
        detail=detail,
        text=answer.text,
        thinking=answer.reasoning,
        tool_calls=tuple(answer.tool_calls),
        signals=tuple(answer.signals),
        finish_reason=answer.finish_reason,
        usage=TokenCount(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        )
        if usage
        else TokenCount(),
        incarnation=incarnation,
        duration_s=round(ended_at - answer.started_at, 6),
        first_token_s=None if first_at is None else round(first_at - answer.started_at, 6),
    )
