"""The public Worker (specification, "Worker interface") on healthy engines and on each kind of faulty one."""

import json
import os
import re
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from tests.conftest import SpecFactory
from tests.harness.waiting import LIMIT_S, wait_until
from tests.harness.working import (
    STALLS,
    ask,
    ask_briefly,
    result,
    status,
    submit,
    wait_for_tokens,
    wait_incident,
    working,
)
from workers import (
    NO_SLOT_AVAILABLE,
    NOT_FOUND,
    RequestState,
    Verdict,
    Worker,
    WorkerSpec,
    WorkerTimeouts,
)
from workers.errors import InvalidSpec
from workers.states import Hold, WorkerState


async def test_a_request_goes_from_its_id_to_its_result_and_is_forgotten(scripted_spec: SpecFactory) -> None:
    """Ids count from 1, get_result releases all state, later look-ups find nothing.

    Source: specification, "Worker interface".
    """
    async with working(scripted_spec()) as worker:
        assert [await submit(worker), await submit(worker)] == [1, 2]
        told = await result(worker, 1)
        assert (told.state, told.text, told.finish_reason) == (RequestState.COMPLETED, "word0 word1 word2 ", "stop")
        assert (told.usage.prompt_tokens, told.usage.completion_tokens, told.job_name) == (7, 3, "a job")
        assert (await status(worker, 2)).job_name == "a job"
        assert await worker.get_status(1) is await worker.get_result(1) is NOT_FOUND
        assert await worker.cancel(1) is False
        assert (await result(worker, 2)).incarnation == 1
        assert await submit(worker) == 3
        assert await worker.get_status(99) is NOT_FOUND


async def test_a_full_worker_refuses_at_once(scripted_spec: SpecFactory) -> None:
    """Specification, "Slots": a worker has no queue, and a slot is free again when its request has ended."""
    async with working(scripted_spec(slots=2, prefill=600)) as worker:
        first, _ = await submit(worker), await submit(worker)
        assert await worker.submit("a job", "", "Go.") is NO_SLOT_AVAILABLE
        assert await worker.cancel(first) is True
        await result(worker, first)
        assert await submit(worker) == 3


@pytest.mark.parametrize(("told", "effective"), [(1, 1), (3, 3), (8, 3), (None, 3)])
async def test_there_are_as_many_slots_as_configured_or_fewer_if_the_engine_has_fewer(
    scripted_spec: SpecFactory, told: int | None, effective: int
) -> None:
    """Specification, "Slots": the smaller number counts, and never more requests are in flight."""
    flags = {} if told is None else {"props_slots": told}
    async with working(scripted_spec(slots=3, mute_on="Go.", **flags)) as worker:
        for _ in range(effective):
            await submit(worker)
        assert await worker.submit("a job", "", "Go.") is NO_SLOT_AVAILABLE
        assert (worker.snapshot().slots_total, worker.snapshot().slots_configured) == (effective, 3)


async def test_a_cancel_keeps_partial_output(scripted_spec: SpecFactory) -> None:
    """Partial output for every cancel."""
    async with working(scripted_spec(tokens=1000, interval=0.01)) as worker:
        request_id = await submit(worker)
        await wait_for_tokens(worker, request_id)
        assert await worker.cancel(request_id) is True
        assert await worker.cancel(request_id) is False
        told = await result(worker, request_id)
        assert (told.state, told.reason) == (RequestState.CANCELLED, "cancelled")
        assert told.text.startswith("word0 ")


async def test_a_stop_keeps_results(scripted_spec: SpecFactory) -> None:
    """Requests in flight are cut off with their partial text, and can be fetched long after the engine has ended."""
    worker = Worker(scripted_spec(tokens=1000, interval=0.01))
    with anyio.fail_after(LIMIT_S):
        await worker.start()
        request_id = await submit(worker)
        await wait_for_tokens(worker, request_id)
        await worker.stop()
        assert worker.now.state is WorkerState.STOPPED
        told = await result(worker, request_id)
        assert (told.state, told.reason) == (RequestState.CANCELLED, "shutdown")
        assert told.text.startswith("word0 ")
        await worker.start()
        assert (await ask_briefly(worker)).incarnation == 2
        await worker.stop()
        await worker.stop()


