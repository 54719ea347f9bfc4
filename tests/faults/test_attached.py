"""An attached engine: a server that somebody else starts, stops and restarts, and that is never touched."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import anyio

from tests.conftest import ENGINE_PROGRAM, SpecFactory
from tests.faults.test_submit import QUICK, result, submit, wait_for_tokens
from tests.faults.test_worker import listens
from tests.waiting import LIMIT_S, wait_until
from workers import EngineKind, RequestState, Worker, WorkerSpec, WorkerTimeouts
from workers.launch.flags import render_flags
from workers.states import WorkerState


@contextmanager
def served(spec: WorkerSpec) -> Iterator[None]:
    """Run the scripted engine as somebody else would."""
    argv = [sys.executable, "-I", "-S", str(ENGINE_PROGRAM), "--port", str(spec.port), *render_flags(spec.args)]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def attached(server: WorkerSpec, **changes: object) -> WorkerSpec:
    url = f"http://127.0.0.1:{server.port}"
    told = replace(server, engine=EngineKind.ATTACHED, url=url, command=(), args={}, restart=QUICK)
    return replace(told, **changes)  # type: ignore[arg-type]


async def test_a_server_that_is_not_there_yet_is_waited_for(scripted_spec: SpecFactory) -> None:
    """No start limit runs for what is not ours to start; and it may go and come back as often as it likes."""
    server = scripted_spec(tokens=1000, interval=0.01)
    spec = attached(server, timeouts=WorkerTimeouts(start_s=0.05))
    with anyio.fail_after(3 * LIMIT_S):
        async with anyio.create_task_group() as tasks:
            worker = Worker(spec)
            tasks.start_soon(worker.start)
            await wait_until(lambda: worker.state is WorkerState.STARTING, "it waits")
            for number in range(1, QUICK.failures + 2 if QUICK.failures else 0):
                with served(server):
                    await worker.wait_ready()
                    assert (worker.incarnation, worker.snapshot().pid) == (number, None)
                    request_id = await submit(worker)
                    await wait_for_tokens(worker, request_id)
                told = await result(worker, request_id)
                assert (told.state, told.reason) == (RequestState.FAILED, "engine_unreachable")
            assert worker.state is not WorkerState.FAILED
            await worker.stop()


async def test_a_stop_leaves_the_server_alone(scripted_spec: SpecFactory) -> None:
    """Its life is somebody else's; a restart of the worker is a new look at it."""
    server = scripted_spec()
    with served(server), anyio.fail_after(LIMIT_S):
        async with Worker(attached(server)) as worker:
            worker.restart_nowait("a test")
            await wait_until(lambda: worker.incarnation == 2 and worker.state is WorkerState.READY, "it looks again")
            assert (await result(worker, await submit(worker))).state is RequestState.COMPLETED
        assert listens(server.port)


async def test_a_stalled_request_ends_alone(scripted_spec: SpecFactory) -> None:
    """Liveness by requests alone: whoever gets nothing ends, and nobody is killed for it."""
    server = scripted_spec(mute_on="silence", slots=2)
    limits = WorkerTimeouts(prefill_stall_s=0.5, decode_stall_s=0.5)
    with served(server), anyio.fail_after(LIMIT_S):
        async with Worker(attached(server, timeouts=limits)) as worker:
            told = await result(worker, await submit(worker, "silence"))
            assert told.reason == "stalled_prefill"
            assert (await result(worker, await submit(worker))).state is RequestState.COMPLETED
            assert (worker.incarnation, list(worker.incidents)) == (1, [])
