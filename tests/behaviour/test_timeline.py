"""A job's timeline, from stored turns and incidents of the workers (specification, "Timeline")."""

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from service.timeline.chart import chart
from service.timeline.timeline import Timeline, read_timeline
from tests.harness.service import Document, Service, debate, run_command, scripted_model, serving
from tests.harness.waiting import wait_for

CRASH = "DIE-HERE"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    """A service with a job that killed an engine once, and one whose turns go on for ever."""
    folder = tmp_path_factory.mktemp("timeline")
    models = {
        "m": scripted_model(free_ports(1), die_on=CRASH, die_once=str(folder / "died")),
        "slow": scripted_model(free_ports(1), tokens=100_000, interval=0.01),
    }
    with serving(folder, free_ports(1), models, {"drain_s": 0.2}) as running:
        yield running


@pytest.fixture(scope="module")
def broken(service: Service) -> Timeline:
    """The timeline of an ended job in which an engine died."""
    job = debate(conversations=3, rounds=2)
    job["conversations"][1]["prompt"] += f" {CRASH}"
    job_id = service.post_job(job)
    assert service.wait_ended(job_id)["state"] == "completed"
    return timeline_of(service, job_id)


def timeline_of(service: Service, job_id: str) -> Timeline:
    return read_timeline(service.http.get(f"/v1/jobs/{job_id}/timeline").read())


def test_every_attempt_of_the_transcripts_appears_once(service: Service, broken: Timeline) -> None:
    """Attempts on engines that died too, each with its place and time."""
    stored = service.get(f"/v1/jobs/{broken.id}/result")["conversations"]
    attempts = sorted(
        (talk["id"], turn["agent"], turn["round"], number, each["worker"], each["incarnation"], each["outcome"])
        for talk in stored
        for turn in talk["turns"]
        for number, each in enumerate(turn["attempts"], start=1)
    )
    assert len(attempts) > 18
    assert attempts == sorted(
        (span.conversation, span.agent, span.round, span.number, span.worker, span.incarnation, span.outcome)
        for span in broken.attempts
    )
    for span in broken.attempts:
        assert span.queued_s is not None
        assert span.finished_s is not None
        assert 0 <= span.queued_s <= span.started_s <= span.finished_s <= broken.until_s
    assert {span.reason for span in broken.attempts if span.outcome == "failed"} == {"engine_died"}
    assert all(span.first_token_s for span in broken.attempts if span.outcome == "completed")


def test_rows_are_no_more_than_slots_and_none_holds_two_at_once(broken: Timeline) -> None:
    """The real slot of a turn is unknown; the chart shows a possible one."""
    (worker,) = broken.workers
    assert (worker.id, worker.model, worker.slots) == ("m-0", "m", 2)
    assert worker.rows == 2
    for row in range(worker.rows):
        spans = [span for span in broken.attempts if span.row == row]
        for earlier, later in pairwise(spans):
            assert earlier.finished_s is not None
            assert earlier.finished_s <= later.started_s


def test_deaths_and_restarts_appear_at_their_times(broken: Timeline) -> None:
    """The worker's state at the job's start comes first."""
    (death,) = broken.incidents
    assert (death.worker, death.incarnation, death.reason) == ("m-0", 1, "engine_died")
    assert death.exit is not None
    assert 0 < death.at_s < broken.until_s
    assert [(change.state, change.incarnation) for change in broken.states] == [
        ("ready", 1),
        ("backoff", 1),
        ("starting", 2),
        ("ready", 2),
    ]
    assert broken.states[0].at_s < 0 < broken.states[1].at_s


def test_a_running_turn_and_a_waiting_one_appear(service: Service) -> None:
    """A running attempt has no end yet."""
    job_id = service.post_job(debate(model="slow"))
    wait_for(lambda: len(timeline_of(service, job_id).attempts) == 2, "both participants run")
    wait_for(lambda: timeline_of(service, job_id).state == "running", "the job has begun")
    shown = timeline_of(service, job_id)
    assert {(span.agent, span.outcome, span.finished_s) for span in shown.attempts} == {
        ("a", "in_flight", None),
        ("b", "in_flight", None),
    }
    assert shown.waiting == []
    behind = service.post_job(debate(model="slow"))
    wait_for(lambda: len(timeline_of(service, behind).waiting) == 2, "two turns wait for a slot")
    told = timeline_of(service, behind)
    assert (told.attempts, all(0 <= since <= told.until_s for since in told.waiting)) == ([], True)
    service.http.post(f"/v1/jobs/{behind}/cancel").raise_for_status()
    service.http.post(f"/v1/jobs/{job_id}/cancel").raise_for_status()
    assert service.wait_ended(job_id)["state"] == "cancelled"
    assert timeline_of(service, behind).waiting == []
    assert {span.outcome for span in timeline_of(service, job_id).attempts} == {"cancelled"}


