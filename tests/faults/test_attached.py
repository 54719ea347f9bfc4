"""An attached engine: a server that others start, stop and restart, and that Roundhouse never touches."""

import asyncio
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
import trustme

from tests.conftest import ENGINE_PROGRAM, SpecFactory
from tests.faults.test_worker import listens
from tests.harness.ports import find_ports
from tests.harness.waiting import LIMIT_S, wait_until
from tests.harness.working import QUICK, result, submit, wait_for_tokens
from transport.client import EngineClient
from transport.dialects.dialect import PLAIN
from transport.errors import EngineError
from workers import EngineKind, RequestState, Worker, WorkerSpec, WorkerTimeouts
from workers.engine.launch.flags import render_flags
from workers.states import WorkerState


@contextmanager
def served(spec: WorkerSpec) -> Iterator[None]:
    """Run the scripted engine as its own operator would."""
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


@pytest.mark.system
async def test_a_missing_server_is_waited_for(scripted_spec: SpecFactory) -> None:
    """No start limit applies to a server that others start; it may stop and return any number of times."""
    server = scripted_spec(tokens=1000, interval=0.01)
    spec = attached(server, timeouts=WorkerTimeouts(start_s=0.05))
    with anyio.fail_after(3 * LIMIT_S):
        async with anyio.create_task_group() as tasks:
            worker = Worker(spec)
            tasks.start_soon(worker.start)
            await wait_until(lambda: worker.now.state is WorkerState.STARTING, "it waits")
            for number in range(1, QUICK.failures + 2 if QUICK.failures else 0):
                with served(server):
                    await worker.supervisor.wait_ready()
                    assert (worker.now.incarnation, worker.snapshot().pid) == (number, None)
                    request_id = await submit(worker)
                    await wait_for_tokens(worker, request_id)
                told = await result(worker, request_id)
                assert (told.state, told.reason) == (RequestState.FAILED, "engine_unreachable")
            assert worker.now.state is not WorkerState.FAILED
            await worker.stop()


async def test_a_stop_leaves_the_server_alone(scripted_spec: SpecFactory) -> None:
    """Its life belongs to others; a restart of the worker probes it again."""
    server = scripted_spec()
    with served(server), anyio.fail_after(LIMIT_S):
        async with Worker(attached(server)) as worker:
            worker.restart_nowait("a test")
            await wait_until(
                lambda: worker.now.incarnation == 2 and worker.now.state is WorkerState.READY, "it looks again"
            )
            assert (await result(worker, await submit(worker))).state is RequestState.COMPLETED
        assert listens(server.port)


async def test_a_stalled_request_ends_alone(scripted_spec: SpecFactory) -> None:
    """Only requests show its liveness: the silent request ends, and the server is not killed for it."""
    server = scripted_spec(mute_on="silence", slots=2)
    limits = WorkerTimeouts(prefill_stall_s=0.5, decode_stall_s=0.5)
    with served(server), anyio.fail_after(LIMIT_S):
        async with Worker(attached(server, timeouts=limits)) as worker:
            told = await result(worker, await submit(worker, "silence"))
            assert told.reason == "stalled_prefill"
            assert "(timeouts.prefill_stall_s allows 0.5 s)" in str(told.detail)  # the setting that a person may raise
            assert (await result(worker, await submit(worker))).state is RequestState.COMPLETED
            assert (worker.now.incarnation, list(worker.recorder.incidents)) == (1, [])


@pytest.mark.system
@pytest.mark.parametrize("accepts_first", [False, True])
async def test_a_server_that_queues_stalls_no_request(scripted_spec: SpecFactory, accepts_first: bool) -> None:
    """Ollama with OLLAMA_NUM_PARALLEL=1 sends no byte before its turn; ``transformers serve`` sends the headers."""
    server = scripted_spec(parallel=1, accepts_first=accepts_first, tokens=20, interval=0.05, slots=4)
    limits = WorkerTimeouts(prefill_stall_s=0.7, decode_stall_s=0.7)
    with served(server), anyio.fail_after(2 * LIMIT_S):
        async with Worker(attached(server, timeouts=limits)) as worker:
            submitted = [await submit(worker) for _ in range(4)]
            told = [await result(worker, request_id) for request_id in submitted]
            assert [each.state for each in told] == [RequestState.COMPLETED] * 4
            assert max(each.first_token_s or 0 for each in told) > 3 * 0.7
            assert list(worker.recorder.incidents) == []


@asynccontextmanager
async def secured(server: WorkerSpec, authority: trustme.CA) -> AsyncIterator[int]:
    """Put TLS before a server; yield its new port."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(65_536):
            writer.write(piece)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection("127.0.0.1", server.port)
        except OSError:  # it does not listen yet
            writer.close()
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pass_on, reader, there[1])
            await pass_on(there[0], writer)
            tasks.cancel_scope.cancel()
        there[1].close()

    port = find_ports(1)
    async with await asyncio.start_server(serve, "localhost", port, ssl=context):
        yield port


async def test_a_server_over_tls_must_have_a_trusted_certificate(
    scripted_spec: SpecFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine's authorities decide; a server without a signed certificate gets no request."""
    authority, server = trustme.CA(), scripted_spec()
    authority.cert_pem.write_to_path(str(tmp_path / "authority.pem"))
    with served(server), anyio.fail_after(3 * LIMIT_S):
        async with secured(server, authority) as port:
            spec = attached(server, url=f"https://localhost:{port}")
            stranger = Worker(spec)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stranger.start)
                await wait_until(lambda: stranger.now.state is WorkerState.STARTING, "it tries")
                with pytest.raises(EngineError, match="certificate verify failed"):
                    await EngineClient(spec.endpoint, PLAIN).probe_ready()
                assert stranger.now.state is WorkerState.STARTING
                tasks.cancel_scope.cancel()
            await stranger.stop()
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
            async with Worker(spec) as worker:
                told = await result(worker, await submit(worker))
                assert (told.state, told.text) == (RequestState.COMPLETED, "word0 word1 word2 ")
