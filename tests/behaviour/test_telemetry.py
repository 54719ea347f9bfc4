"""Metrics of a service while engines die, and a log whose lines name their subject."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.documents.pages import REFERENCE, rows
from tests.harness.service import Service, debate, scripted_model, serving
from tests.harness.waiting import wait_for

KEY, WRONG_KEY = "key-that-is-right", "key-that-is-wrong"


@pytest.fixture(scope="module")
def service(free_ports: Callable[[int], int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service whose engine died once of a prompt; the turn ran again, and a client's request has run too."""
    folder, port = tmp_path_factory.mktemp("service"), free_ports(2)
    flags: dict[str, Any] = {"die-on": "TOPIC-0", "die-once": str(folder / "died")}
    model = scripted_model(port + 1, slots=1, **flags)
    server = {"api_keys": [KEY], "log": "json"}
    with serving(folder, port, {"m": model}, server) as running:
        running.job = running.post_job(debate())  # type: ignore[attr-defined]
        assert running.wait_ended(running.job)["state"] == "completed"  # type: ignore[attr-defined]
        chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        assert running.http.post("/v1/chat/completions", json=chat).status_code == 200
        refused = running.http.get("/v1/jobs", headers={"Authorization": f"Bearer {WRONG_KEY}"})
        assert refused.status_code == 401
        yield running


def value(service: Service, name: str, **labels: str) -> float | None:
    """Return the sum of the samples of a name that have these labels; None where none has."""
    text = service.http.get("/metrics").text
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    found = [
        each.value for each in samples if each.name == f"roundhouse_{name}" and labels.items() <= each.labels.items()
    ]
    return sum(found) if found else None


def lines(service: Service) -> list[dict[str, Any]]:
    return [json.loads(line) for line in service.log().splitlines()]


def test_an_engine_that_died_shows_with_its_reason(service: Service) -> None:
    """An incident, a restart, an attempt with its wasted tokens; and completed turns."""
    died = {"model": "m", "reason": "engine_died"}
    assert value(service, "incidents_total", worker="m-0", **died) == 1
    assert value(service, "worker_restarts_total", worker="m-0", **died) == 1
    assert value(service, "attempts_total", source="job", outcome="failed", **died) == 1
    assert value(service, "attempts_total", source="job", outcome="completed") == 3
    assert value(service, "turns_total", source="job", outcome="completed") == 3
    assert value(service, "queue_wait_seconds_count", source="job") == 4
    assert value(service, "worker_start_seconds_count", model="m") == 2
    assert value(service, "worker_state", state="ready") == 1


def test_requests_are_counted_by_the_template_of_their_route(service: Service) -> None:
    """Refused requests count too; all unknown paths share one label."""
    for number in range(20):
        service.http.get(f"/nowhere/{number}")
        service.http.get(f"/v1/jobs/none-{number}")
    assert value(service, "http_requests_total", route="other", method="GET", code="404") == 20
    assert value(service, "http_requests_total", route="/v1/jobs/{job_id}", code="404") == 20
    assert (value(service, "http_requests_total", code="401") or 0) >= 1
    assert value(service, "http_request_seconds_count", route="/v1/chat/completions", method="POST") == 1


def test_the_demand_metric_serves_an_autoscaler(service: Service) -> None:
    """An idle service needs no slots; its store and its engine are sampled beside the scrapes."""
    assert value(service, "slots_wanted", model="m") == 0
    assert value(service, "oldest_ready_turn_seconds") == 0
    wait_for(lambda: value(service, "jobs", state="completed") == 1, "jobs were counted")
    assert value(service, "stored_conversations", state="completed") == 1
    assert (value(service, "engine_memory_bytes", worker="m-0") or 0) > 1e6


def test_labels_are_those_of_the_page(service: Service) -> None:
    """For every metric of ours that has samples."""
    page = (REFERENCE / "metrics.md").read_text(encoding="utf-8").split("## Labels")[0]
    labels = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[2])) for row in rows(page)}
    checked = set()
    for family in text_string_to_metric_families(service.http.get("/metrics").text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        for sample in family.samples:
            if not name.endswith("_created") and not sample.name.endswith("_created"):
                assert set(sample.labels) - {"le"} == labels[name], name
                checked.add(name)
    assert len(checked) > 30


def test_every_line_of_the_log_is_json_and_names_its_subject(service: Service) -> None:
    """A line about a worker names it, and one about a turn names the turn and its job.

    Only this test reads the messages.
    """
    kinds = {"worker": 0, "turn": 0}
    for line in lines(service):
        assert {"time", "level", "logger", "message"} <= line.keys()
        if match := re.match(r"worker (m-0)", line["message"]):
            kinds["worker"] += 1
            assert (line["worker"], type(line["incarnation"])) == (match[1], int), line
        if line["message"].startswith("turn "):
            kinds["turn"] += 1
            place = {key: line[key] for key in ("job", "conversation", "agent", "round", "worker", "incarnation")}
            assert place == {
                "job": service.job,  # type: ignore[attr-defined]
                "conversation": "q0",
                "agent": place["agent"],
                "round": 0,
                "worker": "m-0",
                "incarnation": 1,
            }
            assert f"agent_id='{place['agent']}'" in line["message"]
    assert kinds["worker"] >= 5
    assert kinds["turn"] == 1


def test_the_log_holds_no_key(service: Service) -> None:
    """Neither a valid one nor one that was tried."""
    assert KEY not in service.log()
    assert WRONG_KEY not in service.log()


@pytest.mark.system
def test_demanded_slots_are_turns_that_could_run(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """One runs and two are ready; the moderators that wait for them need none yet."""
    port = free_ports(2)
    with serving(tmp_path, port, {"m": scripted_model(port + 1, slots=1, tokens=10_000, interval=0.1)}) as service:
        agents = [{"id": "a", "model": "m"}, {"id": "b", "model": "m", "speak_after_within_round": ["a"]}]
        job = {"rounds": 1, "agents": agents, "conversations": [{"prompt": "Go."}] * 3}
        service.post_job(job)
        wait_for(lambda: value(service, "turns", pool="in_flight") == 1, "a turn has its slot")
        pools = {pool: value(service, "turns", model="m", pool=pool) for pool in ("pending", "ready", "in_flight")}
        assert pools == {"pending": 3, "ready": 2, "in_flight": 1}
        assert value(service, "slots_wanted", model="m") == 3
        wait_for(lambda: (value(service, "oldest_ready_turn_seconds") or 0) > 0.1, "its wait is told")
