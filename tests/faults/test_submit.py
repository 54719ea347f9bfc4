"""The public Worker (specification, "Worker interface") on engines that behave, and on one for each way not to."""

import asyncio
import json
import os
import re
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest

from tests.conftest import SpecFactory
from tests.harness.waiting import LIMIT_S, is_alive, wait_until
from workers import (
    NO_SLOT_AVAILABLE,
    NOT_FOUND,
    RequestResult,
    RequestState,
    RequestStatus,
    RestartPolicy,
    Verdict,
    Worker,
    WorkerSpec,
    WorkerTimeouts,
)
from workers.errors import InvalidSpec, StartFailed
from workers.health.incident import Incident
from workers.states import Hold, WorkerState

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
    await wait_until(lambda: list(worker.incidents), "an incident is kept")
    return next(iter(worker.incidents))


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


async def test_no_slot_is_told_at_once(scripted_spec: SpecFactory) -> None:
    """Specification, "Slots": no queue; and a slot is there again when its request has ended."""
    async with working(scripted_spec(slots=2, prefill=600)) as worker:
        first, _ = await submit(worker), await submit(worker)
        assert await worker.submit("a job", "", "Go.") is NO_SLOT_AVAILABLE
        assert await worker.cancel(first) is True
        await result(worker, first)
        assert await submit(worker) == 3


@pytest.mark.parametrize(("told", "effective"), [(1, 1), (3, 3), (8, 3), (None, 3)])
async def test_slots_are_what_was_configured_or_less_where_the_engine_holds_less(
    scripted_spec: SpecFactory, told: int | None, effective: int
) -> None:
    """Specification, "Slots": the smaller of both; never more in flight than that."""
    flags = {} if told is None else {"props_slots": told}
    async with working(scripted_spec(slots=3, mute_on="Go.", **flags)) as worker:
        for _ in range(effective):
            await submit(worker)
        assert await worker.submit("a job", "", "Go.") is NO_SLOT_AVAILABLE
        assert (worker.snapshot().slots_total, worker.snapshot().slots_configured) == (effective, 3)


async def test_a_cancel_keeps_what_has_come(scripted_spec: SpecFactory) -> None:
    """Partial output for every cancel."""
    async with working(scripted_spec(tokens=1000, interval=0.01)) as worker:
        request_id = await submit(worker)
        await wait_for_tokens(worker, request_id)
        assert await worker.cancel(request_id) is True
        assert await worker.cancel(request_id) is False
        told = await result(worker, request_id)
        assert (told.state, told.reason) == (RequestState.CANCELLED, "cancelled")
        assert told.text.startswith("word0 ")


async def wait_for_tokens(worker: Worker, request_id: int) -> None:
    with anyio.fail_after(LIMIT_S):
        while (await status(worker, request_id)).output_tokens == 0:
            await anyio.lowlevel.checkpoint()


async def test_a_stop_keeps_results(scripted_spec: SpecFactory) -> None:
    """What was in flight is cut off with its partial text, and can be fetched when the engine is long gone."""
    worker = Worker(scripted_spec(tokens=1000, interval=0.01))
    with anyio.fail_after(LIMIT_S):
        await worker.start()
        request_id = await submit(worker)
        await wait_for_tokens(worker, request_id)
        await worker.stop()
        assert worker.state is WorkerState.STOPPED
        told = await result(worker, request_id)
        assert (told.state, told.reason) == (RequestState.CANCELLED, "shutdown")
        assert told.text.startswith("word0 ")
        await worker.start()
        assert (await ask_briefly(worker)).incarnation == 2
        await worker.stop()
        await worker.stop()


async def ask_briefly(worker: Worker) -> RequestResult:
    request_id = await submit(worker)
    await wait_for_tokens(worker, request_id)
    await worker.cancel(request_id)
    return await result(worker, request_id)


async def test_parameters_pass_through_but_for_ours(scripted_spec: SpecFactory, tmp_path: Path) -> None:
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


# Engines that start badly


