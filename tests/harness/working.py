"""One worker on its own: started and stopped, with requests that are put to it and followed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import anyio.lowlevel

from tests.harness.waiting import LIMIT_S, is_alive, wait_until
from workers import (
    RequestResult,
    RequestStatus,
    RestartPolicy,
    Worker,
    WorkerSpec,
    WorkerTimeouts,
)
from workers.health.incident import Incident

QUICK = RestartPolicy(initial_s=0.05, max_s=0.1, failures=3, window_s=60, retry_s=None)


STALLS = WorkerTimeouts(start_s=LIMIT_S, stop_grace_s=2, prefill_stall_s=0.6, decode_stall_s=0.6, cancel_s=0.6)


@asynccontextmanager
async def working(spec: WorkerSpec) -> AsyncIterator[Worker]:
    """Run a worker for a block, under a limit; nothing of it is left."""
    with anyio.fail_after(2 * LIMIT_S):
        async with Worker(replace(spec, restart=QUICK)) as worker:
            pid = worker.snapshot().pid
            yield worker
        assert pid is None or not is_alive(pid)


async def submit(worker: Worker, prompt: str = "Go.", **params: object) -> int:
    request_id = await worker.submit("a job", "You are a test.", prompt, params)
    assert isinstance(request_id, int)
    return request_id


async def result(worker: Worker, request_id: int) -> RequestResult:
    told = await worker.get_result(request_id)
    assert isinstance(told, RequestResult)
    return told


async def ask(worker: Worker, prompt: str = "Go.") -> RequestResult:
    return await result(worker, await submit(worker, prompt))


async def status(worker: Worker, request_id: int) -> RequestStatus:
    told = await worker.get_status(request_id)
    assert isinstance(told, RequestStatus)
    return told


async def wait_incident(worker: Worker) -> Incident:
    await wait_until(lambda: list(worker.recorder.incidents), "an incident is kept")
    return next(iter(worker.recorder.incidents))


async def wait_for_tokens(worker: Worker, request_id: int) -> None:
    with anyio.fail_after(LIMIT_S):
        while (await status(worker, request_id)).output_tokens == 0:
            await anyio.lowlevel.checkpoint()


async def ask_briefly(worker: Worker) -> RequestResult:
    request_id = await submit(worker)
    await wait_for_tokens(worker, request_id)
    await worker.cancel(request_id)
    return await result(worker, request_id)
