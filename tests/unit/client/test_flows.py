"""Flows of more than one request, step by step: retries, waits, resumptions; without I/O and clocks."""

import json
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

from roundhouse_client.calls.job_calls import get_job, post_job
from roundhouse_client.calls.node_calls import get_readiness
from roundhouse_client.errors import (
    AnswerLost,
    NotFound,
    NotNow,
    RoundhouseError,
    StateConflict,
    Unreachable,
    WaitExceeded,
)
from roundhouse_client.flows.asking import ask
from roundhouse_client.flows.following import follow_job, follow_log
from roundhouse_client.flows.reading import read_jobs, read_result
from roundhouse_client.flows.steps import Flow, Give, Now, Open, Pause, Read, Runner, Send
from roundhouse_client.flows.waiting import wait_job, wait_ready
from roundhouse_client.request import Reply, Request
from tests.unit.client.answers import AT, ENDED, JOB, LINE, problem, transcript

T = TypeVar("T")
AWAY = Unreachable("http://here", "connection refused")
LOST = AnswerLost("http://here", "reset")


def ok(document: object) -> Reply:
    return Reply(status=200, body=json.dumps(document).encode())


def no(status: int, code: str, retry_after: str | None = None) -> Reply:
    return Reply(status=status, body=json.dumps(problem(status, code)).encode(), retry_after=retry_after)


class World:
    """Answers the steps of a flow from a list, in order; pauses advance its clock, and answers may too."""

    def __init__(self, *outcomes: object, took_s: float = 0.0) -> None:
        self.outcomes: list[object] = list(outcomes)
        self.took_s = took_s
        self.now = 100.0
        self.given: list[Any] = []
        self.pauses: list[float] = []
        self.told: list[int] = []  # numbers of pauses with a reason
        self.asked: list[str] = []

    def run(self, flow: Flow[T], *, most: int | None = None) -> T:
        runner = Runner(flow)
        step = runner.begin()
        while step is not None:
            match step:
                case Give():
                    self.given.append(step.value)
                    if len(self.given) == most:
                        flow.close()
                        return None  # type: ignore[return-value]
                    step = runner.answer(None)
                    continue
                case Now():
                    step = runner.answer(self.now)
                    continue
                case Pause():
                    self.pauses.append(step.seconds)
                    self.told += [step.number] if step.because is not None else []
                    self.now += step.seconds
                    step = runner.answer(None)
                    continue
                case Send() | Open():
                    self.asked.append(shown(step.request))
                    self.now += self.took_s
                case Read():
                    pass
            outcome = self.outcomes.pop(0)
            step = runner.fail(outcome) if isinstance(outcome, RoundhouseError) else runner.answer(outcome)
        assert self.outcomes == []
        return runner.result


def shown(request: Request) -> str:
    query = "&".join(f"{name}={value}" for name, value in request.query.items())
    last = request.headers.get("Last-Event-ID")
    return request.path + (f"?{query}" if query else "") + (f"#{last}" if last else "")


def frames(*events: tuple[int | None, str, object]) -> bytes:
    told = (
        (f"id: {number}\n" if number else "") + f"event: {kind}\ndata: {json.dumps(data)}\n\n"
        for number, kind, data in events
    )
    return "".join(told).encode()


def state(word: str) -> dict[str, str]:
    return {"state": word, "at": AT}


class TestAsking:
    def test_a_read_is_repeated_after_passing_failures(self) -> None:
        """Refused connections, lost answers and 503. Pauses grow, and are never shorter than the service asked for."""
        world = World(AWAY, LOST, no(503, "shutting_down"), no(503, "crowded", "2"), ok(JOB))
        assert world.run(ask(get_job("job-1"), 60.0)).id == "job-1"
        assert world.pauses == [0.1, 0.2, 0.4, 2.0]
        assert world.told == [1, 2, 3, 4]

    def test_patience_has_an_end(self) -> None:
        """The caller gets the last error, no later than the limit."""
        world = World(*[AWAY] * 13)
        with pytest.raises(Unreachable):
            world.run(ask(get_job("job-1"), 10.0))
        assert 9.0 < sum(world.pauses) <= 10.0

    def test_without_patience_an_error_is_raised_at_once(self) -> None:
        """The command line works so."""
        with pytest.raises(Unreachable):
            World(AWAY).run(ask(get_job("job-1"), 0.0))

    def test_a_lasting_error_is_raised_at_once(self) -> None:
        """404 and 409 do not change."""
        with pytest.raises(NotFound):
            World(no(404, "job_not_found")).run(ask(get_job("x"), 60.0))

    @pytest.mark.parametrize("failure", [AWAY, LOST, no(503, "shutting_down")])
    def test_a_job_without_an_idempotency_key_is_sent_once(self, failure: object) -> None:
        """Sent again, it might become two jobs."""
        world = World(failure)
        with pytest.raises(RoundhouseError):
            world.run(ask(post_job({}), 60.0))
        assert world.asked == ["/v1/jobs"]

    def test_a_job_with_an_idempotency_key_is_sent_until_it_is_accepted(self) -> None:
        """The key tells the service that it is the same job."""
        world = World(LOST, no(429, "too_many_requests", "1"), ok(JOB))
        assert world.run(ask(post_job({}, idempotency_key="k"), 60.0)).id == "job-1"
        assert world.pauses == [0.1, 1.0]

    def test_an_expected_refusal_is_raised(self) -> None:
        """With queue=false the caller wants to learn that no slot is free, and not wait for one."""
        with pytest.raises(NotNow):
            World(no(429, "no_slot_available", "1")).run(ask(post_job({}, idempotency_key="k", queue=False), 60.0))


