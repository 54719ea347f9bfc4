"""Conversations whose agents differ from those of the job (specification, "Casts")."""

from collections.abc import Callable
from pathlib import Path

from tests.harness.service import Document, recorded, scripted_model, serving

TOOL: Document = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def test_each_conversation_asks_its_own_cast(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """One conversation has another model, system, parameters, tools and answer; none of it reaches its neighbour."""
    record, other = tmp_path / "record", tmp_path / "other"
    models = {
        "m": scripted_model(free_ports(1), slots=1, echo=r"SAY-\w+", record=str(record)),
        "n": scripted_model(free_ports(1), slots=1, echo=r"SAY-\w+", record=str(other)),
    }
    agents = [
        {"id": "a", "model": "m", "system": "SAY-a", "params": {"seed": 1, "temperature": 0}},
        {"id": "b", "model": "m", "system": "SAY-b", "speak_after_within_round": ["a"]},
    ]
    cast = {
        "a": {"system": "SAY-other", "params": {"temperature": 1, "max_tokens": 9}},
        "b": {"model": "n", "tools": [TOOL], "validation": {"pattern": "^SAY", "retries": 0}},
    }
    conversations = [{"id": "plain", "prompt": "Talk."}, {"id": "cast", "prompt": "Talk.", "agents": cast}]
    with serving(tmp_path, free_ports(1), models) as service:
        job_id = service.post_job({"agents": agents, "conversations": conversations, "rounds": 2})
        service.wait_ended(job_id)
        plain, own = service.get(f"/v1/jobs/{job_id}/result")["conversations"]
        assert [turn["worker"] for turn in plain["turns"]] == ["m-0"] * 4
        assert [turn["worker"] for turn in own["turns"]] == ["m-0", "n-0"] * 2
        assert [turn["text"].split()[-1] for turn in own["turns"][:2]] == ["SAY-other", "SAY-other"]
        asked = service.get(f"/v1/jobs/{job_id}/conversations/cast/turns/a/1/prompt")["attempts"][0]
        assert {key: asked["params"][key] for key in ("seed", "temperature", "max_tokens")} == {
            "seed": 1,
            "temperature": 1,
            "max_tokens": 9,
        }
    with_tools = [each for each in recorded(record) + recorded(other) if each.get("tools")]
    assert [each["tools"][0]["function"]["name"] for each in with_tools] == ["look", "look"]
    assert (len(recorded(record)), len(recorded(other))) == (6, 2)
    assert [each["temperature"] for each in recorded(record) if each.get("max_tokens") == 9] == [1, 1]