async def test_sampling_parameters_reach_the_engine_except_reserved_ones(
    scripted_spec: SpecFactory, tmp_path: Path
) -> None:
    """Unknown keys are kept, and only the fields that the worker owns are overwritten.

    Source: specification, "Generation parameters".
    """
    record = tmp_path / "record"
    spec = replace(scripted_spec(record=str(record)), params={"max_tokens": 5, "temperature": 0})
    async with working(spec) as worker:
        await result(worker, await submit(worker, temperature=0.7, brand_new=[1], stream=False, messages=[], tools=[1]))
    sent = json.loads(record.read_text())["request"]
    assert (sent["max_tokens"], sent["temperature"], sent["brand_new"], sent["stream"]) == (5, 0.7, [1], True)
    assert "tools" not in sent
    system, user = sent["messages"]
    assert (system["role"], user) == ("system", {"role": "user", "content": "Go."})
    assert system["content"].endswith("\n\nYou are a test.")
    assert system["content"].startswith("Several agents take part; ")


async def test_arguments_that_break_the_count_of_slots_are_refused(scripted_spec: SpecFactory) -> None:
    """Each further answer would take a slot unseen; what is no text or no mapping is the program's own fault."""
    async with working(scripted_spec()) as worker:
        for name in ("n", "n_cmpl", "id_slot"):
            with pytest.raises(ValueError, match=f"params.{name}"):
                await worker.submit("a", "b", "c", {name: 3})
        with pytest.raises(TypeError, match="params"):
            await worker.submit("a", "b", "c", "max")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="user_prompt"):
            await worker.submit("a", "b", None)  # type: ignore[arg-type]
        assert worker.snapshot().slots_in_use == 0
    with pytest.raises(InvalidSpec, match="args"):
        WorkerSpec(engine="embedded", model="m.gguf", args=["--jinja"])  # type: ignore[arg-type]


# Engines that answer badly


@pytest.mark.system
@pytest.mark.parametrize(
    ("flags", "reason", "text"),
    [
        ({"cut_after": 1}, "engine_unreachable", "word0 "),
        ({"bad_frame_after": 1}, "engine_rejected", "word0 "),
        ({"long_frame_after": 1}, "engine_unreachable", "word0 "),
        ({"error_after": 1}, "engine_rejected", "word0 "),
        ({"html": True}, "engine_rejected", ""),
        ({"reject": 429, "retry_after": 1}, "engine_rejected", ""),
        ({"reject": 503, "retry_after": 1}, "engine_rejected", ""),
    ],
    ids=["a cut frame", "a bad frame", "an over-long frame", "an error in a 200", "HTML", "429", "503"],
)
async def test_a_bad_answer_fails_its_request_alone(
    scripted_spec: SpecFactory, flags: dict[str, object], reason: str, text: str
) -> None:
    """An engine that answers its probe is not killed for one bad answer, and earlier output is kept.

    Its canary gets the same answer, so the engine is held until it answers one.
    """
    async with working(scripted_spec(**flags)) as worker:
        told = await ask(worker)
        assert (told.state, told.reason, told.text) == (RequestState.FAILED, reason, text)
        assert (worker.now.state, worker.now.holds, worker.now.incarnation) == (
            WorkerState.DRAINING,
            frozenset({Hold.REFUSING}),
            1,
        )


async def test_the_engines_retry_after_keeps_the_slot(scripted_spec: SpecFactory) -> None:
    """The slot is free again only after Retry-After."""
    body = '{"error": {"code": 503, "message": "busy", "type": "unavailable_error"}}'
    async with working(scripted_spec(reject=503, retry_after=1, reject_first=1, reject_body=body)) as worker:
        assert (await ask(worker)).duration_s >= 1
        assert (await ask(worker)).state is RequestState.COMPLETED


@pytest.mark.parametrize(
    "repeat", ["I see. Let me think.|", "round and round "], ids=["the same line", "the same phrase"]
)
async def test_a_model_that_repeats_itself_is_stopped(scripted_spec: SpecFactory, repeat: str) -> None:
    """Specification, "Repetition"; the engine is healthy."""
    async with working(scripted_spec(repeat=repeat)) as worker:
        told = await ask(worker)
        assert (told.state, told.reason) == (RequestState.FAILED, "repeated_line_loop")
        assert told.text.startswith(repeat.replace("|", "\n"))
        assert worker.now.incarnation == 1


# Engines that die


