"""One request of an engine, from the wire's errors to an outcome."""

import anyio

from transport.client import EngineClient
from transport.errors import ContextOverflow, EngineError, EngineOverloaded, EngineRejected
from transport.request import ChatRequest
from workers.generation import Generation
from workers.outcome import Completed, EngineFailed, FailureReason, Outcome, RequestFailed


async def run_request(
    client: EngineClient, request: ChatRequest, generation: Generation, limit_s: float | None
) -> Outcome:
    """Return how ``request`` ended; every ``EngineError`` is translated here and nowhere else."""
    with anyio.move_on_after(limit_s):
        try:
            await client.stream(request, generation)
        except EngineRejected as error:
            return _rejected(error)
        except EngineError as error:
            return EngineFailed(reason=FailureReason.ENGINE_UNREACHABLE, detail=str(error), brought_down=False)
        return Completed(finish_reason=generation.finish_reason or "unknown")
    return RequestFailed(reason=FailureReason.DEADLINE, detail=f"not answered within request_s = {limit_s:g} s")


def _rejected(error: EngineRejected) -> Outcome:
    if isinstance(error, ContextOverflow):
        return RequestFailed(reason=FailureReason.CONTEXT_OVERFLOW, detail=error.message)
    if error.is_about_the_request:
        return RequestFailed(reason=FailureReason.ENGINE_REJECTED, detail=str(error))
    retry_after_s = error.retry_after_s if isinstance(error, EngineOverloaded) else None
    return EngineFailed(
        reason=FailureReason.ENGINE_REJECTED, detail=str(error), brought_down=False, retry_after_s=retry_after_s
    )
