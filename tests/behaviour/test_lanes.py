"""More models than lanes, over HTTP: which load, which leave, and that no turn suffers."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.harness.service import Document, Service, recorded, scripted_model, serving
from tests.harness.surface import read_events
from tests.harness.waiting import wait_for

TALKS = 4


def placed(**flags: object) -> Document:
    """Return a model that is placed on lanes, with one slot."""
    model = {**scripted_model(1, slots=1), "args": flags, "placement": "lanes"}
    return {key: value for key, value in model.items() if key not in {"port", "replicas"}}


def lanes_at(first: int, count: int = 2, **fields: object) -> Document:
    return {"max_agents_per_gpu": count, "ports": [first, first + count - 1], **fields}


def talk(models: Sequence[str], *, name: str = "talk", rounds: int = 2, talks: int = TALKS) -> Document:
    """Return a job in which an agent of each model speaks."""
    agents = [{"id": f"of-{model}", "model": model} for model in models]
    conversations = [{"id": f"c{number}", "prompt": f"TOPIC-{number}."} for number in range(talks)]
    return {"name": name, "rounds": rounds, "agents": agents, "conversations": conversations}


def turns_of(service: Service, job_id: str, talks: int = TALKS) -> list[Document]:
    found = [service.get(f"/v1/jobs/{job_id}/conversations/c{number}")["turns"] for number in range(talks)]
    return [turn for turns in found for turn in turns]


def lanes_of(service: Service) -> list[Document]:
    lanes: list[Document] = service.get("/v1/lanes")["lanes"]
    return lanes


def residents(service: Service) -> list[str]:
    return [model for lane in lanes_of(service) for model in lane["resident"]]


@pytest.mark.system
def test_every_model_gets_its_turns_and_no_turn_is_ended_for_another(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """There are four models on two lanes.

    Each turn has one attempt, on an engine of its model, and incarnations go on.
    """
    record = {name: tmp_path / f"{name}.jsonl" for name in "abcd"}
    models = {name: placed(interval=0.01, record=str(record[name])) for name in "abcd"}
    with serving(tmp_path / "s", free_ports(1), models, gpus=lanes_at(free_ports(2))) as service:
        assert residents(service) == []  # none is loaded before a turn wants it, and the service is ready
        job = service.post_job(talk("abcd"))
        swaps = [data for _, kind, data in read_events(service, job) if kind == "swap"]
        assert {swap["model"] for swap in swaps} >= set("bcd")  # the first may be loaded before the first look
        assert all(swap["lane"] in {"lane-0", "lane-1"} and swap["seconds"] > 0 for swap in swaps)
        assert {swap["because"] for swap in swaps} == {"a turn of it waits"}
        assert service.wait_ended(job)["state"] == "completed"
        turns = turns_of(service, job)
        assert len(turns) == 2 * 4 * TALKS
        assert {len(turn["attempts"]) for turn in turns} == {1}
        assert {turn["worker"] for turn in turns} == {"lane-0", "lane-1"}
        assert {name: len(recorded(file)) for name, file in record.items()} == dict.fromkeys("abcd", 2 * TALKS)
        by_lane = {lane["lane"]: lane for lane in lanes_of(service)}
        assert sum(lane["swaps"] for lane in by_lane.values()) >= 4
        for worker in service.get("/v1/workers")["workers"]:
            assert worker["incarnation"] == by_lane[worker["id"]]["swaps"]
            assert [worker["model"]] == by_lane[worker["id"]]["resident"]


@pytest.mark.system
def test_a_running_turn_keeps_its_lane(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """There is one lane: its turn finishes while another model's turn waits and shows the reason."""
    models = {"slow": placed(tokens=40, interval=0.02), "other": placed()}
    with serving(tmp_path, free_ports(1), models, gpus=lanes_at(free_ports(1), 1)) as service:
        first = service.post_job(talk(["slow"], name="first", rounds=1, talks=1))
        wait_for(lambda: any(turn["text"] for turn in turns_of(service, first, 1)), "it speaks")
        second = service.post_job(talk(["other"], name="second", rounds=1, talks=1))
        wait_for(lambda: lanes_of(service)[0]["next"] == "other", "the lane is kept for the other model")
        (head,) = service.get("/v1/status")["heads"]["ready"]
        assert head["waits_for"] == "a worker of other: lane-0 is kept for it: slow leaves first"
        assert service.wait_ended(second)["state"] == "completed"
        (turn,) = turns_of(service, first, 1)
        assert (turn["state"], len(turn["attempts"]), turn["usage"]["completion_tokens"]) == ("completed", 1, 40)


