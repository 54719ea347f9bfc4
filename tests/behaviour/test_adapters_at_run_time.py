"""LoRA adapters that are loaded and unloaded while the service runs, on the real embedded engine."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from roundhouse_client import TrainerClient, WeightsError
from tests.behaviour.test_adapters import job
from tests.engines.adapters import write_gguf_adapter
from tests.harness.service import Document, Service, serving
from tests.harness.waiting import wait_for

ADAPTERS = "/v1/models/tiny/adapters"


@pytest.fixture
def service(tmp_path: Path, tiny_model: Path, free_ports: Callable[[int], int]) -> Iterator[Service]:
    model = {
        "engine": "embedded",
        "model": str(tiny_model),
        "args": {"threads": 1},
        "adapters": {"clerk": str(write_gguf_adapter(tmp_path / "clerk.gguf", 9))},
        "max_adapters": 3,
        "port": free_ports(2),
        "replicas": 2,
        "slots": 2,
        "bios": {"enabled": False},
        "repetition": {"lines": None},
        "restart": {"initial_s": 0.1, "max_s": 0.2},
    }
    with serving(tmp_path, free_ports(1), {"tiny": model}) as running:
        yield running


def load(service: Service, name: str, path: Path) -> httpx.Response:
    return service.http.post(ADAPTERS, json={"name": name, "path": str(path)})


def say(service: Service, *models: str, rounds: int = 1) -> list[str]:
    job_id = service.post_job(job(*models, rounds=rounds))
    assert service.wait_ended(job_id)["state"] == "completed"
    turns: list[Document] = service.get(f"/v1/jobs/{job_id}/result")["conversations"][0]["turns"]
    return [turn["text"] for turn in turns]


def names(service: Service) -> dict[str, list[str]]:
    return {each["name"]: each["workers"] for each in service.get(ADAPTERS)["adapters"]}


@pytest.mark.system
def test_an_adapter_is_loaded_used_kept_and_unloaded(service: Service, tmp_path: Path) -> None:
    """Workers load it one after the other while a job runs.

    Its file may go away; a kill keeps it; no name means two things.
    """
    poet = write_gguf_adapter(tmp_path / "poet.gguf", 1)
    refused = service.http.post("/v1/jobs", json=job("poet-1"))
    assert refused.status_code == 422
    (base,), (clerk,) = say(service, "tiny"), say(service, "clerk")
    long = service.post_job({**job("tiny", "clerk", rounds=12), "conversations": [{"prompt": "Go on."}] * 20})
    wait_for(lambda: service.get(f"/v1/jobs/{long}")["progress"]["turns"]["completed"] >= 2, "some turns have ended")
    loaded = load(service, "poet-1", poet)
    assert loaded.status_code == 201, loaded.text
    assert (loaded.json()["workers"], loaded.json()["is_configured"]) == (["tiny-0", "tiny-1"], False)
    told = service.get(f"/v1/jobs/{long}")
    assert told["state"] == "running"
    (spoken,) = say(service, "poet-1")
    assert len({base, clerk, spoken}) == 3
    assert service.wait_ended(long)["state"] == "completed"
    turns = [turn for talk in service.get(f"/v1/jobs/{long}/result")["conversations"] for turn in talk["turns"]]
    assert (len(turns), sum(len(turn["attempts"]) for turn in turns)) == (480, 480)

    poet.unlink()
    service.kill()
    service.start()
    assert [say(service, name) for name in ("poet-1", "tiny", "clerk")] == [[spoken], [base], [clerk]]
    expected = {name: ["tiny-0", "tiny-1"] for name in ("clerk", "poet-1")}
    wait_for(lambda: names(service) == expected, "both workers have them again")

    busy = service.post_job(job("poet-1", rounds=40))
    in_use = service.http.delete(f"{ADAPTERS}/poet-1")
    assert (in_use.status_code, in_use.json()["code"]) == (409, "adapter_in_use")
    service.http.post(f"/v1/jobs/{busy}/cancel")
    service.wait_ended(busy)
    assert service.http.delete(f"{ADAPTERS}/poet-1").status_code == 204
    assert service.http.post("/v1/jobs", json=job("poet-1")).status_code == 422
    assert list(names(service)) == ["clerk"]
    assert service.http.delete(f"{ADAPTERS}/poet-1").json()["code"] == "adapter_not_found"

    other = write_gguf_adapter(tmp_path / "other.gguf", 2)
    assert load(service, "poet-1", other).json()["code"] == "name_taken"
    assert load(service, "poet-1", write_gguf_adapter(tmp_path / "again.gguf", 1)).status_code == 201
    assert load(service, "poet-1", tmp_path / "again.gguf").status_code == 200
    assert say(service, "poet-1") == [spoken]
    assert load(service, "poet-2", other).status_code == 201
    assert load(service, "poet-3", write_gguf_adapter(tmp_path / "third.gguf", 3)).json()["code"] == "adapters_full"
    with TrainerClient(service.url, "tiny") as client:  # a trainer's way
        client.unload_adapter("poet-2")
        assert list(names(service)) == ["clerk", "poet-1"]
        assert client.load_adapter("poet-2", str(other))["name"] == "poet-2"
        with pytest.raises(WeightsError, match="room for 3 adapters"):
            client.load_adapter("poet-3", str(tmp_path / "third.gguf"))
    shelf = tmp_path / "state" / "adapters" / "tiny"
    assert len(list(shelf.iterdir())) == 3  # two copies and the list


def test_a_file_that_is_no_adapter_changes_nothing(service: Service, tmp_path: Path, tiny_model: Path) -> None:
    """The service or the first engine refuses it: all workers go on, that engine's too."""
    (base,) = say(service, "tiny")
    wait_for(lambda: all(each["state"] == "ready" for each in service.get("/v1/workers")["workers"]), "both are ready")
    for name, path, code in (
        ("poet", tmp_path / "nowhere.gguf", "invalid_adapter"),
        ("poet", Path("poet.gguf"), "invalid_adapter"),
        ("poet", tiny_model, "invalid_adapter"),
        ("tiny", tmp_path / "clerk.gguf", "name_taken"),
        ("clerk", tmp_path / "clerk.gguf", "name_taken"),
        ("no name", tmp_path / "clerk.gguf", "invalid_adapter"),
    ):
        refused = load(service, name, path)
        assert refused.json().get("code") == code, (name, path, refused.text)
    assert service.http.post(ADAPTERS, json={"name": "poet"}).status_code == 422
    assert service.http.get("/v1/models/none/adapters").status_code == 404
    assert service.http.delete(f"{ADAPTERS}/clerk").json()["code"] == "adapter_not_found"
    before = [(worker["incarnation"], worker["state"]) for worker in service.get("/v1/workers")["workers"]]
    assert before == [(1, "ready"), (1, "ready")]

    refused = load(service, "poet", write_gguf_adapter(tmp_path / "strange.gguf", 1, architecture="qwen2"))
    assert (refused.status_code, refused.json()["code"]) == (502, "engine_refused"), refused.text
    assert "tiny-0 does not start with adapter poet" in refused.json()["detail"]
    assert service.get("/v1/workers/tiny-1")["incarnation"] == 1
    wait_for(lambda: service.http.get("/readyz").status_code == 200, "all workers are ready again")
    wait_for(lambda: service.get("/v1/workers/tiny-0")["state"] == "ready", "the first one is as well")
    assert say(service, "tiny") == [base]
    assert list(names(service)) == ["clerk"]
    assert [path.name for path in (tmp_path / "state" / "adapters" / "tiny").iterdir()] == []


