"""Ends of one moment are handled in one order, whichever report came first."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.harness.service import scripted_model, serving
from tests.harness.waiting import wait_for

TALKS = ("d", "b", "e", "a", "c")  # as they are posted, and start


def test_ends_of_one_moment_are_recorded_by_name(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Job, conversation, agent: a cancel ends all attempts at once (document 004, "Scheduling")."""
    model = scripted_model(free_ports(1), slots=len(TALKS), tokens=10_000, interval=0.01)
    job = {
        "name": "many",
        "rounds": 1,
        "agents": [{"id": "speaker", "model": "scripted"}],
        "conversations": [{"id": name, "prompt": name} for name in TALKS],
    }
    with serving(tmp_path, free_ports(1), {"scripted": model}) as service:
        job_id = service.post_job(job)
        wait_for(
            lambda: service.get(f"/v1/jobs/{job_id}")["progress"]["turns"]["in_flight"] == len(TALKS),
            "all are on slots",
        )
        assert service.http.post(f"/v1/jobs/{job_id}/cancel").status_code == 202
        service.wait_ended(job_id)
        stream = service.http.get(f"/v1/jobs/{job_id}/events").text
    told = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: ")]
    ends = [each["conversation"] for each in told if "agent" in each and each["state"] == "cancelled"]
    assert ends == sorted(TALKS)
