"""The worker against a real process that misbehaves on request."""

import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic

import anyio
import pytest
from msgspec import structs

from tests.conftest import SpecFactory
from tests.harness.waiting import LIMIT_S, is_alive, wait_until
from workers.errors import NoSlot, StartFailed
from workers.fleet import Fleet
from workers.outcome import (
    Cancelled,
    CancelReason,
    Completed,
    EngineFailed,
    FailureReason,
    Outcome,
    RequestFailed,
)
from workers.policy import roll
from workers.policy.restart import RestartPolicy
from workers.requests.answer import Answer
from workers.requests.request import Request, user_conversation
from workers.spec import WorkerSpec, WorkerTimeouts
from workers.states import Hold, WorkerState
from workers.supervised import SupervisedWorker

QUICK = RestartPolicy(initial_s=0.05, max_s=0.1, failures=3, window_s=60)


@asynccontextmanager
async def running(spec: WorkerSpec, *, ready: bool = True) -> AsyncIterator[SupervisedWorker]:
    """Run one worker for a block, and check that no process of it is left."""
    fleet = Fleet([spec], os.environ)
    worker = next(iter(fleet))
    pid = None
    with anyio.fail_after(2 * LIMIT_S):
        async with fleet.running():
            if ready:
                await worker.supervisor.wait_ready()
                pid = worker.snapshot().pid
            yield worker
    assert pid is None or not is_alive(pid)


