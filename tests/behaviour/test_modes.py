"""Free mode, validation and markup through the service.

Source: specification, "Free mode" and "Answer validation" and "Agent markup".
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.harness.service import Document, Service, recorded, scripted_model, serving


def run(
    tmp_path: Path, free_ports: Callable[[int], int], job: Document, script: Sequence[object] | None = None
) -> tuple[Document, list[Document]]:
    """Run a job on a scripted engine of one slot; return its first transcript, and the engine's requests."""
    flags: Document = {"record": str(tmp_path / "record")}
    if script is not None:
        (tmp_path / "script").write_text(json.dumps(script))
        flags["script"] = str(tmp_path / "script")
    model = scripted_model(free_ports(1), slots=1, **flags)
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        job_id = service.post_job(job)
        service.wait_ended(job_id)
        transcript = _result(service, job_id)["conversations"][0]
    return transcript, recorded(tmp_path / "record")


def _result(service: Service, job_id: str) -> Document:
    result: Document = service.get(f"/v1/jobs/{job_id}/result")
    return result


def words(asked: Document) -> str:
    return "\n".join(message["content"] for message in asked["messages"] if message["role"] != "system")


def test_free_mode_is_one_queue(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """One slot, two agents, two turns each: each agent hears all words from before its turn began."""
    job = {
        "mode": "free",
        "rounds": 2,
        "agents": [{"id": "a", "model": "m"}, {"id": "b", "model": "m"}],
        "conversations": [{"prompt": "Talk."}],
    }
    script = [{"content": f"SAID-{number}"} for number in range(4)]
    transcript, asked = run(tmp_path, free_ports, job, script)
    assert [(turn["agent"], turn["round"], turn["text"]) for turn in transcript["turns"]] == [
        ("a", 0, "SAID-0"),
        ("b", 0, "SAID-1"),
        ("a", 1, "SAID-2"),
        ("b", 1, "SAID-3"),
    ]
    for number, each in enumerate(asked):
        assert [f"SAID-{other}" in words(each) for other in range(4)] == [other < number for other in range(4)]


def test_a_prompt_made_in_the_queue_is_older(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Specification, "Free mode", prompt_at: queue: an agent does not hear what is said while it waits."""
    job = {
        "mode": "free",
        "prompt_at": "queue",
        "rounds": 2,
        "agents": [{"id": "a", "model": "m"}, {"id": "b", "model": "m"}],
        "conversations": [{"prompt": "Talk."}],
    }
    _, asked = run(tmp_path, free_ports, job, [{"content": f"SAID-{number}"} for number in range(4)])
    heard = [[number for number in range(4) if f"SAID-{number}" in words(each)] for each in asked]
    assert heard == [[], [], [0], [0, 1]]


def test_an_invalid_answer_is_asked_for_again(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """It goes ahead of all other work, with the reason; each attempt stays in the transcript."""
    agents = [
        {"id": "a", "model": "m", "validation": {"choices": ["yes", "no"], "retries": 2}},
        {"id": "b", "model": "m"},
    ]
    job = {"agents": agents, "conversations": [{"prompt": "Agree?"}, {"prompt": "Agree too?"}]}
    script = [{"content": each} for each in ("maybe", "yes and no", "Yes.", "b", "no", "b")]
    transcript, asked = run(tmp_path, free_ports, job, script)
    turn = next(turn for turn in transcript["turns"] if turn["agent"] == "a")
    assert (turn["state"], turn["text"]) == ("completed", "Yes.")
    assert [(each["outcome"], each["text"]) for each in turn["attempts"]] == [
        ("failed", "maybe"),
        ("failed", "yes and no"),
        ("completed", "Yes."),
    ]
    assert turn["attempts"][0]["reason"] == "invalid_answer"
    assert "exactly one of: yes, no" in turn["attempts"][0]["detail"]
    assert [message["role"] for message in asked[2]["messages"]] == ["system", "user", "assistant", "user"]
    assert asked[2]["messages"][2]["content"] == "yes and no"
    assert asked[2]["messages"][:2] == asked[0]["messages"][:2]


def test_a_turn_that_is_never_valid_fails_with_its_conversation(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """After the configured re-prompts the reason is validation_exhausted."""
    agents = [{"id": "a", "model": "m", "validation": {"pattern": "^[0-9]+$", "retries": 1}}]
    job = {"rounds": 2, "agents": agents, "conversations": [{"prompt": "Count."}]}
    transcript, asked = run(tmp_path, free_ports, job)
    assert (transcript["state"], transcript["reason"]) == ("failed", "validation_exhausted")
    assert [(turn["state"], turn["reason"]) for turn in transcript["turns"]] == [
        ("failed", "validation_exhausted"),
        ("cancelled", "cancelled"),
    ]
    assert (len(asked), len(transcript["turns"][0]["attempts"])) == (2, 2)


def test_thoughts_stay_private(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """They are stored apart, and shown to no other agent; text that only resembles markup stays.

    Source: specification, "Agent markup" and "Visibility".
    """
    agents = [
        {"id": "a", "model": "m", "markup": True},
        {"id": "b", "model": "m", "markup": True, "speak_after_within_round": ["a"]},
    ]
    job = {"rounds": 2, "agents": agents, "conversations": [{"prompt": "Talk."}]}
    script = [
        {"content": "<thinking>SECRET</thinking>aside <speak>ALOUD</speak>"},
        {"content": "<thinking>nothing to add</thinking><wait/>"},
        {"content": "AGAIN"},
        {"content": "END"},
    ]
    transcript, asked = run(tmp_path, free_ports, job, script)
    told = [(turn["text"], turn["thinking"]) for turn in transcript["turns"]]
    assert told == [("ALOUD", "SECRET"), ("", "nothing to add"), ("AGAIN", ""), ("END", "")]
    assert transcript["turns"][0]["attempts"][0]["text"].startswith("<thinking>")
    assert all("SECRET" not in words(each) and "aside" not in words(each) for each in asked)
    assert "a: ALOUD" in words(asked[1])
    assert "b said" not in words(asked[2])
