"""Models that a user unloads and loads: their engines end after their requests, and start on demand."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import yaml

from tests.harness.service import Document, Service, debate, scripted_model, serving
from tests.harness.upgrades import UPGRADE_LIMIT_S, upgrades_of
from tests.harness.waiting import wait_for

Ports = Callable[[int], int]


@pytest.fixture
def service(tmp_path: Path, free_ports: Ports) -> Iterator[Service]:
    models = {
        "m": {**scripted_model(free_ports(2), slots=1, interval=0.1), "replicas": 2},
        "other": scripted_model(free_ports(1)),
    }
    with serving(tmp_path, free_ports(1), models) as running:
        yield running


def ask(service: Service, model: str, verb: str) -> tuple[int, Document]:
    answer = service.http.post(f"/v1/models/{model}/{verb}")
    return answer.status_code, answer.json()


def workers_of(service: Service, model: str) -> list[Document]:
    workers: list[Document] = service.get("/v1/workers")["workers"]
    return [worker for worker in workers if worker["model"] == model]


def are(service: Service, model: str, state: str) -> bool:
    return {worker["state"] for worker in workers_of(service, model)} == {state}


def has_engine(service: Service, worker: str) -> bool:
    return service.get(f"/v1/workers/{worker}")["pid"] is not None


def test_a_model_is_unloaded_after_its_requests_and_waits_to_be_loaded(service: Service) -> None:
    """Requests in flight end well; later ones wait, and show the reason."""
    pids = [worker["pid"] for worker in workers_of(service, "m")]
    first = service.post_job(debate(conversations=2))
    wait_for(lambda: service.get("/v1/status")["pools"]["in_flight"] == 2, "both are in flight")
    status, told = ask(service, "m", "unload")
    assert (status, {worker["state"] for worker in told["workers"]}) == (202, {"draining"})
    wait_for(lambda: are(service, "m", "stopped"), "its engines have ended")
    assert not any(map(psutil.pid_exists, pids))
    assert {worker["because"] for worker in workers_of(service, "m")} == {"unloaded by an operator"}
    (head, *_) = service.get("/v1/status")["heads"]["ready"]
    assert "m-0 is stopped: unloaded by an operator" in head["waits_for"]
    assert are(service, "other", "ready")
    assert ask(service, "m", "load")[0] == 202
    assert service.wait_ended(first)["state"] == "completed"
    turns = service.get(f"/v1/jobs/{first}/conversations/q0")["turns"]
    assert all(len(turn["attempts"]) == 1 for turn in turns)


def test_a_load_in_the_meantime_keeps_the_engine(service: Service) -> None:
    """The last command counts, whatever was in flight between the two."""
    pids = [worker["pid"] for worker in workers_of(service, "m")]
    job_id = service.post_job(debate(conversations=2))
    wait_for(lambda: service.get("/v1/status")["pools"]["in_flight"] == 2, "both are in flight")
    for verb in ("unload", "load", "unload", "load"):
        assert ask(service, "m", verb)[0] == 202
    assert service.wait_ended(job_id)["state"] == "completed"
    assert [worker["pid"] for worker in workers_of(service, "m")] == pids
    assert are(service, "m", "ready")


@pytest.mark.system
@pytest.mark.parametrize("verb", ["load", "resume", "restart"])
def test_a_load_while_the_engine_ends_starts_another(tmp_path: Path, free_ports: Ports, verb: str) -> None:
    """The last command counts, at whatever moment it arrives."""
    model = {**scripted_model(free_ports(1), ignore_sigterm=True), "timeouts": {"stop_grace_s": 1}}
    with serving(tmp_path, free_ports(1), {"m": model}) as running:
        ask(running, "m", "unload")
        wait_for(lambda: are(running, "m", "stopping"), "its engine is ending")
        path = "/v1/models/m/load" if verb == "load" else f"/v1/workers/m-0/{verb}"
        assert running.http.post(path).status_code == 202
        wait_for(lambda: are(running, "m", "ready"), "another engine is there")
        assert workers_of(running, "m")[0]["incarnation"] == 2


@pytest.mark.system
def test_a_load_while_an_unloaded_worker_leaves_counts_for_the_next(service: Service, tmp_path: Path) -> None:
    """A turn runs, the model is unloaded, its settings change, and it is loaded: no state of a drain remains."""
    job_id = service.post_job(debate(conversations=2))
    wait_for(lambda: service.get("/v1/status")["pools"]["in_flight"] == 2, "both are in flight")
    ask(service, "m", "unload")
    file = tmp_path / "roundhouse.yaml"
    config = yaml.safe_load(file.read_text())
    config["models"]["m"]["env"] = {"OTHER": "1"}
    file.write_text(yaml.safe_dump(config))
    service.http.post("/v1/config/reload").raise_for_status()
    assert ask(service, "m", "load")[0] == 202
    assert service.wait_ended(job_id)["state"] == "completed"
    wait_for(lambda: not service.get("/v1/status")["configuration"]["under_way"], "both are replaced")
    assert are(service, "m", "ready")


@pytest.mark.system
def test_a_model_that_returns_to_the_configuration_is_loaded(service: Service, tmp_path: Path) -> None:
    """The unloaded model was another one of the same name."""
    ask(service, "m", "unload")
    wait_for(lambda: are(service, "m", "stopped"), "its engines have ended")
    file = tmp_path / "roundhouse.yaml"
    whole = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**whole, "models": {"other": whole["models"]["other"]}}))
    service.http.post("/v1/config/reload").raise_for_status()
    wait_for(lambda: not workers_of(service, "m"), "its workers have left")
    file.write_text(yaml.safe_dump(whole))
    service.http.post("/v1/config/reload").raise_for_status()
    wait_for(lambda: bool(workers_of(service, "m")) and are(service, "m", "ready"), "they are back, and loaded")


@pytest.mark.system
def test_replicas_added_beside_unloaded_ones_are_unloaded_too(service: Service, tmp_path: Path) -> None:
    """The model is unloaded, not its workers; loading it loads all of them, and each shows the reason."""
    ask(service, "m", "unload")
    wait_for(lambda: are(service, "m", "stopped"), "its engines have ended")
    file = tmp_path / "roundhouse.yaml"
    config = yaml.safe_load(file.read_text())
    config["models"]["m"]["replicas"] = 1
    file.write_text(yaml.safe_dump(config))
    service.http.post("/v1/config/reload").raise_for_status()
    wait_for(lambda: len(workers_of(service, "m")) == 1, "one has left")
    config["models"]["m"]["replicas"] = 2
    file.write_text(yaml.safe_dump(config))
    service.http.post("/v1/config/reload").raise_for_status()
    wait_for(lambda: len(workers_of(service, "m")) == 2, "it is back")
    assert are(service, "m", "stopped")
    assert all("unloaded by an operator" in worker["because"] for worker in workers_of(service, "m"))
    job_id = service.post_job(debate())
    assert service.get(f"/v1/jobs/{job_id}")["waits_for"] == ["model m was unloaded by an operator"]
    ask(service, "m", "load")
    wait_for(lambda: are(service, "m", "ready"), "both are loaded")
    assert service.wait_ended(job_id)["state"] == "completed"


@pytest.mark.system
def test_a_worker_whose_model_has_a_slash_is_found(tmp_path: Path, free_ports: Ports) -> None:
    """A hub's models have slashes in their names."""
    with serving(tmp_path, free_ports(1), {"org/na-me": scripted_model(free_ports(1))}) as running:
        for path in ("", "/logs", "/incidents"):
            assert running.http.get(f"/v1/workers/org/na-me-0{path}").status_code == 200
        assert ask(running, "org/na-me", "unload")[0] == 202
        wait_for(lambda: are(running, "org/na-me", "stopped"), "its engine has ended")
        assert running.http.post("/v1/workers/org/na-me-0/resume").status_code == 202
        wait_for(lambda: are(running, "org/na-me", "ready"), "it is loaded")