def listens(port: int) -> bool:
    """Return whether a program accepts connections there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def ask(worker: SupervisedWorker, text: str = "Go.", answer: Answer | None = None) -> tuple[Outcome, str]:
    answer = answer or Answer(monotonic)
    request = Request(job_name="test", system="", conversation=user_conversation(text))
    with worker.lease_nowait():
        outcome = await worker.requests.perform(request, answer)
    assert worker.snapshot().slots_in_use == 0
    return outcome, answer.text


async def test_a_worker_starts_answers_and_stops(scripted_spec: SpecFactory) -> None:
    """The whole course, with the states that it shows."""
    async with running(scripted_spec()) as worker:
        shown = worker.snapshot()
        assert (shown.state, shown.incarnation, shown.slots_total, shown.slots_in_use) == ("ready", 1, 2, 0)
        assert shown.pid is not None
        assert os.getpgid(shown.pid) == shown.pid
        assert await ask(worker) == (Completed(finish_reason="stop"), "word0 word1 word2 ")
        await worker.end_engine("the test is over")
        assert (worker.now.state, worker.snapshot().pid) == (WorkerState.STOPPED, None)
        assert str(worker.snapshot().last_exit) == "exited with status 0"
        assert not is_alive(shown.pid)


async def test_loading_is_no_failure(scripted_spec: SpecFactory) -> None:
    """503 while loading means neither ready nor failed."""
    async with running(scripted_spec(load=0.3), ready=False) as worker:
        await wait_until(
            lambda: any("listening" in line.text for line in worker.supervisor.log.tail(9)), "the engine listens"
        )
        assert (worker.now.state, worker.snapshot().verdict) == (WorkerState.STARTING, "loading")
        with pytest.raises(NoSlot):
            worker.lease_nowait()
        await worker.supervisor.wait_ready()


@pytest.mark.parametrize("status", [0, 1, 7])
async def test_an_exit_at_once_fails_with_the_last_lines(scripted_spec: SpecFactory, status: int) -> None:
    """The log line that matters is in the message; every unexpected exit is a failure."""
    async with running(replace(scripted_spec(exit_at_once=status), restart=QUICK), ready=False) as worker:
        with pytest.raises(StartFailed) as caught:
            await worker.supervisor.wait_ready(first_try_only=True)
        assert f"exited with status {status}" in str(caught.value)
        assert "cannot allocate the universe" in str(caught.value)
        with pytest.raises(StartFailed, match="gave up after 3 failures"):
            await worker.supervisor.wait_ready()
        assert (worker.now.state, worker.now.incarnation) == (WorkerState.FAILED, 3)


async def test_a_port_in_use_is_reported_and_a_foreign_engine_is_not_mistaken_for_ours(
    scripted_spec: SpecFactory,
) -> None:
    """Another server on the port would answer probes as well as ours."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        spec = replace(scripted_spec(port=taken.getsockname()[1]), restart=QUICK)
        async with running(spec, ready=False) as worker:
            with pytest.raises(StartFailed, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already in use"):
                await worker.supervisor.wait_ready(first_try_only=True)


async def test_a_killed_engine_is_replaced_and_its_requests_keep_their_text(scripted_spec: SpecFactory) -> None:
    """They have a reason and their partial output, and another incarnation starts."""
    async with running(replace(scripted_spec(tokens=1000, interval=0.01), restart=QUICK)) as worker:
        pid = worker.snapshot().pid
        assert pid is not None
        answer = Answer(monotonic)
        async with anyio.create_task_group() as tasks:

            async def expect_death() -> None:
                outcome, text = await ask(worker, answer=answer)
                because = "the engine was killed by SIGKILL"
                assert outcome == EngineFailed(
                    reason=FailureReason.ENGINE_DIED, detail=because, brought_down=True, is_outside=True
                )
                assert text.startswith("word0 word1 ")

            tasks.start_soon(expect_death)
            await wait_until(lambda: answer.output_tokens > 2, "some tokens have come")
            os.kill(pid, signal.SIGKILL)
        await worker.supervisor.wait_ready()
        shown = worker.snapshot()
        assert (shown.incarnation, shown.pid != pid, str(shown.last_exit)) == (2, True, "killed by SIGKILL")


async def test_an_engine_that_exits_with_status_0_in_mid_stream_has_died(scripted_spec: SpecFactory) -> None:
    """Every unexpected exit is a crash, whatever its status."""
    async with running(replace(scripted_spec(die_after=2), restart=QUICK)) as worker:
        outcome, text = await ask(worker)
        assert isinstance(outcome, EngineFailed)
        assert (outcome.reason, outcome.brought_down, text) == (FailureReason.ENGINE_DIED, True, "word0 word1 ")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [({"mute": True}, FailureReason.STALLED_PREFILL), ({"stall_after": 1}, FailureReason.STALLED_DECODE)],
    ids=["prefill", "decode"],
)
async def test_a_silent_engine_is_killed_and_its_neighbours_are_not_blamed(
    scripted_spec: SpecFactory, flags: dict[str, float], reason: FailureReason
) -> None:
    """A stall ends the incarnation; the silent request is charged, and a younger one is not."""
    limits = WorkerTimeouts(prefill_stall_s=0.8, decode_stall_s=0.8)
    async with running(replace(scripted_spec(timeouts=limits, **flags), restart=QUICK)) as worker:
        outcomes: dict[Answer, Outcome] = {}
        older = Answer(monotonic)

        async def note(answer: Answer) -> None:
            request = Request(job_name="test", system="", conversation=user_conversation("Go."))
            with worker.lease_nowait():
                outcomes[answer] = await worker.requests.perform(request, answer)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(note, older)
            await wait_until(lambda: monotonic() - older.generation.last_progress_at > 0.4, "half of the limit is over")
            younger = Answer(monotonic)
            tasks.start_soon(note, younger)
        first, second = outcomes[older], outcomes[younger]
        assert isinstance(first, EngineFailed)
        assert isinstance(second, EngineFailed)
        assert (first.reason, first.brought_down) == (reason, True)
        assert (second.reason, second.brought_down) == (FailureReason.ENGINE_DIED, False)
        await worker.supervisor.wait_ready()
        assert worker.now.incarnation == 2


