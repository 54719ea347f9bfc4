"""Upgrades in place of the parts beside plain engines: clients' requests, lanes, a shared database."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.behaviour.test_lanes import lanes_at, lanes_of, placed, talk
from tests.behaviour.test_relay_queue import Caller
from tests.faults.test_relay import errors
from tests.harness.postgres import PostgresServer
from tests.harness.service import check_debate, debate, scripted_model, serving
from tests.harness.upgrades import engines_of, upgrade, upgrades_of
from tests.harness.waiting import LIMIT_S, is_alive, wait_for

Ports = Callable[[int], int]


@pytest.mark.system
def test_requests_of_clients_are_answered(tmp_path: Path, free_ports: Ports) -> None:
    """A client with a part that is not to go on gets the error event, a waiting one its answer."""
    port = free_ports(2)
    model = scripted_model(port + 1, slots=1, tokens=600, interval=0.01)
    with serving(tmp_path / "a", port, {"m": model}, {"drain_s": 0.2}) as service:
        talking = Caller(service, "Go.", stream=True, headers={"x-roundhouse-continue": "off"})
        wait_for(lambda: "word3" in talking.text, "some of it has come")
        waiting = Caller(service, "Me too.")
        wait_for(lambda: service.get("/v1/status")["pools"]["ready"] == 1, "the other one waits")
        upgrade(service)
        talking.join(LIMIT_S)
        waiting.join(LIMIT_S)
        assert len(errors(talking.text)) == 1
        assert "[DONE]" not in talking.text
        assert "word599 " in waiting.text
        wait_for(lambda: service.get("/v1/workers/m-0")["slots"]["in_use"] == 0, "its slot is free")


@pytest.mark.system
def test_a_lane_keeps_its_model(tmp_path: Path, free_ports: Ports) -> None:
    """Its next request needs no swap; other models are loaded on the lane as before."""
    models = {name: placed(interval=0.01) for name in "ab"}
    with serving(tmp_path / "s", free_ports(1), models, gpus=lanes_at(free_ports(1), 1)) as service:
        service.wait_ended(service.post_job(talk("a", rounds=1)))
        before = engines_of(service)
        now = upgrade(service)
        assert (now["last"]["kept"], now["last"]["ended"]) == (["lane-0"], {})
        wait_for(lambda: lanes_of(service)[0]["resident"] == ["a"], "the model is there")
        assert service.wait_ended(service.post_job(talk("a", rounds=1)))["state"] == "completed"
        assert engines_of(service) == before
        assert service.wait_ended(service.post_job(talk("b", rounds=1)))["state"] == "completed"
        assert lanes_of(service)[0]["resident"] == ["b"]


@pytest.mark.system
def test_a_node_of_a_shared_database_does_not_wait_for_its_lease(
    tmp_path: Path, free_ports: Ports, postgres: PostgresServer
) -> None:
    """It has released its claims, so the next program claims the work at once."""
    port = free_ports(2)
    store = {"url": postgres.new_database(), "lease_s": 600}
    model = scripted_model(port + 1, tokens=30, interval=0.02)
    with serving(tmp_path / "a", port, {"m": model}, {"drain_s": 0.1}, store=store) as service:
        before = engines_of(service)
        job = service.post_job(debate(rounds=3))
        wait_for(lambda: service.get(f"/v1/jobs/{job}")["progress"]["turns"]["completed"], "turns run")
        upgrade(service)
        assert service.wait_ended(job)["state"] == "completed"
        (transcript,) = service.get(f"/v1/jobs/{job}/result")["conversations"]
        check_debate(transcript, 3)
        assert engines_of(service) == before


@pytest.mark.system
def test_an_engine_that_does_not_answer_the_next_program_is_replaced(tmp_path: Path, free_ports: Ports) -> None:
    """It has hung since before the exec, and is given up in much less time than a start may take."""
    port = free_ports(2)
    with serving(tmp_path / "a", port, {"m": scripted_model(port + 1)}) as service:
        (before,) = engines_of(service)
        os.kill(before.pid, signal.SIGSTOP)
        assert service.http.post("/v1/upgrade", timeout=3 * LIMIT_S).status_code == 202
        wait_for(lambda: not is_alive(before.pid), "it is killed", 4 * LIMIT_S)
        wait_for(lambda: service.http.get("/readyz").status_code == 200, "the next one is ready", 2 * LIMIT_S)
        assert service.get("/v1/workers/m-0")["incarnation"] == 2
        assert "has not answered" in service.log()


@pytest.mark.system
def test_orphans_of_a_guardian_are_ended_by_the_next_program_too(tmp_path: Path, free_ports: Ports) -> None:
    """It is a subreaper as the first was, and knows the run's mark; a drained worker stays drained."""
    port, daemon = free_ports(3), tmp_path / "daemon"
    models = {"m": scripted_model(port + 1, daemon=str(daemon)), "n": scripted_model(port + 2)}
    with serving(tmp_path / "a", port, models) as service:
        service.http.post("/v1/workers/n-0/drain")
        before = {each.worker: each for each in engines_of(service)}
        wait_for(lambda: daemon.exists() and daemon.read_text(), "the daemon has forked")
        forked = int(daemon.read_text())
        assert service.http.post("/v1/upgrade", timeout=3 * LIMIT_S).status_code == 202
        wait_for(lambda: upgrades_of(service)["upgrades"] == 1, "the next program serves", 3 * LIMIT_S)
        wait_for(lambda: service.get("/v1/workers/m-0")["state"] == "ready", "it goes on with the engine")
        wait_for(lambda: service.get("/v1/workers/n-0")["state"] == "draining", "the other one is drained still")
        os.kill(psutil.Process(before["m-0"].pid).ppid(), signal.SIGKILL)
        wait_for(lambda: service.get("/v1/workers/m-0")["incarnation"] == 2, "the engine is replaced")
        assert not is_alive(before["m-0"].pid)
        assert not is_alive(forked)
        assert is_alive(before["n-0"].pid)


@pytest.mark.system
def test_an_engine_that_is_stopping_is_waited_for_and_then_refused_by_name(tmp_path: Path, free_ports: Ports) -> None:
    """Everything that was paused for the upgrade goes on: turns, requests, and the listener."""
    port = free_ports(3)
    slow = scripted_model(port + 1, ignore_sigterm=True) | {"timeouts": {"stop_grace_s": 600}}
    models = {"slow": slow, "m": scripted_model(port + 2, tokens=5)}
    with serving(tmp_path / "a", port, models, {"drain_s": 0.1}) as service:
        before = {each.worker: each for each in engines_of(service)}
        assert service.http.post("/v1/workers/slow-0/restart").status_code == 202
        assert service.http.post("/v1/upgrade", timeout=3 * LIMIT_S).status_code == 202
        job = service.post_job(debate(rounds=2))
        wait_for(lambda: upgrades_of(service)["phase"] == "idle", "it is given up", 3 * LIMIT_S)
        now = upgrades_of(service)
        assert (now["upgrades"], now["last"]["detail"]) == (0, "slow-0 is stopping its engine")
        assert service.wait_ended(job)["state"] == "completed"
        assert {each.worker: each for each in engines_of(service)}["m-0"] == before["m-0"]
        os.kill(before["slow-0"].pid, signal.SIGKILL)
        wait_for(lambda: service.get("/v1/workers/slow-0")["incarnation"] == 2, "it is replaced at last")