@pytest.mark.system
def test_an_unloaded_model_stays_so_over_a_reload(service: Service, tmp_path: Path) -> None:
    """A change of settings does not start it, and does not touch other models."""
    ask(service, "m", "unload")
    wait_for(lambda: are(service, "m", "stopped"), "its engines have ended")
    file = tmp_path / "roundhouse.yaml"
    config = yaml.safe_load(file.read_text())
    config["models"]["m"]["env"] = {"OTHER": "1"}
    file.write_text(yaml.safe_dump(config))
    assert service.http.post("/v1/config/reload").json()["restarted"] == ["m"]
    wait_for(lambda: not service.get("/v1/status")["configuration"]["under_way"], "both are replaced")
    assert are(service, "m", "stopped")
    assert {worker["incarnation"] for worker in workers_of(service, "m")} == {0}
    ask(service, "m", "load")
    wait_for(lambda: are(service, "m", "ready"), "they are back")


@pytest.mark.system
def test_an_unloaded_model_stays_so_over_an_upgrade(service: Service) -> None:
    """The next program keeps the operator's command."""
    ask(service, "m", "unload")
    wait_for(lambda: are(service, "m", "stopped"), "its engines have ended")
    before = upgrades_of(service)["upgrades"]
    assert service.http.post("/v1/upgrade", timeout=UPGRADE_LIMIT_S).status_code == 202
    wait_for(lambda: upgrades_of(service)["upgrades"] == before + 1, "the next program serves", UPGRADE_LIMIT_S)
    wait_for(lambda: are(service, "other", "ready"), "the other model is there")
    assert are(service, "m", "stopped")
    ask(service, "m", "load")
    wait_for(lambda: are(service, "m", "ready"), "they are back")