async def test_a_deadline_ends_the_request_and_not_the_engine(scripted_spec: SpecFactory) -> None:
    """``request_s`` is the caller's limit; the engine is healthy."""
    limits = WorkerTimeouts(request_s=0.2)
    async with running(scripted_spec(timeouts=limits, tokens=1000, interval=0.02)) as worker:
        outcome, text = await ask(worker)
        assert outcome == RequestFailed(reason=FailureReason.DEADLINE, detail="not answered within request_s = 0.2 s")
        assert text.startswith("word0 ")
        assert (worker.now.state, worker.now.incarnation) == (WorkerState.READY, 1)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            {"reject": 400},
            RequestFailed(reason=FailureReason.ENGINE_REJECTED, detail="400 server_error: no"),
        ),
        (
            {"reject": 500},
            EngineFailed(reason=FailureReason.ENGINE_REJECTED, detail="500 server_error: no", brought_down=False),
        ),
        (
            {"error_after": 1},
            EngineFailed(
                reason=FailureReason.ENGINE_REJECTED, detail="500 server_error: Compute error.", brought_down=False
            ),
        ),
        (
            {"cut_after": 1},
            EngineFailed(
                reason=FailureReason.ENGINE_UNREACHABLE,
                detail="the stream ended in the middle of a frame",
                brought_down=False,
            ),
        ),
        (
            {"html": True},
            EngineFailed(
                reason=FailureReason.ENGINE_REJECTED,
                detail="the answer is text/html, and neither an answer nor an error: <html>Welcome</html>",
                brought_down=False,
            ),
        ),
    ],
    ids=["400", "500", "error in the stream", "cut-off stream", "HTML"],
)
async def test_an_engine_that_answers_badly_is_not_killed(
    scripted_spec: SpecFactory, flags: dict[str, object], expected: Outcome
) -> None:
    """It answers probes and counts as healthy; the request reports the fault."""
    flags = (
        {**flags, "reject_body": '{"error": {"message": "no", "type": "server_error"}}'} if "reject" in flags else flags
    )
    async with running(scripted_spec(**flags)) as worker:
        outcome, _ = await ask(worker)
        assert outcome == expected
        assert worker.now.incarnation == 1
        # A canary fares no better, but for a 400: so the engine gets nothing more until one is answered.
        assert worker.now.holds == (set() if isinstance(expected, RequestFailed) else {Hold.REFUSING})


@pytest.mark.system
async def test_an_engine_that_refuses_every_request_is_held_until_it_answers(scripted_spec: SpecFactory) -> None:
    """Neither it nor the request is blamed: no charge, no kill, no restart."""
    async with running(scripted_spec(reject=500, reject_first=6)) as worker:  # a request, and canaries
        outcome, _ = await ask(worker)
        assert isinstance(outcome, EngineFailed)
        assert (outcome.is_proved, worker.now.state, worker.now.holds) == (
            False,
            WorkerState.DRAINING,
            frozenset({Hold.REFUSING}),
        )
        assert "it refuses requests, a canary of ours too" in worker.supervisor.because
        await worker.supervisor.wait_ready()
        assert await ask(worker) == (Completed(finish_reason="stop"), "word0 word1 word2 ")
        assert worker.now.incarnation == 1


async def test_an_answered_canary_proves_a_refusal(scripted_spec: SpecFactory) -> None:
    """The engine serves others, so the refusal concerns that request."""
    async with running(scripted_spec(reject=500, reject_first=1)) as worker:
        outcome, _ = await ask(worker)
        assert isinstance(outcome, EngineFailed)
        assert (outcome.is_proved, worker.now.state) == (True, WorkerState.READY)


