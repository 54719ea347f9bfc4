"""One suite for every real engine, with the same assertions: the wheel's in every run, all in ``test-engines``."""

import json
import os
import re
import signal
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import anyio
import anyio.lowlevel
import httpx
import psutil
import pytest
from msgspec import structs

from tests.engines.adapters import write_gguf_adapter, write_peft_adapter
from tests.engines.subjects import Subject
from tests.engines.theirs import KEY, LlamaCppPython, TransformersServe
from tests.harness.waiting import LIMIT_S, wait_until
from tests.harness.working import ask, result, status, submit, wait_for_tokens, wait_incident
from transport.client import EngineClient
from transport.dialects.llama_server import LLAMA_SERVER
from transport.request import Constraint, Thought
from workers import NO_SLOT_AVAILABLE, PythonTools, RequestState, ToolLimits, Verdict, Worker
from workers.engine.embedded.tiny_model import CHAT_TEMPLATE
from workers.outcome import Completed
from workers.requests.answer import Answer
from workers.requests.bios_words import BiosFrame
from workers.requests.halves import HalfAnswer
from workers.requests.prompts.bios import seed_words
from workers.requests.request import Demand, Request, user_conversation

WORDS = {"transformers": 6000, "litellm": 2000, "llama-cpp-python": 1000}  # a given-up prompt is read to its end
FREED_S = 2.0  # in which an engine begins that works on nothing else; three long answers take it far longer
SETTLE_S = 1.0  # in which all is read that an engine sent before it was stopped


async def test_an_engine_answers_and_reports_the_cost(subject: Subject) -> None:
    """Through a real engine; the second time the prompt comes from its cache."""
    async with subject.working() as worker:
        told = await result(worker, await submit(worker, "Go.", max_tokens=20, **subject.endless))
        counted = 20 if subject.counts else None
        assert (told.state, told.finish_reason, told.usage.completion_tokens) == (
            RequestState.COMPLETED,
            "length",
            counted,
        )
        assert told.text
        assert (told.usage.prompt_tokens or 0) > 100 or not subject.counts  # the BIOS, in single characters
        assert (worker.watch.observations.pace.tokens_per_s is not None) is subject.counts
        again = await result(worker, await submit(worker, "Go.", max_tokens=1))
        assert again.state is RequestState.COMPLETED
        assert ((again.usage.cached_tokens or 0) > 100) is subject.caches