@pytest.mark.system
def test_kills_in_the_middle_of_a_load_leave_all_or_nothing(service: Service, tmp_path: Path) -> None:
    """The service is killed at different moments: afterwards every worker serves the adapter, or none has it."""
    outcomes = set()
    for number in range(4):
        poet = write_gguf_adapter(tmp_path / f"poet-{number}.gguf", 20 + number)
        telling = threading.Thread(target=_load_or_fail, args=(service, f"poet-{number}", poet))
        telling.start()
        if number:
            wait_for(lambda at=number: _is_beyond(service, at), "the load is under way")  # type: ignore[misc]
        service.kill()
        telling.join()
        poet.unlink()
        service.start()
        known = names(service)
        outcomes.add(f"poet-{number}" in known)
        if f"poet-{number}" in known:
            wait_for(lambda at=number: len(names(service)[f"poet-{at}"]) == 2, "both workers have it")  # type: ignore[misc]
            assert say(service, f"poet-{number}")[0]
            assert service.http.delete(f"{ADAPTERS}/poet-{number}").status_code == 204
        else:
            assert service.http.post("/v1/jobs", json=job(f"poet-{number}")).status_code == 422
    assert outcomes == {True, False}
    index = json.loads((tmp_path / "state" / "adapters" / "tiny" / "adapters.json").read_text())
    assert index["adapters"] == []


def _load_or_fail(service: Service, name: str, path: Path) -> None:
    try:
        httpx.post(f"{service.url}{ADAPTERS}", json={"name": name, "path": str(path)}, timeout=60, trust_env=False)
    except httpx.TransportError:
        return


def _is_beyond(service: Service, moment: int) -> bool:
    """Whether a load has reached its n-th moment: one worker held, both started again, or all done."""
    workers = service.get("/v1/workers")["workers"]
    if moment == 1:
        return any(worker["state"] != "ready" for worker in workers)
    if moment == 2:
        return all(worker["incarnation"] > 1 for worker in workers)
    return service.get(ADAPTERS)["changing"] is None and len(names(service)) > 1
