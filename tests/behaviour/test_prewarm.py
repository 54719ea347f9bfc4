"""Prompts that are read beforehand on idle slots (specification, "Reading ahead")."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.service import Document, Service, recorded, scripted_model, serving
from tests.harness.waiting import wait_for

DOCUMENT = "".join(f"Street {number} has {number * 7 % 31} houses. " for number in range(40))
YES_NO = {"choices": ["yes", "no"]}


def talk(*agents: Document, prompt: str = DOCUMENT, **fields: object) -> Document:
    """Return a job of one conversation whose agents speak one after the other."""
    chained = [
        {**agent, "model": "m", "speak_after_within_round": [before["id"]] if before else []}
        for before, agent in zip([None, *agents], agents, strict=False)
    ]
    return {"name": "talk", "agents": chained, "conversations": [{"prompt": prompt}], **fields}


def tokens(service: Service) -> dict[str, float]:
    """Return how many tokens were read beforehand, by what became of them."""
    lines = service.http.get("/metrics").text.splitlines()
    counts = [line for line in lines if line.startswith('roundhouse_prewarm_tokens_total{model="m"')]
    return {line.split('result="')[1].split('"')[0]: float(line.split()[-1]) for line in counts}


@pytest.mark.system
@pytest.mark.parametrize("prewarm", [True, False])
def test_the_next_speaker_finds_its_prompt_read(
    tmp_path: Path, free_ports: Callable[[int], int], *, prewarm: bool
) -> None:
    """On the real llama.cpp: all but what the first one has said, whichever slot the engine takes."""
    model = {
        "engine": "embedded", "port": free_ports(1), "slots": 2, "context": 4096,
        "args": {"threads": 1}, "params": {"max_tokens": 40, "ignore_eos": True},
    }  # fmt: skip
    with serving(tmp_path, free_ports(1), {"m": model}, scheduling={"prewarm": prewarm}) as service:
        job_id = service.post_job(talk({"id": "a"}, {"id": "b"}))
        assert service.wait_ended(job_id)["state"] == "completed"
        _, second = service.get(f"/v1/jobs/{job_id}/result")["conversations"][0]["turns"]
        assert len(second["attempts"]) == 1
        assert (second["usage"]["cached_tokens"] > len(DOCUMENT)) is prewarm
        assert bool(tokens(service)) is prewarm
        if prewarm:
            counts = tokens(service)
            assert counts["used"] > len(DOCUMENT), "a token a character in this model"
            assert counts["wasted"] < 0.1 * counts["used"]


@pytest.mark.parametrize("view", ["own", "shared"])
def test_what_is_read_beforehand_is_how_the_turn_s_prompt_begins(
    tmp_path: Path, free_ports: Callable[[int], int], view: str
) -> None:
    """One token is asked for, nothing that an answer is to be, and in no transcript it is seen."""
    gate, record = tmp_path / "gate", tmp_path / "record"
    model = scripted_model(free_ports(1), record=str(record), hold=str(gate))
    agents = (
        {"id": "a", "system": f"Your words waits for {gate}"},
        {"id": "b", "system": "You end it.", "validation": YES_NO, "params": {"max_tokens": 77}},
    )
    with serving(tmp_path, free_ports(1), {"m": model}, scheduling={"prewarm": True}) as service:
        job_id = service.post_job(talk(*agents, view=view))
        wait_for(lambda: record.exists() and len(recorded(record)) == 2, "its prompt is read while a speaks")
        gate.touch()
        service.wait_ended(job_id)
        bodies = recorded(record)
        _, ahead, turn = bodies[:3]
        assert ahead["max_tokens"] == 1
        assert turn["max_tokens"] == 77
        assert "grammar" in turn
        assert "grammar" not in ahead
        assert [message["role"] for message in ahead["messages"]] == [message["role"] for message in turn["messages"]]
        *first, last = ahead["messages"]
        assert first == turn["messages"][: len(first)]
        said = turn["messages"][-1]["content"]
        assert said.startswith(DOCUMENT.strip())
        assert last["content"].startswith(DOCUMENT.strip())
        assert "You end it." not in last["content"]
        turns = service.get(f"/v1/jobs/{job_id}/result")["conversations"][0]["turns"]
        assert [each["agent"] for each in turns] == ["a", "b"]
        assert turns[0]["attempts"][0]["outcome"] == "completed"


@pytest.mark.system
def test_an_engine_that_dies_of_it_is_held_against_no_turn_but_its_own(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """Who speaks beside it is tried and acquitted; whose prompt it is brings engines down itself, and is convicted."""
    gate = tmp_path / "gate"
    model = scripted_model(free_ports(1), die_on="KILLER", hold=str(gate))
    agents = ({"id": "a", "system": f"Your words waits for {gate}"}, {"id": "b", "system": "You are the KILLER."})
    with serving(tmp_path, free_ports(1), {"m": model}, scheduling={"prewarm": True}) as service:
        job_id = service.post_job(talk(*agents))
        wait_for(lambda: service.get("/v1/workers")["workers"][0]["incarnation"] == 2, "the engine has died of it")
        gate.touch()
        service.wait_ended(job_id, limit_s=90)
        first, second = service.get(f"/v1/jobs/{job_id}/result")["conversations"][0]["turns"]
        assert (first["state"], len(first["attempts"])) == ("completed", 2)
        assert (second["state"], second["reason"]) == ("failed", "poisoned")


@pytest.mark.system
def test_an_engine_that_hangs_in_it_is_ended_and_no_turn_pays(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """A reading is watched like a turn: all stands still with it, and who spoke beside it speaks again."""
    model = scripted_model(
        free_ports(1), stop_on="You are b.", die_once=str(tmp_path / "stopped"), tokens=40, interval=0.05
    )
    agents = ({"id": "a", "system": "You are a."}, {"id": "b", "system": "You are b."})
    stalls = {"prefill_stall_s": 2, "decode_stall_s": 2}
    models = {"m": {**model, "timeouts": stalls}}
    with serving(tmp_path, free_ports(1), models, scheduling={"prewarm": True}) as service:
        job_id = service.post_job(talk(*agents))
        assert service.wait_ended(job_id)["state"] == "completed"
        first, second = service.get(f"/v1/jobs/{job_id}/result")["conversations"][0]["turns"]
        hung, whole = first["attempts"]
        assert hung["reason"] in {"stalled_prefill", "stalled_decode"}
        assert (whole["outcome"], whole["incarnation"]) == ("completed", 2)
        assert [attempt["outcome"] for attempt in second["attempts"]] == ["completed"]


@pytest.mark.system
def test_a_prompt_that_hangs_the_engine_is_convicted_alone(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """It is never answered, read early or not: who speaks beside it is whole, and it fails by its own turns."""
    model = scripted_model(free_ports(1), stop_on="You are b.", tokens=40, interval=0.05)
    agents = ({"id": "a", "system": "You are a."}, {"id": "b", "system": "You are b."})
    models = {"m": {**model, "timeouts": {"prefill_stall_s": 2, "decode_stall_s": 2}}}
    with serving(tmp_path, free_ports(1), models, scheduling={"prewarm": True}) as service:
        job_id = service.post_job(talk(*agents))
        service.wait_ended(job_id, limit_s=90)
        first, second = service.get(f"/v1/jobs/{job_id}/result")["conversations"][0]["turns"]
        assert (first["state"], len(first["attempts"])) == ("completed", 2)
        assert (second["state"], second["reason"]) == ("failed", "poisoned")