async def test_an_engine_that_loads_slowly_is_waited_for(scripted_spec: SpecFactory) -> None:
    """503 while loading is no failure."""
    async with working(scripted_spec(load=0.5)) as worker:
        assert (worker.incarnation, (await ask(worker)).state) == (1, RequestState.COMPLETED)


async def test_an_engine_that_never_gets_ready_is_given_up(scripted_spec: SpecFactory) -> None:
    """A start has its own limit, and so have restarts."""
    spec = scripted_spec(never_ready=True, timeouts=replace(STALLS, start_s=0.4))
    worker = Worker(replace(spec, restart=QUICK))
    with anyio.fail_after(LIMIT_S):
        with pytest.raises(StartFailed, match=r"gave up after 3 failures.*not ready within 0\.4 s"):
            await worker.start()
        assert [incident.reason for incident in worker.incidents] == ["engine_unreachable"] * 3
        assert await worker.submit("a job", "", "Go.") is NO_SLOT_AVAILABLE
        await worker.stop()


async def test_an_engine_that_exits_at_once_leaves_its_last_words(scripted_spec: SpecFactory) -> None:
    """The one log line that mattered is in the error and in the incident."""
    worker = Worker(replace(scripted_spec(exit_at_once=7), restart=QUICK))
    with anyio.fail_after(LIMIT_S):
        with pytest.raises(StartFailed, match="exited with status 7") as failed:
            await worker.start()
        assert "scripted engine: cannot allocate the universe" in failed.value.log_tail
        incident = next(iter(worker.incidents))
        assert (incident.exit is not None, incident.incarnation) == (True, 3)
        assert incident.exit is not None
        assert incident.exit.status == 7
        assert incident.stdout_tail == ("scripted engine: cannot allocate the universe",)
        await worker.stop()


async def test_a_worker_that_gave_up_tries_once_more_later(scripted_spec: SpecFactory, tmp_path: Path) -> None:
    """A half-open breaker: whatever was wrong may have passed."""
    fault = tmp_path / "fault"
    fault.touch()
    policy = replace(QUICK, retry_s=0.2)
    worker = Worker(replace(scripted_spec(exit_if=str(fault)), restart=policy))
    with anyio.fail_after(LIMIT_S):
        with pytest.raises(StartFailed):
            await worker.start()
        await wait_until(lambda: worker.incarnation >= 5, "it has tried again, twice")
        fault.unlink()
        await wait_until(lambda: worker.state is WorkerState.READY, "it is back")
        await worker.stop()


# Engines that stop answering


@pytest.mark.system
@pytest.mark.parametrize(
    ("flags", "reason", "text"),
    [
        ({"mute": True}, "stalled_prefill", ""),
        ({"comments": 0.05}, "stalled_prefill", ""),
        ({"stall_after": 2}, "stalled_decode", "word0 word1 "),
        ({"spin_after": 2}, "stalled_decode", "word0 word1 "),
    ],
    ids=["never answers", "only comments", "stops in mid-stream", "spins"],
)
async def test_a_hung_engine_is_found_and_replaced(
    scripted_spec: SpecFactory, flags: dict[str, object], reason: str, text: str
) -> None:
    """Health answers 200, a slot is open, comments come: none of it is progress. Never before the limit, soon after."""
    async with working(scripted_spec(timeouts=STALLS, **flags)) as worker:
        told = await ask(worker)
        assert (told.state, told.reason, told.text) == (RequestState.FAILED, reason, text)
        assert STALLS.prefill_stall_s is not None
        assert STALLS.prefill_stall_s <= told.duration_s < STALLS.prefill_stall_s + 10
        await worker.wait_ready()
        assert worker.incarnation == 2
        incident = await wait_incident(worker)
        assert (incident.verdict, incident.reason) == (Verdict.STALLED, reason)
        assert [request.job_name for request in incident.in_flight] == ["a job"]
        assert incident.in_flight[0].evidence.silent_s >= STALLS.prefill_stall_s
        assert incident.kernel.processes[0].rss_bytes > 0
        assert incident.exit is not None


