"""The trace file of a real job in which engines were killed, checked against the Trace Event Format."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.service import Document, Service, debate, run_command, scripted_model, serving
from tests.harness.trace_format import trace_faults
from tests.harness.waiting import wait_for

KILLS = 3


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[dict[str, Any]]:
    """The file of the job while it runs and after its end, and the service's own timeline."""
    folder = tmp_path_factory.mktemp("trace")
    models = {"m": scripted_model(free_ports(2), replicas=2, slots=2, tokens=20, interval=0.02)}
    with serving(folder, free_ports(1), models) as service:
        job_id = service.post_job(debate(conversations=6, rounds=3, name='a "name" of </script> — ∞'))
        for _ in range(KILLS):
            kill_one(service)
        running = written(service, job_id, folder / "running.json")
        assert service.wait_ended(job_id)["state"] == "completed"
        ended = written(service, job_id, folder / "ended.json")
        yield {"running": running, "ended": ended, "timeline": service.get(f"/v1/jobs/{job_id}/timeline")}


def kill_one(service: Service) -> None:
    """Kill an engine with turns on it, and wait until the next one speaks."""
    path = "/v1/workers/m-0"
    wait_for(lambda: service.get(path)["requests"], "turns are on it")
    before: Document = service.get(path)
    os.kill(before["pid"], signal.SIGKILL)
    wait_for(lambda: service.get(path)["incarnation"] > before["incarnation"], "another engine follows")


def written(service: Service, job_id: str, file: Path) -> str:
    done = run_command("timeline", job_id, "--url", service.url, "-o", str(file))
    assert done.returncode == 0, done.stderr
    return file.read_text()


def events_of(text: str, phase: str) -> list[Document]:
    events: list[Document] = json.loads(text)["traceEvents"]
    return [event for event in events if event["ph"] == phase]


@pytest.mark.parametrize("moment", ["running", "ended"])
def test_perfetto_would_drop_nothing_of_it(told: dict[str, Any], moment: str) -> None:
    """Every event has the fields of its phase, every thread a name, and no two events of a thread cross."""
    assert trace_faults(told[moment]) == []


def test_every_attempt_and_every_kill_is_in_it(told: dict[str, Any]) -> None:
    """At the microsecond and on the row that the service gives; attempts that were killed appear as failed."""
    timeline = told["timeline"]
    pids = {
        event["args"]["name"].partition(" ")[0]: event["pid"]
        for event in events_of(told["ended"], "M") if event["name"] == "process_name"
    }  # fmt: skip
    expected = [
        (
            pids[each["worker"]], each.get("row", 0) + 1,
            round(each["started_s"] * 1e6), round(each["finished_s"] * 1e6),
            each["conversation"], each["agent"], each["round"], each["number"], each["outcome"],
        )
        for each in timeline["attempts"]
    ]  # fmt: skip
    complete = events_of(told["ended"], "X")
    assert sorted(expected) == sorted(
        (
            each["pid"], each["tid"], each["ts"], each["ts"] + each["dur"],
            *(each["args"][name] for name in ("conversation", "agent", "round", "attempt", "outcome")),
        )
        for each in complete
    )  # fmt: skip
    assert {each["cat"] for each in complete} == {"completed", "failed"}
    assert sum(each["cat"] == "completed" for each in complete) == 6 * 3 * 3
    deaths = [each for each in events_of(told["ended"], "i") if each["name"].startswith("incident: ")]
    assert [each["args"]["exit"] for each in deaths] == ["killed by SIGKILL"] * KILLS
    assert {each["pid"] for each in deaths} == {pids["m-0"]}
    counts = [each["args"]["waiting"] for each in events_of(told["ended"], "C")]
    assert counts[-1] == 0
    assert max(counts) > 2
