"""A spare takes the place of an engine that breaks, and the broken one is the spare when it is back."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_continued_answers import job
from tests.harness.reloads import models_of, reload
from tests.harness.service import Document, Service, scripted_model, serving
from tests.harness.upgrades import upgrade
from tests.harness.waiting import is_alive, wait_for

Ports = Callable[[int], int]
TOKENS = 40
ANSWER = " ".join(f"word{number}" for number in range(TOKENS))


def model(port: int, **flags: object) -> Document:
    args = {"goes_on": "kept", "tokens": TOKENS, "interval": 0.05, **flags}
    return {**scripted_model(port), "args": args, "spares": 1}


def workers(service: Service) -> dict[str, Document]:
    return {each["id"]: each for each in service.get("/v1/workers")["workers"]}


def is_spare(worker: Document) -> bool:
    return worker["state"] == "draining" and "spare" in worker["because"]


def roles(service: Service) -> tuple[set[str], set[str]]:
    """Return the workers that take turns and the spares with a ready engine."""
    found = workers(service)
    ready = {name for name, each in found.items() if each["state"] == "ready"}
    return ready, {name for name, each in found.items() if is_spare(each)}


def wait_roles(service: Service, ready: str, spare: str) -> None:
    wait_for(lambda: roles(service) == ({ready}, {spare}), f"{ready} takes turns, {spare} is the spare")


def begun(service: Service) -> str:
    """Post a job; return its id once its answer is being written."""
    job_id = service.post_job(job())

    def is_begun() -> bool:
        requests = [each for worker in workers(service).values() for each in worker["requests"]]
        return any(each["evidence"]["output_tokens"] >= 3 for each in requests)

    wait_for(is_begun, "an answer is being written")
    return job_id


def asked(service: Service, path: str) -> None:
    answer = service.http.post(path)
    assert answer.is_success, answer.text


def check_went_on(service: Service, job_id: str, worker: str) -> Document:
    assert service.wait_ended(job_id)["state"] == "completed"
    turn: dict[str, Any]
    (turn,) = service.get(f"/v1/jobs/{job_id}/conversations/c")["turns"]
    assert turn["text"] == ANSWER
    (place,) = turn["continued"]
    assert place["worker"] == worker
    return turn


@pytest.mark.system
def test_a_spare_takes_the_place_of_a_killed_engine(tmp_path: Path, free_ports: Ports) -> None:
    """The answer goes on there at once, while the other engine loads for long; then the roles change back."""
    with serving(tmp_path, free_ports(2), {"m": model(free_ports(2), load=1.5)}) as service:
        wait_roles(service, "m-0", "m-1")
        metrics = service.http.get("/metrics").text
        assert 'roundhouse_worker_slots{model="m",worker="m-0"} 2.0' in metrics
        assert 'roundhouse_worker_slots{model="m",worker="m-1"} 0.0' in metrics
        assert 'roundhouse_worker_start_seconds_count{model="m"} 2.0' in metrics, "a spare's start ends as it waits"
        for dies, goes_on in (("m-0", "m-1"), ("m-1", "m-0")):
            job_id = begun(service)
            assert workers(service)[goes_on]["requests"] == []
            os.kill(workers(service)[dies]["pid"], signal.SIGKILL)
            turn = check_went_on(service, job_id, goes_on)
            assert [each["outcome"] for each in turn["attempts"]] == ["failed", "completed"]
            wait_roles(service, goes_on, dies)


@pytest.mark.system
def test_a_spare_that_dies_is_replaced(tmp_path: Path, free_ports: Ports) -> None:
    """Its engine is watched like any other."""
    with serving(tmp_path, free_ports(2), {"m": model(free_ports(2))}) as service:
        wait_roles(service, "m-0", "m-1")
        first = workers(service)["m-1"]
        os.kill(first["pid"], signal.SIGKILL)
        wait_for(lambda: workers(service)["m-1"]["incarnation"] > first["incarnation"], "another engine is the spare")
        wait_roles(service, "m-0", "m-1")


@pytest.mark.system
def test_a_spare_is_handed_over_by_an_upgrade(tmp_path: Path, free_ports: Ports) -> None:
    """So is the role that it has at the time."""
    with serving(tmp_path, free_ports(2), {"m": model(free_ports(2))}) as service:
        wait_roles(service, "m-0", "m-1")
        os.kill(workers(service)["m-0"]["pid"], signal.SIGKILL)
        wait_roles(service, "m-1", "m-0")
        engines = {name: each["pid"] for name, each in workers(service).items()}
        upgrade(service)
        wait_roles(service, "m-1", "m-0")
        assert {name: each["pid"] for name, each in workers(service).items()} == engines
        assert all(map(is_alive, engines.values()))


@pytest.mark.system
def test_a_spare_follows_an_operator(tmp_path: Path, free_ports: Ports) -> None:
    """It takes the place of a drained worker, ends with an unloaded model, comes and goes with the configuration."""
    port = free_ports(2)
    with serving(tmp_path, free_ports(1), {"m": model(port)}) as service:
        wait_roles(service, "m-0", "m-1")
        asked(service, "/v1/workers/m-0/drain")
        wait_roles(service, "m-1", "m-0")
        asked(service, "/v1/workers/m-0/resume")
        asked(service, "/v1/models/m/unload")
        wait_for(lambda: {each["state"] for each in workers(service).values()} == {"stopped"}, "both have ended")
        asked(service, "/v1/models/m/load")
        wait_roles(service, "m-1", "m-0")
        assert reload(service, lambda all_: models_of(all_)["m"].update(spares=0)) == {"resized": ["m"]}
        wait_for(lambda: roles(service) == ({"m-1"}, set()) and len(workers(service)) == 1, "the spare leaves")
        assert reload(service, lambda all_: models_of(all_)["m"].update(spares=1)) == {"resized": ["m"]}
        wait_roles(service, "m-1", "m-0")
        reload(service, lambda all_: models_of(all_)["m"].update(spares=0, replicas=2))
        wait_for(lambda: roles(service) == ({"m-0", "m-1"}, set()), "the spare is a replica")
        reload(service, lambda all_: models_of(all_)["m"].update(spares=1, replicas=1))
        wait_for(lambda: [len(each) for each in roles(service)] == [1, 1], "one of them is a spare again")
        before = {each["pid"] for each in workers(service).values()}
        reload(service, lambda all_: models_of(all_)["m"].update(slots=3))
        served: list[bool] = []

        def is_replaced() -> bool:
            found = list(workers(service).values())
            served.append(any(each["state"] == "ready" for each in found))
            engines = {each["pid"] for each in found}
            return len(found) == 2 and None not in engines and not before & engines

        wait_for(is_replaced, "both have other settings")
        wait_for(lambda: [len(each) for each in roles(service)] == [1, 1], "one of them is a spare again")
        assert all(served), "one of them took turns at any time"


@pytest.mark.system
def test_memory_decides_about_an_automatic_spare(tmp_path: Path, free_ports: Ports) -> None:
    """Weights that llama.cpp maps are shared; a program that maps none gets no spare, and its worker says why."""
    own = {"engine": "embedded", "port": free_ports(2), "context": 512, "slots": 1, "spares": "auto"}
    models = {"own": own, "other": {**scripted_model(free_ports(2)), "spares": "auto"}}
    with serving(tmp_path, free_ports(1), models) as service:
        wait_for(lambda: is_spare(workers(service)["own-1"]), "the model with mapped weights has a spare")
        wait_for(lambda: "shared with another" in workers(service)["other-1"]["because"], "the other has none")
        assert workers(service)["other-1"]["state"] == "stopped"
        assert not service.get("/v1/status")["configuration"]["under_way"]