@pytest.mark.system
async def test_the_incident_of_a_spinning_engine_shows_that_it_span(scripted_spec: SpecFactory) -> None:
    """CPU ticks are told, and do not save."""
    async with working(scripted_spec(timeouts=STALLS, spin_after=1)) as worker:
        await ask(worker)
        evidence = (await wait_incident(worker)).in_flight[0].evidence
        assert evidence.cpu_percent is not None
        assert evidence.cpu_percent > 20


async def test_an_engine_that_sleeps_and_then_answers_is_left_alone(scripted_spec: SpecFactory) -> None:
    """No CPU tick and no byte condemn nobody before the limit."""
    async with working(scripted_spec(timeouts=STALLS, prefill=0.45)) as worker:
        assert (await ask(worker)).state is RequestState.COMPLETED
        assert worker.incarnation == 1


@pytest.mark.system
@pytest.mark.parametrize(
    "flags", [{"progress": 60, "step": 0.05}, {"counting": 60, "step": 0.05}], ids=["tells it", "shows it in /slots"]
)
async def test_a_long_prefill_is_left_alone(scripted_spec: SpecFactory, flags: dict[str, object]) -> None:
    """Five times the limit passes without a token, and every sign of progress vetoes the kill."""
    async with working(scripted_spec(timeouts=STALLS, **flags)) as worker:
        told = await ask(worker)
        assert (told.state, worker.incarnation) == (RequestState.COMPLETED, 1)
        assert told.duration_s > 3


@pytest.mark.system
async def test_a_request_that_hangs_alone_ends_alone(scripted_spec: SpecFactory) -> None:
    """An engine that works for others is not killed for one request."""
    async with working(scripted_spec(slots=2, timeouts=STALLS, mute_on="POISON", tokens=150, interval=0.02)) as worker:
        healthy = await submit(worker)
        told = await ask(worker, "POISON")
        assert (told.state, told.reason) == (RequestState.FAILED, "stalled_prefill")
        assert (await result(worker, healthy)).state is RequestState.COMPLETED
        assert (worker.incarnation, list(worker.incidents)) == (1, [])


async def test_an_engine_that_still_sings_is_not_killed(scripted_spec: SpecFactory) -> None:
    """The canary: the one request in flight hangs, and the engine would serve another."""
    async with working(scripted_spec(timeouts=STALLS, mute_on="POISON")) as worker:
        assert (await ask(worker, "POISON")).reason == "stalled_prefill"
        assert (await ask(worker)).state is RequestState.COMPLETED
        assert worker.incarnation == 1


async def test_a_verdict_is_there_while_a_request_waits(scripted_spec: SpecFactory) -> None:
    """What a user sees of a request: prefilling, then silent, with the evidence for it."""
    limits = replace(STALLS, prefill_stall_s=8.0)
    async with working(scripted_spec(timeouts=limits, prefill=600)) as worker:
        request_id = await submit(worker)
        assert (await status(worker, request_id)).verdict is Verdict.PREFILLING
        await wait_until(lambda: worker.snapshot().verdict is Verdict.SILENT, "it is called silent")
        told = worker.snapshot().requests[0]
        assert (told.id, told.job_name, told.verdict) == (request_id, "a job", Verdict.SILENT)
        assert told.evidence.silent_s >= 2.0
        await wait_until(lambda: worker.snapshot().requests[0].evidence.counters, "the engine was looked at")
        await worker.cancel(request_id)


async def test_a_slot_that_stays_busy_after_a_cancel_costs_the_engine(scripted_spec: SpecFactory) -> None:
    """A cancel that frees no slot is one of users' worst days."""
    async with working(scripted_spec(timeouts=STALLS, keep_busy=True, tokens=10000, interval=0.01)) as worker:
        request_id = await submit(worker)
        await wait_for_tokens(worker, request_id)
        await worker.cancel(request_id)
        await wait_until(lambda: worker.incarnation == 2, "the engine is replaced")
        assert "still busy" in (await wait_incident(worker)).because


async def test_a_cancel_that_frees_the_slot_costs_nothing(scripted_spec: SpecFactory) -> None:
    """The same cancel, on an engine that honours it, and for longer than its limit."""
    async with working(scripted_spec(timeouts=STALLS, tokens=40, interval=0.05)) as worker:
        first, second = await submit(worker), await submit(worker)
        await wait_for_tokens(worker, first)
        await worker.cancel(first)
        assert (await result(worker, second)).state is RequestState.COMPLETED
        assert worker.incarnation == 1