def test_an_unknown_job_has_no_timeline(service: Service) -> None:
    """The error comes before the answer begins."""
    answer = service.http.get("/v1/jobs/job-none/timeline")
    assert (answer.status_code, answer.json()["code"]) == (404, "job_not_found")
    assert run_command("timeline", "job-none", "--url", service.url).returncode == 3


def test_the_command_prints_a_chart(service: Service, broken: Timeline) -> None:
    """Into a pipe: plain lines, with the timeline's contents."""
    done = run_command("timeline", broken.id, "--url", service.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == list(map(str, chart(broken, 120)))
    assert "\x1b" not in done.stdout
    document: Document = json.loads(run_command("timeline", broken.id, "--url", service.url, "--json").stdout)
    assert len(document["attempts"]) == len(broken.attempts)


@pytest.mark.system
def test_the_command_writes_a_trace_and_a_page(service: Service, broken: Timeline, tmp_path: Path) -> None:
    """By the file's extension; another one is refused before any request."""
    trace, page = tmp_path / "job.json", tmp_path / "job.html"
    for file in (trace, page):
        done = run_command("timeline", broken.id, "--url", service.url, "-o", str(file))
        assert done.stdout == f"{file}: {len(broken.attempts)} attempts\n", done.stderr
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(broken.attempts)
    assert "drawTimeline" in page.read_text()
    refused = run_command("timeline", broken.id, "--url", service.url, "-o", str(tmp_path / "job.png"))
    assert (refused.returncode, "--format" in refused.stderr) == (2, True)
    assert not (tmp_path / "job.png").exists()


def test_last_words_appear_while_they_are_spoken(service: Service) -> None:
    """For turns in flight, the last started first, within the requested length."""
    job_id = service.post_job(debate(model="slow", name="talks"))
    wait_for(lambda: len(service.get("/v1/speaking")["turns"]) == 2, "both speak")
    wait_for(lambda: all(turn["words"] for turn in service.get("/v1/speaking")["turns"]), "they have said something")
    (turn,) = service.get("/v1/speaking?limit=1&chars=5")["turns"]
    assert (turn["job"], turn["name"], turn["conversation"], turn["round"]) == (job_id, "talks", "q0", 0)
    assert len(turn["words"]) == 5
    assert service.get("/v1/speaking?limit=1")["is_cut"] is True
    assert service.http.get("/v1/speaking?limit=0").status_code == 400
    shown = run_command("top", "--once", "--words", "--url", service.url).stdout
    assert "talks/q0 r0 a on slow-0: " in shown
    service.http.post(f"/v1/jobs/{job_id}/cancel").raise_for_status()


def test_only_a_key_that_may_read_a_job_sees_its_timeline_and_words(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """For another key the job does not exist."""
    names = ("one", "two")
    keys = [{"name": name, "key": f"key-of-{name}-{'x' * 20}", "scopes": ["read", "submit"]} for name in names]
    models = {"m": scripted_model(free_ports(1), tokens=100_000, interval=0.01)}
    server: Document = {"drain_s": 0.2, "keys": keys, "api_keys": ["all-of-them-xxxxxxxxxxxxxxxx"]}
    with serving(tmp_path, free_ports(1), models, server) as running:

        def ask(key: Document, path: str, job: Document | None = None) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key['key']}"}
            method = "GET" if job is None else "POST"
            return running.http.request(method, path, headers=headers, json=job)

        job_id = ask(keys[0], "/v1/jobs", debate()).json()["id"]
        wait_for(lambda: ask(keys[0], "/v1/speaking").json()["turns"], "it speaks")
        assert ask(keys[0], f"/v1/jobs/{job_id}/timeline").status_code == 200
        assert ask(keys[1], f"/v1/jobs/{job_id}/timeline").status_code == 404
        assert ask(keys[1], "/v1/speaking").json() == {"turns": [], "is_cut": False}