@pytest.mark.parametrize(
    ("number", "is_outside"),
    [(signal.SIGTERM, True), (signal.SIGINT, True), (signal.SIGHUP, True), (signal.SIGKILL, True)]
    + [(number, False) for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)],
)
async def test_a_signal_shows_what_caused_a_death(
    scripted_spec: SpecFactory, number: signal.Signals, *, is_outside: bool
) -> None:
    """Only a person or a foreign program sends an engine the first four."""
    async with running(replace(scripted_spec(tokens=1000, interval=0.01, signals=True), restart=QUICK)) as worker:
        answer = Answer(monotonic)
        pid = worker.snapshot().pid
        assert pid is not None
        outcomes: list[Outcome] = []

        async def note() -> None:
            outcomes.append((await ask(worker, answer=answer))[0])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(note)
            await wait_until(lambda: answer.output_tokens, "a token has come")
            os.kill(pid, number)
        (outcome,) = outcomes
        assert isinstance(outcome, EngineFailed)
        assert (outcome.brought_down, outcome.is_outside) == (True, is_outside)


async def test_an_engine_that_no_longer_listens_is_killed(scripted_spec: SpecFactory) -> None:
    """An engine that runs and cannot be reached is useless: failed probes are the proof, and it is replaced."""
    async with running(replace(scripted_spec(deaf_after=1), restart=QUICK)) as worker:
        assert (await ask(worker))[0] == Completed(finish_reason="stop")
        await wait_until(lambda: not listens(worker.spec.port), "the engine listens no more")
        outcome, _ = await ask(worker)
        assert isinstance(outcome, EngineFailed)
        assert (outcome.reason, outcome.brought_down) == (FailureReason.ENGINE_UNREACHABLE, True)
        await worker.supervisor.wait_ready()
        assert worker.now.incarnation == 2


async def test_a_stop_ends_requests_and_an_engine_that_ignores_it(scripted_spec: SpecFactory) -> None:
    """SIGTERM, the grace period, SIGKILL; requests in flight end as at a shutdown, not as failures."""
    limits = WorkerTimeouts(stop_grace_s=0.2)
    async with running(scripted_spec(timeouts=limits, tokens=1000, interval=0.02, ignore_sigterm=True)) as worker:
        answer = Answer(monotonic)
        outcomes: list[Outcome] = []

        async def note() -> None:
            outcomes.append((await ask(worker, answer=answer))[0])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(note)
            await wait_until(lambda: answer.output_tokens, "a token has come")
            await worker.end_engine("the test is over")
        assert outcomes == [Cancelled(reason=CancelReason.SHUTDOWN)]
        assert str(worker.snapshot().last_exit) == "killed by SIGKILL"


async def test_a_worker_is_stopped_before_its_engine_is_ready(scripted_spec: SpecFactory) -> None:
    """A stop works at any moment of a start."""
    fleet = Fleet([scripted_spec()], os.environ)
    worker = next(iter(fleet))
    with anyio.fail_after(LIMIT_S):
        async with fleet.running():
            await worker.end_engine("changed my mind")
            assert (worker.now.state, worker.snapshot().pid) == (WorkerState.STOPPED, None)