# Engines that answer badly


@pytest.mark.system
@pytest.mark.parametrize(
    ("flags", "reason", "text"),
    [
        ({"cut_after": 1}, "engine_unreachable", "word0 "),
        ({"bad_frame_after": 1}, "engine_unreachable", "word0 "),
        ({"long_frame_after": 1}, "engine_unreachable", "word0 "),
        ({"error_after": 1}, "engine_rejected", "word0 "),
        ({"html": True}, "engine_unreachable", ""),
        ({"reject": 429, "retry_after": 1}, "engine_rejected", ""),
        ({"reject": 503, "retry_after": 1}, "engine_rejected", ""),
    ],
    ids=["a cut frame", "a bad frame", "an over-long frame", "an error in a 200", "HTML", "429", "503"],
)
async def test_a_bad_answer_fails_its_request_alone(
    scripted_spec: SpecFactory, flags: dict[str, object], reason: str, text: str
) -> None:
    """An engine that answers its probe is not killed for one bad answer; what came before it is kept.

    It gives the canary the same, so it is held until it answers one.
    """
    async with working(scripted_spec(**flags)) as worker:
        told = await ask(worker)
        assert (told.state, told.reason, told.text) == (RequestState.FAILED, reason, text)
        assert (worker.state, worker.holds, worker.incarnation) == (WorkerState.DRAINING, frozenset({Hold.REFUSING}), 1)


async def test_the_engines_own_word_for_when_to_come_again_holds_the_slot(scripted_spec: SpecFactory) -> None:
    """Retry-After is obeyed before the slot is lent again."""
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
        assert worker.incarnation == 1


# Engines that die


async def test_an_exit_with_status_0_in_mid_stream_is_a_death(scripted_spec: SpecFactory) -> None:
    """Every exit that nobody asked for is a crash."""
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


async def test_a_prompt_that_kills_takes_its_neighbours_attempt_and_not_the_worker(scripted_spec: SpecFactory) -> None:
    """All that was in flight fails with its reason, and the worker goes on."""
    async with working(scripted_spec(die_on="POISON", tokens=1000, interval=0.01)) as worker:
        neighbour = await submit(worker)
        await wait_for_tokens(worker, neighbour)
        assert (await ask(worker, "POISON")).reason == "engine_died"
        told = await result(worker, neighbour)
        assert (told.reason, told.text[:6]) == ("engine_died", "word0 ")
        await worker.wait_ready()
        assert worker.incarnation == 2


async def test_a_worker_is_drained_resumed_and_restarted(scripted_spec: SpecFactory) -> None:
    """What an operator asks for is no failure: no backoff, no incident, nobody is charged."""
    async with working(scripted_spec(tokens=1000, interval=0.01)) as worker:
        worker.drain_nowait("maintenance")
        assert await worker.submit("a job", "", "Go.") is NO_SLOT_AVAILABLE
        worker.resume_nowait("done")
        request_id = await submit(worker)
        await wait_for_tokens(worker, request_id)
        worker.restart_nowait("a new driver")
        told = await result(worker, request_id)
        assert (told.reason, told.detail) == ("engine_died", "a new driver")
        await worker.wait_ready()
        assert (worker.incarnation, list(worker.incidents)) == (2, [])
        worker.drain_nowait("maintenance")
        worker.restart_nowait("with the drain kept")
        await wait_until(lambda: (worker.incarnation, worker.state) == (3, WorkerState.DRAINING), "it is drained still")


async def test_incidents_outlive_us(scripted_spec: SpecFactory, tmp_path: Path) -> None:
    """With a state directory they are there after a restart of ours."""
    spec = replace(scripted_spec(die_after=1), state_dir=tmp_path)
    async with working(spec) as worker:
        await ask(worker)
        await worker.wait_ready()
        kept = list(worker.incidents)
    assert list(Worker(spec).incidents) == kept
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
def test_a_specification_that_cannot_be_is_refused(fields: dict[str, Any], told: str) -> None:
    """Before anything is started, with the field's name."""
    with pytest.raises(InvalidSpec, match=re.escape(told)):
        WorkerSpec(**{"engine": "llama-server", "port": 9100, "command": ["x"], **fields})


