"""Gives a running engine another adapter: vLLM loads it, llama.cpp is started again.

llama-server reads adapters only at its start (``--lora-scaled``; build b11434 cannot add one later), so its worker is
held, finishes its requests, and gets a new engine, while the model's other workers go on.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Final

import anyio

from transport.control import EngineControl
from transport.errors import CannotAsk, EngineError, EngineRejected
from workers.errors import AdapterRefused
from workers.outcome import FailureReason
from workers.spec import EngineKind
from workers.states import Hold, WorkerState
from workers.supervised import SupervisedWorker

LOAD_LIMIT_S: Final = 120.0
UNLOAD_LIMIT_S: Final = 30.0
TAIL_LINES: Final = 5
_ABSENT: Final = 404
_FAILING: Final = frozenset({WorkerState.BACKOFF, WorkerState.FAILED})
_OVER: Final = frozenset({WorkerState.FAILED, WorkerState.STOPPED})  # nothing follows without an operator, or for long
logger = logging.getLogger(__name__)
NextChange = Callable[[], Awaitable[None]]  # returns after a change of any worker's state


async def bring(worker: SupervisedWorker, next_change: NextChange) -> bool:
    """Return whether a worker's engine has all wanted adapters; False if another engine must start first.

    Raises:
        AdapterRefused: the engine refuses one, and why.
    """
    if not worker.adapters.missing:
        return worker.now.is_serving
    if worker.spec.engine is EngineKind.VLLM:
        return await _tell(worker)
    return await _start_anew(worker, next_change)


async def unload(worker: SupervisedWorker, name: str) -> None:
    """Unload an adapter from vLLM; llama.cpp keeps it until its next start, unused."""
    if worker.spec.engine is not EngineKind.VLLM or name not in worker.adapters.loaded:
        return
    incarnation = worker.now.incarnation
    try:
        with anyio.fail_after(UNLOAD_LIMIT_S):
            await EngineControl(worker.endpoint).unload_adapter(name, worker.adapters.numbers.get(name))
    except (EngineError, TimeoutError) as error:
        if not (isinstance(error, EngineRejected) and error.status == _ABSENT):  # or it has none of that name
            _break(worker, incarnation, f"it could not unload adapter {name}", error)
            return
    if worker.now.incarnation == incarnation:
        worker.adapters.remove(name)


async def _tell(worker: SupervisedWorker) -> bool:
    incarnation, control = worker.now.incarnation, EngineControl(worker.endpoint)
    for name, path in worker.adapters.missing.items():
        try:
            with anyio.fail_after(LOAD_LIMIT_S):
                if name in worker.adapters.loaded:  # other weights, from a load that was undone
                    await control.unload_adapter(name, worker.adapters.numbers.get(name))
                number = await control.load_adapter(name, path)
        except (EngineRejected, CannotAsk) as error:
            raise AdapterRefused(f"{worker.spec.id} does not take adapter {name}: {error}") from error
        except (EngineError, TimeoutError) as error:
            _break(worker, incarnation, f"it could not load adapter {name}", error)
            return False
        if worker.now.incarnation != incarnation:
            return False
        worker.adapters.add(name, path, number)
    return True


async def _start_anew(worker: SupervisedWorker, next_change: NextChange) -> bool:
    names, before = ", ".join(worker.adapters.missing), worker.now.incarnation
    worker.drain_nowait(f"an engine that has adapter {names} follows when its requests have ended", Hold.ADAPTERS)
    try:
        await worker.slots.wait_empty()
        if worker.now.incarnation == before and worker.now.is_serving:
            worker.restart_nowait(f"asked for adapter {names}")
        while not (worker.now.incarnation > before and worker.now.is_serving):
            if worker.now.state in _FAILING and worker.now.incarnation > before:
                raise AdapterRefused(_words(worker, names))
            if worker.now.state in _OVER:
                return False
            await next_change()
        return not worker.adapters.missing
    finally:
        worker.resume_nowait(f"adapter {names}", Hold.ADAPTERS)


def _words(worker: SupervisedWorker, names: str) -> str:
    failure = worker.supervisor.failure()
    tail = "".join(f"\n  | {line}" for line in failure.log_tail[-TAIL_LINES:])
    return f"{worker.spec.id} does not start with adapter {names}: {failure.because}{tail}"


def _break(worker: SupervisedWorker, incarnation: int, what: str, error: Exception) -> None:
    if worker.now.incarnation == incarnation and worker.now.is_serving:
        because = f"{what}: {str(error) or 'not in time'}"
        worker.break_engine(FailureReason.ENGINE_UNREACHABLE, because, {})