class TestWaiting:
    def test_a_job_is_waited_for_by_long_requests(self) -> None:
        """The service answers at the job's end, or after the requested time."""
        world = World(ok(JOB), ok(JOB), ok(ENDED), took_s=20.0)
        assert world.run(wait_job("job-1")).state == "completed"
        assert world.asked == ["/v1/jobs/job-1?wait_s=20.0"] * 3
        assert world.pauses == []

    def test_a_service_that_does_not_wait_is_not_asked_without_pause(self) -> None:
        """It may be older, or stopping."""
        world = World(*[ok(JOB)] * 6, ok(ENDED))
        world.run(wait_job("job-1"))
        assert world.pauses == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]

    def test_a_restart_is_waited_out(self) -> None:
        """The service is killed during a request, is away for a while, and returns."""
        world = World(LOST, *[AWAY] * 9, ok(ENDED))
        assert world.run(wait_job("job-1", patience_s=60.0)).has_ended
        with pytest.raises(Unreachable):
            World(LOST, *[AWAY] * 9).run(wait_job("job-1", patience_s=6.0))

    def test_the_wait_has_a_bound(self) -> None:
        """The error carries the job as it was seen last."""
        world = World(ok(JOB), ok(JOB), took_s=20.0)
        with pytest.raises(WaitExceeded, match="job-1 is running after 25 s") as caught:
            world.run(wait_job("job-1", timeout_s=25.0))
        assert world.asked == ["/v1/jobs/job-1?wait_s=20.0", "/v1/jobs/job-1?wait_s=5.0"]
        assert caught.value.last is not None

    def test_an_outage_does_not_lengthen_the_wait(self) -> None:
        """Patience is limited to the time left."""
        world = World(ok(JOB), *[AWAY] * 5, took_s=0.0)
        with pytest.raises(Unreachable):
            world.run(wait_job("job-1", timeout_s=1.0, patience_s=60.0))
        assert sum(world.pauses) <= 1.0
        assert world.pauses == [0.1, 0.1, 0.2, 0.4]

    def test_readiness_is_waited_for_within_its_time(self) -> None:
        """The service may not listen yet, or load models; the last obstacle is in the error."""
        missing = no(503, "not_ready", "30")
        world = World(AWAY, missing, missing, ok({"status": "ready", "without": []}))
        assert world.run(wait_ready(timeout_s=10.0)).status == "ready"
        assert world.pauses == [0.1, 0.2, 0.4]
        with pytest.raises(WaitExceeded, match=r"not ready within 0\.5 s: it cannot be"):
            World(missing, missing, missing).run(wait_ready(timeout_s=0.5))
        with pytest.raises(NotNow):
            World(missing).run(ask(get_readiness(), 60.0))  # to look is not to wait