@pytest.mark.system
def test_a_pinned_model_stays_and_an_idle_one_leaves(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """The pinned model is loaded once; the other lane is empty when its model's time is over."""
    models = {"house": {**placed(), "pin": True}, "a": {**placed(), "keep_s": 0.3}, "b": placed()}
    with serving(tmp_path, free_ports(1), models, gpus=lanes_at(free_ports(2))) as service:
        wait_for(lambda: residents(service) == ["house"], "what is pinned is there before a turn wants it")
        assert service.wait_ended(service.post_job(talk("a")))["state"] == "completed"
        wait_for(lambda: residents(service) == ["house"], "what was idle for its time has left")
        for model in "bab":
            assert service.wait_ended(service.post_job(talk(model, name=f"of-{model}")))["state"] == "completed"
        (house,) = [lane for lane in lanes_of(service) if lane["resident"] == ["house"]]
        assert house["swaps"] == 1


@pytest.mark.system
def test_a_model_that_cannot_start_keeps_no_lane_from_others(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """It gives up on both lanes and its turns end, while others go on."""
    broken = {**placed(exit_at_once=3), "restart": {"initial_s": 0.05, "max_s": 0.1, "failures": 2, "retry_s": None}}
    models = {"broken": broken, "a": placed(), "b": placed()}
    with serving(tmp_path, free_ports(1), models, gpus=lanes_at(free_ports(2))) as service:
        bad = service.post_job(talk(["broken"], name="bad", talks=1))
        good = service.post_job(talk("ab", name="good"))
        assert service.wait_ended(good)["state"] == "completed"
        assert service.wait_ended(bad)["state"] == "failed"
        (turn, *_) = turns_of(service, bad, 1)
        assert turn["reason"] == "engine_unreachable"
        assert "failed on every lane that could hold it: lane-" in turn["detail"]
        assert "status 3" in turn["detail"]  # the reason, which users look for
        assert [lane["barred"] for lane in lanes_of(service)] == [["broken"], ["broken"]]
        assert service.http.get("/readyz").json()["code"] == "not_ready"


@pytest.mark.system
def test_a_model_that_cannot_start_waits_for_no_pinned_lane(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """It has given up on every lane that it may ever get.

    Its turns end, and the service reports that it is not served.
    """
    broken = {**placed(exit_at_once=3), "restart": {"initial_s": 0.05, "max_s": 0.1, "failures": 2, "retry_s": None}}
    models = {"house": {**placed(), "pin": True}, "broken": broken}
    with serving(tmp_path, free_ports(1), models, gpus=lanes_at(free_ports(2))) as service:
        wait_for(lambda: residents(service) == ["house"], "what is pinned is there")
        bad = service.post_job(talk(["broken"], name="bad", talks=1))
        assert service.wait_ended(bad)["state"] == "failed"
        assert "failed on every lane that could hold it: lane-1" in turns_of(service, bad, 1)[0]["detail"]
        (fault,) = service.http.get("/readyz").json()["errors"]
        assert fault["path"] == "models.broken"
        assert service.wait_ended(service.post_job(talk(["house"], name="good", talks=1)))["state"] == "completed"


@pytest.mark.system
def test_a_lane_that_an_operator_drains_stays_empty(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Its model goes to the other lane, and alternates with the one there."""
    models = {name: placed() for name in "ab"}
    with serving(tmp_path, free_ports(1), models, gpus=lanes_at(free_ports(2))) as service:
        assert service.wait_ended(service.post_job(talk("ab", name="first")))["state"] == "completed"
        (held,) = [lane["lane"] for lane in lanes_of(service) if lane["resident"] == ["a"]]
        service.http.post(f"/v1/workers/{held}/drain").raise_for_status()
        job = service.post_job(talk("ab", name="second"))
        assert service.wait_ended(job)["state"] == "completed"
        assert {turn["worker"] for turn in turns_of(service, job)} == {"lane-0", "lane-1"} - {held}


def test_a_job_that_will_not_wait_is_refused_while_its_model_is_not_loaded(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """A model that is not loaded has no free slot."""
    with serving(tmp_path, free_ports(1), {"a": placed()}, gpus=lanes_at(free_ports(1), 1)) as service:
        refused = service.http.post("/v1/jobs?queue=false", json=talk("a", talks=1))
        assert refused.status_code == 429, refused.text
        service.wait_ended(service.post_job(talk("a", talks=1)))
        assert service.http.post("/v1/jobs?queue=false", json=talk("a", talks=1)).status_code == 202
