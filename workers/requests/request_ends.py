"""The outcome of a request whose engine has refused it or broken its answer off. Pure."""

from collections.abc import Sequence
from typing import Final

from transport.errors import (
    AnswerTooLarge,
    CacheFull,
    ContextOverflow,
    EngineError,
    EngineOverloaded,
    EngineRejected,
    UnreadableFrame,
)
from workers.outcome import Cancelled, CancelReason, EngineFailed, FailureReason, Outcome, RequestFailed
from workers.requests.generation import Generation
from workers.requests.prompts.render import ToolBudget
from workers.requests.prompts.stack import ToolExchange

SERVER_ERROR: Final = 500


def broken_off(error: EngineError) -> Outcome:
    """Return the ending for an answer that broke off; one that was too large would be so again."""
    if isinstance(error, AnswerTooLarge):
        return RequestFailed(reason=FailureReason.ENGINE_REJECTED, detail=str(error))
    reason = FailureReason.ENGINE_REJECTED if isinstance(error, UnreadableFrame) else FailureReason.ENGINE_UNREACHABLE
    return EngineFailed(reason=reason, detail=str(error), brought_down=False)


def is_refused(outcome: Outcome) -> bool:
    """Whether the engine has refused the request."""
    return isinstance(outcome, RequestFailed) and outcome.reason is FailureReason.ENGINE_REJECTED


def failure_of(error: EngineError, *, has_pool: bool) -> Outcome:
    """Return the ending for an engine's error; an engine whose shared cache is full has no fault if it ``has_pool``."""
    if not isinstance(error, EngineRejected):
        return broken_off(error)
    if has_pool and isinstance(error, CacheFull):  # the pool manages its room: no fault
        return Cancelled(reason=CancelReason.CACHE_FULL)
    return rejected(error, is_about_the_request=error.is_about_the_request)


def declined(error: EngineError, generation: Generation) -> RequestFailed | None:
    """Return the ending for an engine that does not begin to go on, and may write the whole answer; None for others."""
    is_later = isinstance(error, EngineOverloaded | CacheFull)
    if not isinstance(error, EngineRejected) or is_later or generation.first_token_at is not None:
        return None
    generation.is_in_doubt = error.status >= SERVER_ERROR or isinstance(error, ContextOverflow)
    return RequestFailed(reason=FailureReason.ENGINE_REJECTED, detail=str(error))


def loop_failure(what: str) -> RequestFailed:
    """Return the ending for a model that repeats itself."""
    return RequestFailed(reason=FailureReason.REPEATED_LINE_LOOP, detail=what)


def rejected(error: EngineRejected, *, is_about_the_request: bool) -> Outcome:
    """Return the ending for a request that its engine refused."""
    if isinstance(error, ContextOverflow):
        return RequestFailed(reason=FailureReason.CONTEXT_OVERFLOW, detail=error.message)
    if is_about_the_request:
        return RequestFailed(reason=FailureReason.ENGINE_REJECTED, detail=str(error))
    retry_after_s = error.retry_after_s if isinstance(error, EngineOverloaded) else None
    return EngineFailed(
        reason=FailureReason.ENGINE_REJECTED, detail=str(error), brought_down=False, retry_after_s=retry_after_s
    )


def overdrawn(names: Sequence[str], budget: ToolBudget, exchanges: Sequence[ToolExchange]) -> RequestFailed:
    """Return the ending for a model that calls these tools after its last iteration."""
    used = f"its {budget.iterations} tool iterations"
    if budget.is_stuck(exchanges):
        used = f"{budget.stuck} iterations in which the same calls brought the same results"
    return RequestFailed(reason=FailureReason.TOOL_BUDGET, detail=f"the model called {', '.join(names)} after {used}")