CONSTRAINTS = [
    (Constraint(choices=("yes", "no")), r'"?(yes|no)"?'),  # in quotes where only JSON can be asked for
    (Constraint(pattern="^[a-c]{3}-[0-9]{2}$"), "[a-c]{3}-[0-9]{2}"),
    (
        Constraint(json_schema={"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]}),
        r"\{.*\}",
    ),
    (Constraint(choices=("yes", "no"), thought=Thought.OPTIONAL), r"(<think>[^<]*</think>\s*)?(yes|no)"),
]
# As those of real models are made: llama.cpp knows by it what of an answer is the thought.
_BEFORE = (
    "{% for m in messages %}{{ '[' + m.role + ']\n' }}{% if m.reasoning_content %}"
    "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}{{ m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n' }}{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}"
)
TEMPLATES = {
    Thought.OPEN: _BEFORE + "{% else %}{{ '<think>\n' }}{% endif %}{% endif %}",
    Thought.OPTIONAL: _BEFORE + "{% endif %}{% endif %}",
    Thought.NONE: CHAT_TEMPLATE,
}


async def test_an_engine_constrains_its_model(subject: Subject) -> None:
    """Specification, "Constraints": even from noise an engine makes the requested form."""
    async with subject.working() as worker:
        for constraint, form in CONSTRAINTS:
            if not worker.requests.constraints.plan(constraint).is_sent:
                assert subject.foreign is not None, constraint
                continue
            answer, outcome = await _answer(worker, Demand(constraint=constraint), max_tokens=400)
            if not subject.holds:  # its noise is recorded as invalid, and later prompts ask the model in words
                assert answer.constrained_by is None, constraint
                assert worker.requests.constraints.plan(constraint).is_told
                continue
            assert outcome.finish_reason == "length" or re.fullmatch(form, answer.text.strip(), re.DOTALL), answer.text
            assert outcome.finish_reason == "stop" or constraint.thought is not Thought.NONE or constraint.json_schema


async def test_half_an_answer_goes_on_where_it_was(subject: Subject) -> None:
    """The words and the account are those of one answer; an attached server writes it from its beginning."""
    async with subject.working() as worker:
        frame = BiosFrame(words=seed_words(worker.spec.bios), context="", now=datetime(2026, 11, 27, tzinfo=UTC))
        params = {"temperature": 0, "max_tokens": 24, **subject.endless}
        asked = Request(job_name="a job", system="", conversation=user_conversation("Go."), params=params, frame=frame)
        whole, rest = Answer(time.monotonic), Answer(time.monotonic)
        with worker.lease_nowait():
            assert isinstance(await worker.requests.perform(asked, whole), Completed)
            text, _ = whole.generation.pieces
            half = HalfAnswer(text=text[:10], tokens=10, asked=whole.asked)
            rest.go_on_from(half)
            assert isinstance(await worker.requests.perform(asked, rest), Completed)
        goes_on = not subject.foreign
        assert worker.requests.begins.refusals == (not goes_on)
        begun = half.begun(())
        assert begun is not None
        assert rest.text.startswith(begun.text)
        assert (rest.generation.carried > 0) is goes_on
        if subject.counts:
            first, second = whole.usage, rest.usage
            assert first is not None
            assert second is not None
            assert (second.prompt_tokens, second.completion_tokens) == (first.prompt_tokens, 24)
        if subject.name == "vllm":
            assert rest.text == whole.text, "one request at a time it computes the same"


async def test_a_constrained_answer_goes_on_within_its_thought(subject: Subject) -> None:
    """Its grammar begins with the rest of the thought."""
    if subject.name == "vllm" or subject.foreign:
        pytest.skip("it is not asked for its template")
    args = {**subject.spec.args, "jinja": True, "chat_template": TEMPLATES[Thought.OPEN]}
    async with subject.working(args=args) as worker:
        demand = Demand(constraint=Constraint(choices=("yes", "no")))
        whole, _ = await _answer(worker, demand, max_tokens=50)
        _, pieces = whole.generation.pieces
        half = HalfAnswer(reasoning=pieces[:10], tokens=10, asked=whole.asked)
        rest, outcome = await _answer(worker, demand, half, max_tokens=50)
        begun = half.begun(())
        assert begun is not None
        assert worker.requests.begins.fault is None
        assert rest.generation.carried > 0
        assert rest.reasoning.startswith(begun.reasoning)
        assert len(rest.reasoning) > len(begun.reasoning)
        assert rest.text in ("yes", "no") or outcome.finish_reason == "length"
        assert rest.half.reasoning == ()


async def _answer(
    worker: Worker, demand: Demand, half: HalfAnswer | None = None, **params: object
) -> tuple[Answer, Completed]:
    answer = Answer(time.monotonic)
    if half is not None:
        answer.go_on_from(half)
    request = Request(
        job_name="a job",
        system="",
        conversation=user_conversation("Go."),
        params={"temperature": 0, **params},
        demand=demand,
    )
    with worker.lease_nowait():
        outcome = await worker.requests.perform(request, answer)
    assert isinstance(outcome, Completed), outcome
    return answer, outcome


async def test_an_engine_shows_where_its_model_thinks(subject: Subject) -> None:
    """A thought that its template opens ends before the answer: by itself, or at once in a retry."""
    if subject.name == "vllm" or subject.foreign:
        pytest.skip("it is not asked for its template")
    thinking, silent = ({"chat_template_kwargs": {"enable_thinking": is_on}} for is_on in (True, False))
    for thought, template in TEMPLATES.items():
        args = {**subject.spec.args, "jinja": True, "chat_template": template}
        async with subject.working(args=args) as worker:
            client = EngineClient(worker.endpoint, LLAMA_SERVER)
            assert await client.read_thought(thinking) is thought
            assert await client.read_thought(silent) is Thought.NONE
            demand = Demand(constraint=Constraint(choices=("yes", "no")))
            answer, outcome = await _answer(worker, demand, None, max_tokens=50, **thinking)
            assert (answer.thought, answer.constrained_by) == (thought, "grammar")
            assert answer.text in ("yes", "no") or (thought, outcome.finish_reason) == (Thought.OPEN, "length")
            answer, _ = await _answer(worker, structs.replace(demand, at_once=True), None, max_tokens=50, **thinking)
            assert answer.text in ("yes", "no")


async def test_a_cancel_frees_the_slot_and_costs_nothing(subject: Subject) -> None:
    """The engine notices a closed connection, and its own counters show it."""
    async with subject.working(slots=1) as worker:
        for _ in range(3):
            request_id = await submit(worker, "Go.", **subject.long)
            assert await worker.submit("a job", "", "Go.") is NO_SLOT_AVAILABLE
            await wait_for_tokens(worker, request_id)
            await worker.cancel(request_id)
            assert (await result(worker, request_id)).state is RequestState.CANCELLED
            with anyio.fail_after(LIMIT_S):
                while await _busy(subject):
                    await anyio.lowlevel.checkpoint()
        told = await result(worker, await submit(worker, max_tokens=3))
        assert (told.state, worker.now.incarnation) == (RequestState.COMPLETED, 1)
        assert (told.first_token_s or 0.0) < FREED_S


async def _busy(subject: Subject) -> int:
    """Return how many requests an engine works on, by its own counters; none without counters."""
    foreign = subject.foreign
    if isinstance(foreign, TransformersServe | LlamaCppPython):
        return 0
    server = (foreign.behind or foreign).spec if foreign else subject.spec
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=server.endpoint.base_url, trust_env=False, headers=headers) as client:
        if subject.name == "vllm":
            text = (await client.get("/metrics")).text
            lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
            return int(sum(float(line.split()[-1]) for line in lines))
        slots = (await client.get("/slots")).json()
        return sum(slot["is_processing"] for slot in slots)


async def test_a_death_in_mid_answer_keeps_the_text(subject: Subject) -> None:
    """SIGKILL: the received text is kept, and the next incarnation answers."""
    async with subject.working() as worker:
        request_id = await _stop_in_mid_answer(subject, worker)
        tree = [] if subject.foreign else psutil.Process(subject.pid(worker)).children(recursive=True)
        os.kill(subject.pid(worker), signal.SIGKILL)
        killed_at = time.monotonic()
        told = await result(worker, request_id)
        assert (told.reason, bool(told.text)) == (subject.death, True)
        await wait_until(lambda: not any(each.is_running() for each in tree), "its whole tree is gone")
        assert not tree or time.monotonic() - killed_at < 2.0
        incident = await wait_incident(worker)
        assert incident.stderr_tail or subject.foreign
        subject.mend()
        await worker.supervisor.wait_ready()
        assert (await result(worker, await submit(worker, max_tokens=3))).incarnation == 2


@pytest.mark.long
async def test_a_frozen_engine_is_found(subject: Subject) -> None:
    """SIGSTOP is a hang in which nothing answers, and the process lives; only an engine of ours is killed for it."""
    async with subject.working() as worker:
        request_id = await submit(worker, "Go.", **subject.long)
        await wait_for_tokens(worker, request_id)
        limit_s = subject.spec.timeouts.decode_stall_s or 0.0
        stopped = _stop_all(subject.pid(worker))
        frozen_at = time.monotonic()
        told = await result(worker, request_id)
        assert (told.reason, limit_s <= time.monotonic() - frozen_at <= limit_s + 10.0) == ("stalled_decode", True)
        if subject.foreign:
            assert (worker.now.incarnation, list(worker.recorder.incidents)) == (1, [])
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        else:
            incident = await wait_incident(worker)
            assert incident.verdict is Verdict.STALLED
            assert "stopped" in {process.state for process in incident.kernel.processes}
        await worker.supervisor.wait_ready()
        assert (await result(worker, await submit(worker, max_tokens=3))).state is RequestState.COMPLETED


async def _stop_in_mid_answer(subject: Subject, worker: Worker) -> int:
    """Return a request whose engine is stopped before its end: on busy cores vLLM sends a whole answer at once."""
    while True:
        request_id = await submit(worker, "Go.", **subject.long)
        await wait_for_tokens(worker, request_id)
        stopped = _stop_all(subject.pid(worker))
        with anyio.move_on_after(SETTLE_S):
            await result(worker, request_id)
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
            continue
        return request_id


def _stop_all(pid: int) -> list[int]:
    tree = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    for each in tree:
        os.kill(each, signal.SIGSTOP)
    return tree


async def test_a_prompt_beyond_the_context_is_no_failure_of_the_engine(subject: Subject) -> None:
    """400 with the engine's own words."""
    if isinstance(subject.foreign, TransformersServe):
        pytest.skip("it has no bound of its own")
    async with subject.working() as worker:
        told = await ask(worker, "word " * 4000)
        if isinstance(subject.foreign, LlamaCppPython):  # its answer is 200, and nothing more
            assert (told.state, told.reason) == (RequestState.FAILED, "engine_unreachable")
            return
        assert (told.state, told.reason, worker.now.incarnation) == (RequestState.FAILED, "context_overflow", 1)


@pytest.mark.long
async def test_a_prefill_longer_than_the_limit_is_left_alone(subject: Subject) -> None:
    """Small batches take many times the limit, and the engine shows each step in its stream or counters.

    A server that shows nothing gets no more than the limit; it loses the request, and is left alone too.
    """
    timeouts = replace(subject.spec.timeouts, prefill_stall_s=0.25)
    args = {**({} if subject.foreign else subject.spec.args), **subject.slow_prefill}
    async with subject.working(slots=1, context=32_768, timeouts=timeouts, args=args) as worker:
        words = WORDS.get(subject.name, 2400)
        told = await result(worker, await submit(worker, "word " * words, max_tokens=1))
        if subject.foreign:
            assert told.reason == "stalled_prefill"
        else:
            assert told.state is RequestState.COMPLETED, told
            assert (told.first_token_s or 0) > 2 * 0.25
        assert (worker.now.incarnation, list(worker.recorder.incidents)) == (1, [])


@pytest.mark.long
@pytest.mark.parametrize("beside", ["alone", "a neighbour", "a cancel"])
async def test_one_batch_many_times_longer_than_the_limit_is_left_alone(subject: Subject, beside: str) -> None:
    """It reports no progress, and no probe is answered. Only its threads compute, and that is evidence of work."""
    if "batch_size" not in subject.slow_prefill or subject.foreign:
        pytest.skip("vLLM cuts prompts into chunks, and of somebody else's server we see no process")
    timeouts = replace(
        subject.spec.timeouts, prefill_stall_s=1.0, decode_stall_s=1.0, cancel_s=1.0, busy_stall_s=10 * LIMIT_S
    )
    args = {**subject.spec.args, "batch_size": 32_768, "ubatch_size": 32_768}
    changes = {"slots": 2, "context": 32_768, "timeouts": timeouts, "args": args}
    async with subject.working(limit_s=15 * LIMIT_S, **changes) as worker:
        talker = await submit(worker, "Go.", max_tokens=400, ignore_eos=True) if beside == "a neighbour" else None
        if talker is not None:
            await wait_for_tokens(worker, talker)
        reader = await submit(worker, "word " * 4000, max_tokens=1)
        if beside == "a cancel":
            await wait_until(lambda: _has_begun(worker), "the prompt is being read")
            await worker.cancel(reader)
            assert (await result(worker, reader)).state is RequestState.CANCELLED
            reader = await submit(worker, "Go.", max_tokens=1)
        told = await result(worker, reader)
        assert told.state is RequestState.COMPLETED, told
        if beside == "alone":
            assert (told.first_token_s or 0) > 3 * 1.0
        if talker is not None:
            assert (await result(worker, talker)).state is RequestState.COMPLETED
        assert (worker.now.incarnation, list(worker.recorder.incidents)) == (1, [])


def _has_begun(worker: Worker) -> bool:
    return any(running.answer.generation.begun_at is not None for running in worker.in_flight)


async def test_the_json_fallback_runs_tools_of_a_model_without_tools(subject: Subject) -> None:
    """A grammar makes even this model write well-formed calls; the budget bounds them."""
    arguments = {
        "type": "object",
        "properties": {"a": {"enum": [2]}, "b": {"enum": [3]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    call = {
        "type": "object",
        "properties": {"name": {"const": "add"}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    schema = {
        "type": "object",
        "properties": {"tool_calls": {"type": "array", "minItems": 1, "maxItems": 1, "items": call}},
        "required": ["tool_calls"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "add", "parameters": arguments}}]
    runner = PythonTools({"add": lambda a, b: a + b})
    async with subject.working(tool_runner=runner, tool_limits=ToolLimits(iterations=2)) as worker:
        response_format = {"type": "json_schema", "json_schema": {"name": "call", "schema": schema}}
        request_id = await worker.submit(
            "a job", "", "Go.", {"response_format": response_format, "max_tokens": 400, "temperature": 0}, tools=tools
        )
        assert isinstance(request_id, int)
        told = await result(worker, request_id)
    calls = [each.result for each in told.tool_calls]
    if isinstance(subject.foreign, TransformersServe):  # it passes over the schema, and noise calls nothing
        assert (told.state, told.finish_reason, calls) == (RequestState.COMPLETED, "length", [])
    elif isinstance(subject.foreign, LlamaCppPython):  # it knows no schema; these are the caller's own parameters
        assert (told.reason, calls) == ("engine_rejected", [])
        assert "Input should be 'text' or 'json_object'" in (told.detail or "")
    else:
        assert (told.reason, calls) == ("tool_budget", [5, 5]), json.dumps(told.text)


async def test_an_unwatched_answer_is_the_same(subject: Subject) -> None:
    """Larger chunks change neither the text nor the count.

    The first answer is not compared: its prompt is read at once, theirs comes from the cache, and each is rounded in
    its own way, so noise may differ.
    """
    if isinstance(subject.foreign, TransformersServe | LlamaCppPython):
        pytest.skip("it sends a chunk a token")
    async with subject.working() as worker:
        _, *told = [
            await result(worker, await submit(worker, "Go.", max_tokens=50, temperature=0, stream_interval=interval))
            for interval in (1, 1, 16)
        ]
    assert told[0].text == told[1].text
    assert {each.usage.completion_tokens for each in told} == {50}


async def test_adapters_are_models_of_their_own(subject: Subject, tmp_path: Path) -> None:
    """Each answers as itself, alone and beside the others, whatever the prompt cache holds."""
    if subject.foreign:
        pytest.skip("an attached engine has its own adapters")
    write = write_peft_adapter if subject.name == "vllm" else write_gguf_adapter
    adapters = {f"poet-{seed}": str(write(tmp_path / f"poet-{seed}", seed)) for seed in (1, 2)}
    names = (None, *adapters)

    async def say(worker: Worker, adapter: str | None) -> str:
        answer = Answer(time.monotonic)
        params = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
        asked = Request(
            job_name="a job", system="", conversation=user_conversation("Go."), params=params, adapter=adapter
        )
        with worker.lease_nowait():
            assert isinstance(await worker.requests.perform(asked, answer), Completed)
        return answer.text

    async with subject.working(adapters=adapters) as worker:
        alone = {name: await say(worker, name) for name in names}
        assert len(set(alone.values())) == len(names)
        for _ in range(3):
            heard: dict[str | None, str] = {}

            async def hear(name: str | None, heard: dict[str | None, str] = heard) -> None:
                heard[name] = await say(worker, name)

            async with anyio.create_task_group() as tasks:
                for name in names:
                    tasks.start_soon(hear, name)
            assert heard == alone
        assert {name: await say(worker, name) for name in reversed(names)} == alone


@pytest.mark.long
async def test_saturation_kills_nothing(subject: Subject, request: pytest.FixtureRequest) -> None:
    """Every slot busy for long, under limits of two seconds: no incident, and every request answered."""
    seconds = 600.0 if request.config.getoption("--soak") else 5.0
    answered = 0
    async with subject.working(seconds + 3 * LIMIT_S) as worker:
        until = time.monotonic() + seconds

        async def keep_asking(slot: int) -> None:
            nonlocal answered
            turn = 0
            while time.monotonic() < until:
                turn += 1
                prompt = f"{slot} {turn} " + "word " * (50 * (turn % 7))
                request_id = await submit(worker, prompt, max_tokens=200 + 100 * slot, **subject.endless)
                assert (await status(worker, request_id)).state is RequestState.RUNNING
                told = await result(worker, request_id)
                assert told.state is RequestState.COMPLETED, told
                answered += 1

        async with anyio.create_task_group() as tasks:
            for slot in range(subject.spec.slots):
                tasks.start_soon(keep_asking, slot)
        assert answered >= subject.spec.slots
        assert (worker.now.incarnation, list(worker.recorder.incidents)) == (1, [])
        await wait_until(lambda: worker.snapshot().slots_in_use == 0, "every slot is given back")
