"""A full disk: new jobs are refused with the reason, running ones wait, and go on when there is room."""

import resource
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.harness.service import check_debate, debate, scripted_model, serving
from tests.harness.waiting import wait_for

TALKS = 12  # some three seconds of work, so that the disk is full before all is said
TURNS = TALKS * 9


def test_a_service_goes_on_when_its_full_disk_has_room_again(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """No file of the service may grow, as on a full disk; nothing is lost or done twice."""
    model = {"m": scripted_model(free_ports(1), tokens=5, interval=0.02)}
    with serving(tmp_path, free_ports(1), model) as service:
        assert service.process is not None
        process = psutil.Process(service.process.pid)
        job = service.post_job(debate(conversations=TALKS, rounds=3))
        wait_for(lambda: service.get(f"/v1/jobs/{job}")["progress"]["turns"]["completed"] >= 4, "it runs")
        process.rlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        try:
            wait_for(lambda: service.http.post("/v1/jobs", json=debate()).status_code == 503, "new jobs are refused")
            refused = service.http.post("/v1/jobs", json=debate())
            assert refused.json()["code"] == "store_unavailable"
            assert "disk" in refused.json()["detail"], refused.text
            assert int(refused.headers["retry-after"]) > 0
            wait_for(lambda: service.get("/v1/status")["pools"]["in_flight"] == 0, "nothing more is started")
            heads = service.get("/v1/status")["heads"]["ready"]
            assert all("the store, to be well again" in head["waits_for"] for head in heads)
            held = service.get(f"/v1/jobs/{job}")["progress"]["turns"]["completed"]
            assert held < TURNS
            assert service.http.get("/readyz").status_code == 503
        finally:
            process.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert service.wait_ended(job)["state"] == "completed"
        for talk in service.get(f"/v1/jobs/{job}/result")["conversations"]:
            check_debate(talk, 3)
            assert all(len(turn["attempts"]) == 1 for turn in talk["turns"])
        assert service.wait_ended(service.post_job(debate()))["state"] == "completed"


def test_a_service_stops_while_its_store_is_in_trouble(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """No stop waits for ever for a disk: unwritten turns run again after a restart."""
    model = {"m": scripted_model(free_ports(1), tokens=5, interval=0.02)}
    with serving(tmp_path, free_ports(1), model, {"drain_s": 0.5}) as service:
        assert service.process is not None
        job = service.post_job(debate(conversations=TALKS, rounds=3))
        wait_for(lambda: service.get(f"/v1/jobs/{job}")["progress"]["turns"]["completed"] >= 4, "it runs")
        process = psutil.Process(service.process.pid)
        process.rlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        wait_for(lambda: service.http.get("/readyz").status_code == 503, "the disk is full")
        service.stop()
        service.start()
        assert service.wait_ended(job)["state"] == "completed"
        for talk in service.get(f"/v1/jobs/{job}/result")["conversations"]:
            check_debate(talk, 3)