async def test_an_exit_with_status_0_in_mid_stream_is_a_death(scripted_spec: SpecFactory) -> None:
    """Every unexpected exit is a crash."""
    async with working(scripted_spec(die_after=2)) as worker:
        told = await ask(worker)
        assert (told.reason, told.text) == ("engine_died", "word0 word1 ")
        incident = await wait_incident(worker)
        assert (incident.verdict, incident.reason, str(incident.exit)) == (
            "dead",
            "engine_died",
            "exited with status 0",
        )
        assert incident.in_flight[0].job_name == "a job"


async def test_a_prompt_that_kills_costs_its_neighbours_an_attempt_and_not_the_worker(
    scripted_spec: SpecFactory,
) -> None:
    """All requests in flight fail with their reason, and the worker goes on."""
    async with working(scripted_spec(die_on="POISON", tokens=1000, interval=0.01)) as worker:
        neighbour = await submit(worker)
        await wait_for_tokens(worker, neighbour)
        assert (await ask(worker, "POISON")).reason == "engine_died"
        told = await result(worker, neighbour)
        assert (told.reason, told.text[:6]) == ("engine_died", "word0 ")
        await worker.supervisor.wait_ready()
        assert worker.now.incarnation == 2


async def test_a_worker_is_drained_resumed_and_restarted(scripted_spec: SpecFactory) -> None:
    """An operator's action is no failure: there is no backoff, no incident, and no turn is charged."""
    async with working(scripted_spec(tokens=1000, interval=0.01)) as worker:
        worker.drain_nowait("maintenance")
        assert await worker.submit("a job", "", "Go.") is NO_SLOT_AVAILABLE
        worker.resume_nowait("done")
        request_id = await submit(worker)
        await wait_for_tokens(worker, request_id)
        worker.restart_nowait("a new driver")
        told = await result(worker, request_id)
        assert (told.reason, told.detail) == ("engine_died", "a new driver")
        await worker.supervisor.wait_ready()
        assert (worker.now.incarnation, list(worker.recorder.incidents)) == (2, [])
        worker.drain_nowait("maintenance")
        worker.restart_nowait("with the drain kept")
        await wait_until(
            lambda: (worker.now.incarnation, worker.now.state) == (3, WorkerState.DRAINING), "it is drained still"
        )


async def test_incidents_survive_a_restart(scripted_spec: SpecFactory, tmp_path: Path) -> None:
    """They are kept in the state directory."""
    spec = replace(scripted_spec(die_after=1), state_dir=tmp_path)
    async with working(spec) as worker:
        await ask(worker)
        await worker.supervisor.wait_ready()
        kept = list(worker.recorder.incidents)
    assert list(Worker(spec).recorder.incidents) == kept
    assert len(kept) == 1
    assert list((tmp_path / "processes").iterdir()) == []


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"port": 70000}, "port: 70000"),
        ({"port": "9100"}, "port: '9100'"),
        ({"slots": 0}, "slots: 0"),
        ({"context": -1}, "context: -1"),
        ({"env": {"A": 1}}, "env.A: 1"),
        ({"timeouts": WorkerTimeouts(decode_stall_s=-1.0)}, "timeouts.decode_stall_s: -1.0"),
        ({"timeouts": WorkerTimeouts(start_s=None)}, "timeouts.start_s"),  # type: ignore[arg-type]
    ],
)
def test_an_invalid_specification_is_refused(fields: dict[str, Any], told: str) -> None:
    """Before anything starts, with the field's name."""
    with pytest.raises(InvalidSpec, match=re.escape(told)):
        WorkerSpec(**{"engine": "llama-server", "port": 9100, "command": ["x"], **fields})


@pytest.mark.system
async def test_a_lack_of_descriptors_kills_no_engine(scripted_spec: SpecFactory) -> None:
    """We can neither read nor ask: that is our fault and not the engine's."""
    async with working(scripted_spec(timeouts=replace(STALLS, prefill_stall_s=4.0), prefill=3.0)) as worker:
        request_id = await submit(worker)
        await wait_until(
            lambda: [each.verdict for each in worker.snapshot().requests] == [Verdict.SILENT], "the engine is looked at"
        )
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard[1]))
        try:
            failed = await ask(worker, "Another.")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, hard)
        assert failed.reason == "engine_unreachable"
        assert (await result(worker, request_id)).state is RequestState.COMPLETED
        assert worker.now.incarnation == 1