async def test_a_worker_that_is_replaced_by_equal_ones_is_left_alone_in_the_end(
    scripted_spec: SpecFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect may report its settings as changed again and again.

    The worker reports it, serves, and is replaced on request.
    """

    def never_content(workers: Sequence[roll.ReplicaView], wanted: Sequence[roll.WantedModel]) -> Sequence[object]:
        return roll.decide([structs.replace(each, is_current=False) for each in workers], wanted)

    monkeypatch.setattr("workers.roster.decide", never_content)
    fleet = Fleet([scripted_spec()], os.environ)

    def is_left_alone() -> bool:
        worker = fleet.get("scripted-0")
        return (
            worker is not None and worker.now.state is WorkerState.READY and "left alone" in worker.snapshot().because
        )

    with anyio.fail_after(3 * LIMIT_S):
        async with fleet.running():
            await wait_until(is_left_alone, "it is left alone")
            (worker,) = fleet
            number = worker.now.incarnation
            assert "its settings are the same" in worker.snapshot().because
            fleet.roster.want([worker.spec])  # an owner that says the same again changes nothing
            assert worker.now.incarnation == number
            fleet.forgive("scripted-0")
            await wait_until(lambda: fleet.get("scripted-0") not in (None, worker), "another takes its place")


async def test_a_drained_worker_admits_no_request_and_ends_none(scripted_spec: SpecFactory) -> None:
    """A drain stops admissions only."""
    async with running(scripted_spec(tokens=20, interval=0.01)) as worker:
        answer = Answer(monotonic)
        async with anyio.create_task_group() as tasks:

            async def expect_completion() -> None:
                assert (await ask(worker, answer=answer))[0] == Completed(finish_reason="stop")

            tasks.start_soon(expect_completion)
            await wait_until(lambda: answer.output_tokens, "a token has come")
            worker.drain_nowait("the test wants it")
            with pytest.raises(NoSlot):
                worker.lease_nowait()


@pytest.mark.parametrize(
    ("fields", "params", "expected"),
    [
        ({}, {}, 96),
        ({"max_answer": 7}, {}, 7),
        ({"max_answer": 7}, {"max_tokens": 9}, 9),
        ({"params": {"max_tokens": 5}}, {}, 5),
        ({"params": {"n_predict": 5}}, {}, None),
        ({}, {"max_completion_tokens": 9}, None),
        ({"params": {"n_predict": 5}}, {"max_tokens": 9}, 9),
        ({"params": {"max_tokens": 5}}, {"n_predict": 9}, None),
        ({"params": {"max_tokens": 5}}, {"max_tokens": None}, 5),
        ({"params": {"n_predict": None}, "max_answer": 7}, {"max_tokens": None}, 7),
    ],
)
async def test_an_answer_has_a_bound(
    scripted_spec: SpecFactory,
    tmp_path: Path,
    fields: dict[str, object],
    params: dict[str, object],
    expected: int | None,
) -> None:
    """A generous one, from the context; a bound that the request sets is used instead."""
    record = tmp_path / "record"
    async with running(replace(scripted_spec(record=str(record)), context=128, **fields)) as worker:  # type: ignore[arg-type]
        request = Request(job_name="test", system="", conversation=user_conversation("Go."), params=params)
        with worker.lease_nowait():
            await worker.requests.perform(request, Answer(monotonic))
    (asked,) = [json.loads(line)["request"] for line in record.read_text().splitlines()]
    assert asked.get("max_tokens") == expected
    told = [name for name in ("max_tokens", "max_completion_tokens", "n_predict") if asked.get(name) is not None]
    assert len(told) == 1, "one bound, and by one name"


async def test_slots_are_used_up_to_their_number(scripted_spec: SpecFactory) -> None:
    """NO_SLOT_AVAILABLE at once when all slots are in use; a worker has no queue."""
    async with running(scripted_spec(slots=2)) as worker:
        with worker.lease_nowait(), worker.lease_nowait(), pytest.raises(NoSlot):
            worker.lease_nowait()
        worker.lease_nowait().release()


async def test_a_cancelled_task_gives_its_slot_back(scripted_spec: SpecFactory) -> None:
    """A caller may be cancelled at any moment."""
    async with running(scripted_spec(prefill=600)) as worker:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, worker)
            await wait_until(lambda: worker.snapshot().slots_in_use, "the request is in flight")
            tasks.cancel_scope.cancel()
        assert worker.snapshot().slots_in_use == 0


async def test_ports_and_daemons_are_free_for_the_next_incarnation(
    scripted_spec: SpecFactory, tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """A restart never meets processes of the last incarnation."""
    daemon = tmp_path / "daemon"
    spec = replace(scripted_spec(port=free_ports(1), daemon=str(daemon)), restart=QUICK)
    async with running(spec) as worker:
        await wait_until(lambda: daemon.exists() and daemon.read_text(), "the daemon has forked")
        first = int(daemon.read_text())
        pid = worker.snapshot().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await wait_until(lambda: worker.now.incarnation == 2, "the next incarnation starts")
        assert not is_alive(first)
        await worker.supervisor.wait_ready()