@pytest.mark.system
def test_resuming_or_restarting_a_worker_loads_its_model(service: Service) -> None:
    """The operator asks for it in another way."""
    ask(service, "m", "unload")
    wait_for(lambda: are(service, "m", "stopped"), "its engines have ended")
    for worker, verb in (("m-0", "resume"), ("m-1", "restart")):
        service.http.post(f"/v1/workers/{worker}/{verb}").raise_for_status()
        wait_for(partial(has_engine, service, worker), "it has an engine")
    wait_for(lambda: are(service, "m", "ready"), "both are back")


@pytest.mark.system
def test_models_that_cannot_be_unloaded_are_refused(tmp_path: Path, free_ports: Ports, service: Service) -> None:
    """These are an unknown name, and an attached server."""
    assert ask(service, "gone", "unload")[1]["code"] == "model_not_found"
    attached = {
        "engine": "attached",
        "url": f"http://127.0.0.1:{workers_of(service, 'other')[0]['port']}",
        "model": "x",
    }
    with serving(tmp_path / "second", free_ports(1), {"far": attached}) as second:
        for verb in ("load", "unload"):
            status, problem = ask(second, "far", verb)
            assert (status, problem["code"]) == (409, "not_our_engine")


@pytest.mark.system
def test_a_model_on_lanes_is_loaded_and_unloaded(tmp_path: Path, free_ports: Ports) -> None:
    """It is loaded before any turn needs it; after an unload the next turn that needs it loads it again."""
    models = {name: {**scripted_model(1, slots=1), "placement": "lanes"} for name in ("a", "b")}
    for model in models.values():
        del model["port"]
    port = free_ports(1)
    lanes = {"max_agents_per_gpu": 1, "ports": [port, port]}
    with serving(tmp_path, free_ports(1), models, gpus=lanes, ready=False) as service:

        def is_ready(model: str) -> bool:
            (lane,) = service.get("/v1/lanes")["lanes"]
            return (lane["phase"], lane["resident"]) == ("ready", [model])

        for name in ("a", "b", "a"):
            assert ask(service, name, "load")[0] == 202
            wait_for(partial(is_ready, name), "it is loaded")
        assert service.get("/v1/lanes")["lanes"][0]["because"] == "the engine answers"
        assert "loading a in place of b: an operator asked to load it" in service.log()
        for _ in range(5):  # in any state of its engine
            ask(service, "a", "unload")
            assert ask(service, "a", "load")[0] == 202
            wait_for(partial(is_ready, "a"), "the last word counts")
        ask(service, "a", "unload")
        wait_for(lambda: service.get("/v1/lanes")["lanes"][0]["phase"] == "empty", "its lane is free")
        job_id = service.post_job(debate(model="a"))
        assert service.wait_ended(job_id)["state"] == "completed"


def test_a_pinned_model_is_not_unloaded(tmp_path: Path, free_ports: Ports) -> None:
    """It would be loaded again at once."""
    model = {**scripted_model(1, slots=1), "placement": "lanes", "pin": True}
    del model["port"]
    port = free_ports(1)
    lanes = {"max_agents_per_gpu": 1, "ports": [port, port]}
    with serving(tmp_path, free_ports(1), {"a": model}, gpus=lanes, ready=False) as service:
        status, problem = ask(service, "a", "unload")
        assert (status, problem["code"]) == (409, "model_pinned")
