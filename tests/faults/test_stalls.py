"""Engines that stop answering, and engines that only seem to."""

from dataclasses import replace

import anyio
import anyio.lowlevel
import httpx
import pytest

from tests.conftest import SpecFactory
from tests.harness.waiting import LIMIT_S, wait_until
from tests.harness.working import QUICK, STALLS, ask, result, status, submit, wait_for_tokens, wait_incident, working
from workers import (
    RequestState,
    Verdict,
    Worker,
)


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
    """Health answers 200, a slot is open, comments arrive: none of it is progress.

    It is killed soon after the limit, and never before.
    """
    async with working(scripted_spec(timeouts=STALLS, **flags)) as worker:
        told = await ask(worker)
        assert (told.state, told.reason, told.text) == (RequestState.FAILED, reason, text)
        assert STALLS.prefill_stall_s is not None
        assert STALLS.prefill_stall_s <= told.duration_s < STALLS.prefill_stall_s + 10
        await worker.supervisor.wait_ready()
        assert worker.now.incarnation == 2
        incident = await wait_incident(worker)
        assert (incident.verdict, incident.reason) == (Verdict.STALLED, reason)
        assert [request.job_name for request in incident.in_flight] == ["a job"]
        assert incident.in_flight[0].evidence.silent_s >= STALLS.prefill_stall_s
        assert incident.kernel.processes[0].rss_bytes > 0
        assert incident.exit is not None


@pytest.mark.system
async def test_the_incident_of_a_spinning_engine_shows_that_it_span(scripted_spec: SpecFactory) -> None:
    """CPU time is reported, and does not save the engine."""
    async with working(scripted_spec(timeouts=STALLS, spin_after=1)) as worker:
        await ask(worker)
        evidence = (await wait_incident(worker)).in_flight[0].evidence
        assert evidence.cpu_percent is not None
        assert evidence.cpu_percent > 20


async def test_an_engine_that_sleeps_and_then_answers_is_left_alone(scripted_spec: SpecFactory) -> None:
    """A missing CPU tick or byte condemns no engine before the limit."""
    async with working(scripted_spec(timeouts=STALLS, prefill=0.45)) as worker:
        assert (await ask(worker)).state is RequestState.COMPLETED
        assert worker.now.incarnation == 1


@pytest.mark.system
@pytest.mark.parametrize(
    "flags", [{"progress": 60, "step": 0.05}, {"counting": 60, "step": 0.05}], ids=["tells it", "shows it in /slots"]
)
async def test_a_long_prefill_is_left_alone(scripted_spec: SpecFactory, flags: dict[str, object]) -> None:
    """Five times the limit passes without a token, and every sign of progress prevents the kill."""
    async with working(scripted_spec(timeouts=STALLS, **flags)) as worker:
        told = await ask(worker)
        assert (told.state, worker.now.incarnation) == (RequestState.COMPLETED, 1)
        assert told.duration_s > 3


@pytest.mark.system
async def test_a_request_that_hangs_alone_ends_alone(scripted_spec: SpecFactory) -> None:
    """An engine that works for others is not killed for one request."""
    async with working(scripted_spec(slots=2, timeouts=STALLS, mute_on="POISON", tokens=150, interval=0.02)) as worker:
        healthy = await submit(worker)
        told = await ask(worker, "POISON")
        assert (told.state, told.reason) == (RequestState.FAILED, "stalled_prefill")
        assert (await result(worker, healthy)).state is RequestState.COMPLETED
        assert (worker.now.incarnation, list(worker.recorder.incidents)) == (1, [])


async def test_an_engine_that_answers_its_canary_is_not_killed(scripted_spec: SpecFactory) -> None:
    """The one request in flight hangs, and the engine would serve another."""
    async with working(scripted_spec(timeouts=STALLS, mute_on="POISON")) as worker:
        assert (await ask(worker, "POISON")).reason == "stalled_prefill"
        assert (await ask(worker)).state is RequestState.COMPLETED
        assert worker.now.incarnation == 1


async def test_a_verdict_is_shown_while_a_request_waits(scripted_spec: SpecFactory) -> None:
    """A user sees the request prefilling, then silent, with the evidence."""
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
    """A cancel that does not free the slot is one of the worst faults for users."""
    async with working(scripted_spec(timeouts=STALLS, keep_busy=True, tokens=10000, interval=0.01)) as worker:
        request_id = await submit(worker)
        await wait_for_tokens(worker, request_id)
        await worker.cancel(request_id)
        await wait_until(lambda: worker.now.incarnation == 2, "the engine is replaced")
        assert "still busy" in (await wait_incident(worker)).because


async def test_a_cancel_that_frees_the_slot_costs_nothing(scripted_spec: SpecFactory) -> None:
    """The same cancel, on an engine that honours it, and for longer than its limit."""
    async with working(scripted_spec(timeouts=STALLS, tokens=40, interval=0.05)) as worker:
        first, second = await submit(worker), await submit(worker)
        await wait_for_tokens(worker, first)
        await worker.cancel(first)
        assert (await result(worker, second)).state is RequestState.COMPLETED
        assert worker.now.incarnation == 1


@pytest.mark.system
async def test_a_request_of_another_client_does_not_cost_the_engine(scripted_spec: SpecFactory) -> None:
    """A client that bypasses us uses a slot and makes progress."""
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
        assert worker.now.incarnation == 1


async def test_a_verdict_is_kept_though_a_stop_comes_at_once(scripted_spec: SpecFactory) -> None:
    """The incident is written before the stop."""
    worker = Worker(replace(scripted_spec(timeouts=STALLS, mute=True), restart=QUICK))
    with anyio.fail_after(2 * LIMIT_S):
        await worker.start()
        assert (await ask(worker)).reason == "stalled_prefill"
        await worker.stop()
    assert [incident.verdict for incident in worker.recorder.incidents] == [Verdict.STALLED]