class TestFollowing:
    def test_a_broken_stream_resumes_after_its_last_event(self) -> None:
        """Each stored event comes once; one that was cut is requested again."""
        queued, running = frames((1, "job", state("queued"))), frames((2, "job", state("running")))
        progress, end = frames((None, "progress", {"turns": []})), frames((3, "end", state("completed")))
        world = World(
            Reply(status=200), queued + running[:-7], LOST, ok(JOB),
            Reply(status=200), running, progress, LOST, ok(JOB),
            AWAY, ok(JOB),
            Reply(status=200), end,
        )  # fmt: skip
        world.run(follow_job("job-1").flow)
        assert [(event.number, event.kind) for event in world.given] == [
            (1, "job"), (2, "job"), (None, "progress"), (3, "end"),
        ]  # fmt: skip
        assert [path for path in world.asked if "#" in path] == [
            "/v1/jobs/job-1/events#0", "/v1/jobs/job-1/events#1", "/v1/jobs/job-1/events#2", "/v1/jobs/job-1/events#2",
        ]  # fmt: skip

    def test_a_stream_that_ends_before_its_job_is_opened_again(self) -> None:
        """A service that stops closes it; the job's state says whether more follows."""
        world = World(Reply(status=200), b"", ok(JOB), Reply(status=200), frames((1, "end", state("failed"))))
        world.run(follow_job("job-1").flow)
        assert world.pauses == [1.0]

    def test_a_job_that_ended_during_a_break_is_read_to_its_end(self) -> None:
        """One more stream has its last events; if it has none, there are none."""
        world = World(Reply(status=200), LOST, ok(ENDED), Reply(status=200), frames((1, "end", state("completed"))))
        world.run(follow_job("job-1").flow)
        assert [event.kind for event in world.given] == ["end"]
        world = World(Reply(status=200), b"", ok(ENDED), Reply(status=200), b"")
        world.run(follow_job("job-1", after=9).flow)
        assert world.given == []

    def test_a_stream_that_never_opens_is_given_up(self) -> None:
        """Although the service answers everything else."""
        outcomes: Iterable[object] = (each for _ in range(60) for each in (no(503, "too_many_connections"), ok(JOB)))
        with pytest.raises(NotNow):
            World(*outcomes).run(follow_job("job-1", patience_s=20.0).flow)

    def test_a_deleted_job_is_reported(self) -> None:
        """Also while it is followed."""
        with pytest.raises(NotFound):
            World(Reply(status=200), b"", no(404, "job_not_found")).run(follow_job("job-1").flow)

    def test_an_unknown_event_of_a_newer_service_is_passed_on(self) -> None:
        """It has its data, without a typed value."""
        world = World(Reply(status=200), frames((1, "mood", {"is": "good"}), (2, "end", state("completed"))))
        world.run(follow_job("job-1").flow)
        assert (world.given[0].kind, world.given[0].data, world.given[0].value) == ("mood", {"is": "good"}, None)

    def test_a_log_is_followed_by_its_line_numbers(self) -> None:
        """First the tail, then each new line; after a restart of the service it is read from the first line."""
        log = {"id": "m-0", "incarnation": 1}
        first, second, third = (ok({**log, "lines": [{**LINE, "number": number}]}) for number in (7, 9, 2))
        world = World(first, LOST, AWAY, second, second, LOST, third, third)
        world.run(follow_log("m-0", tail=7).flow, most=3)
        assert [line.number for line in world.given] == [7, 9, 2]
        assert [path.partition("?")[2] for path in world.asked] == [
            "tail=7&after=0",
            "tail=10000&after=7", "tail=1&after=0", "tail=1&after=0", "tail=10000&after=7",  # the same incarnation
            "tail=10000&after=9", "tail=1&after=0", "tail=10000&after=0",  # another one, which counts from 1 again
        ]  # fmt: skip
        assert world.pauses == [0.5, 0.1, 0.1, 0.5, 0.1]

    def test_no_lines_at_first_stay_none(self) -> None:
        """The next look must not give the whole log."""
        log = {"id": "m-0", "incarnation": 1}
        old, nothing, new = (ok({**log, "lines": [{**LINE, "number": each}] if each else []}) for each in (7, 0, 8))
        world = World(old, nothing, new)
        world.run(follow_log("m-0", tail=0).flow, most=1)
        assert [line.number for line in world.given] == [8]
        assert [path.partition("?")[2] for path in world.asked] == ["tail=1&after=0", *["tail=10000&after=7"] * 2]


class TestReading:
    def test_a_result_that_is_cut_resumes_where_it_was(self) -> None:
        """Each transcript comes once, in order; one that was cut is read again."""
        lines = [json.dumps(transcript(name)).encode() + b"\n" for name in ("q0", "q1", "q2")]
        whole = b"".join(lines)
        world = World(
            Reply(status=200), lines[0] + lines[1][:9], LOST,
            Reply(status=200), whole[:-5], b"",
            AWAY,
            Reply(status=200), whole, b"",
        )  # fmt: skip
        world.run(read_result("job-1").flow)
        assert [each.id for each in world.given] == ["q0", "q1", "q2"]
        assert world.asked == ["/v1/jobs/job-1/result?format=jsonl"] * 4

    def test_a_running_job_has_no_result(self) -> None:
        """The error is raised at once, whatever Retry-After says."""
        with pytest.raises(StateConflict):
            World(no(409, "not_finished", "1")).run(read_result("job-1").flow)

    def test_jobs_are_listed_page_by_page(self) -> None:
        """Each page has the cursor of the next one."""
        world = World(ok({"jobs": [JOB], "next_cursor": "7"}), ok({"jobs": [ENDED], "next_cursor": None}))
        world.run(read_jobs(state="running").flow)
        assert [job.state for job in world.given] == ["running", "completed"]
        assert world.asked == [
            "/v1/jobs?state=running&limit=100",
            "/v1/jobs?state=running&limit=100&cursor=7",
        ]