async def test_a_stop_that_is_cancelled_or_asked_for_twice_is_a_stop(scripted_spec: SpecFactory) -> None:
    """A signal handler and the end of a block come at the same time; the worker can be started again."""
    timeouts = WorkerTimeouts(start_s=LIMIT_S, stop_grace_s=60)
    async with working(scripted_spec(timeouts=timeouts, ignore_sigterm=True)) as worker:
        pid = worker.snapshot().pid
        assert pid is not None
        with anyio.move_on_after(0.1):
            await worker.stop()
        assert (worker.state, is_alive(pid)) == (WorkerState.STOPPED, False)
        await worker.start()
        assert (await ask(worker)).text == "word0 word1 word2 "
        with anyio.move_on_after(0.1):
            await asyncio.gather(worker.stop(), worker.stop())
        await worker.stop()
        assert worker.state is WorkerState.STOPPED


async def test_a_start_that_failed_can_be_tried_again(scripted_spec: SpecFactory, tmp_path: Path) -> None:
    """A state directory that is a file, and then is none."""
    (tmp_path / "state").write_text("")
    worker = Worker(replace(scripted_spec(), state_dir=tmp_path / "state"))
    with anyio.fail_after(LIMIT_S):
        for _ in range(2):
            with pytest.raises(OSError, match="state"):
                await worker.start()
        (tmp_path / "state").unlink()
        await worker.start()
        assert (await ask(worker)).state is RequestState.COMPLETED
        await worker.stop()


@pytest.mark.system
async def test_running_out_of_descriptors_kills_no_engine(scripted_spec: SpecFactory) -> None:
    """We cannot look, nor ask: that is our trouble and not the engine's."""
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
        assert worker.incarnation == 1


@pytest.mark.system
async def test_another_clients_request_costs_nothing(scripted_spec: SpecFactory) -> None:
    """Who asks the engine past us has a slot that is none of ours, and gets on."""
    async with working(scripted_spec(slots=4, timeouts=STALLS, tokens=300, interval=0.01)) as worker:
        host, port = worker.spec.host, worker.spec.port
        body = {"messages": [{"role": "user", "content": "Go."}], "stream": True}
        async with (
            httpx.AsyncClient(trust_env=False) as client,
            client.stream("POST", f"http://{host}:{port}/v1/chat/completions", json=body) as foreign,
        ):
            ours = await submit(worker)
            cancelled = await submit(worker)
            await wait_for_tokens(worker, cancelled)
            await worker.cancel(cancelled)
            assert (await result(worker, ours)).state is RequestState.COMPLETED
            assert "DONE" in (await foreign.aread()).decode()
        assert worker.incarnation == 1


async def test_the_drain_of_a_worker_that_gave_up_holds(scripted_spec: SpecFactory, tmp_path: Path) -> None:
    """Whatever brings an engine back."""
    spec = scripted_spec(die_after=0, die_once=str(tmp_path / "once"))
    with anyio.fail_after(2 * LIMIT_S):
        worker = Worker(replace(spec, restart=replace(QUICK, failures=1)))
        await worker.start()
        await ask(worker)
        await wait_until(lambda: worker.state is WorkerState.FAILED, "it gives up")
        worker.drain_nowait("a test")
        worker.restart_nowait("a test")
        await wait_until(lambda: worker.state is WorkerState.DRAINING, "it is there, and drained")
        await worker.stop()


async def test_a_verdict_is_kept_though_a_stop_comes_at_once(scripted_spec: SpecFactory) -> None:
    """The one line that mattered is not lost because somebody gave up."""
    worker = Worker(replace(scripted_spec(timeouts=STALLS, mute=True), restart=QUICK))
    with anyio.fail_after(2 * LIMIT_S):
        await worker.start()
        assert (await ask(worker)).reason == "stalled_prefill"
        await worker.stop()
    assert [incident.verdict for incident in worker.incidents] == [Verdict.STALLED]
