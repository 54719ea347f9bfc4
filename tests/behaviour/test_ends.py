"""Conversations that end before their rounds are over (specification, "Ends")."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.harness.service import Document, Service, scripted_model, serving
from tests.harness.waiting import wait_for

STOP: Document = {"type": "function", "function": {"name": "finish", "parameters": {"type": "object"}}}
SENT = {"content": "Done.", "tool_calls": [{"name": "finish", "arguments": "{}"}]}
JURY: list[Document] = [
    {"id": "a", "model": "m", "exit_tools": [STOP]},
    {"id": "b", "model": "m", "speak_after_within_round": ["a"]},
]


@pytest.fixture
def run(tmp_path: Path, free_ports: Callable[[int], int]) -> Callable[..., tuple[Document, Document]]:
    """Run a job on a scripted engine of one slot; return its transcript, and the job as it is shown at the end."""

    def run(script: Sequence[object], **job: object) -> tuple[Document, Document]:
        (tmp_path / "script").write_text(json.dumps(script))
        model = scripted_model(free_ports(1), slots=1, script=str(tmp_path / "script"))
        with serving(tmp_path, free_ports(1), {"m": model}) as service:
            job_id = service.post_job({"rounds": 4, "agents": JURY, "conversations": [{"prompt": "Talk."}], **job})
            service.wait_ended(job_id)
            return _transcript(service, job_id), service.get(f"/v1/jobs/{job_id}")

    return run


def _transcript(service: Service, job_id: str) -> Document:
    result: Document = service.get(f"/v1/jobs/{job_id}/result")
    transcript: Document = result["conversations"][0]
    return transcript


def said(*words: str) -> list[Document]:
    return [{"content": each} for each in words]


@pytest.mark.parametrize(
    ("until", "script", "turns", "ended_by"),
    [
        ({"agent": "b", "says": ["yes", "ja"]}, said("One", "no", "Two", " YES "), 4, ("b", 1)),
        ({"agent": "a", "says": ["stop"]}, said("One", "no", "Stop"), 3, ("a", 1)),  # b waits for it, and never speaks
        ({"agent": "b", "matches": "^DONE"}, said("One", "not DONE", "Two", "DONE, I think"), 4, ("b", 1)),
        (
            {"agent": "b", "field": "vote.verdict", "equals": "agree"},
            said(
                "One",
                "agree",
                "Two",
                '{"vote": {"verdict": "no"}}',
                "3",
                '```json\n{"vote": {"verdict": "Agree"}}\n```',
            ),
            6,
            ("b", 2),
        ),
        ({"signal": "finish"}, [*said("One", "Two"), SENT], 3, ("a", 1)),
        ({"agree": ["a", "b"]}, said("Paris", "Rome", "Rome", "rome"), 4, (None, 1)),
        ({"unchanged": 1}, said("Paris", "Rome", "Rome", "Paris", "Rome", " Paris"), 6, (None, 2)),
    ],
    ids=lambda value: next((key for key in value if key != "agent"), None) if isinstance(value, dict) else None,
)
def test_a_condition_ends_a_conversation(
    run: Callable[..., tuple[Document, Document]],
    until: Document,
    script: Sequence[object],
    turns: int,
    ended_by: tuple[str | None, int],
) -> None:
    """It ends in the round in which the condition holds; turns that no longer exist have no entry and no count."""
    transcript, job = run(script, until=[until])
    assert transcript["state"] == "completed"
    assert transcript["ended_by"] == {"until": 0, "agent": ended_by[0], "round": ended_by[1]}
    assert [turn["state"] for turn in transcript["turns"]] == ["completed"] * turns
    counts = job["progress"]["turns"]
    assert (counts["total"], counts["completed"], counts["pending"]) == (turns, turns, 0)


def test_a_conversation_that_fulfils_no_condition_has_all_its_rounds(
    run: Callable[..., tuple[Document, Document]],
) -> None:
    """A condition that is nearly fulfilled ends nothing."""
    script = said("yes?", "no", "yes or no", "DONE", "a", "b", "a", "b")
    until = [{"agent": "a", "says": ["yes"]}, {"agent": "b", "matches": "^done"}, {"agree": ["a", "b"]}]
    transcript, job = run(script, until=until)
    assert (transcript["state"], transcript["ended_by"]) == ("completed", "rounds")
    assert len(transcript["turns"]) == job["progress"]["turns"]["total"] == 8


def test_tokens_end_a_conversation_at_a_rounds_end(run: Callable[..., tuple[Document, Document]]) -> None:
    """All answers so far are counted, and a round is not broken off."""
    transcript, _ = run(said(*["word"] * 8), until=[{"answer_tokens": 1}])
    assert transcript["ended_by"] == {"until": 0, "agent": None, "round": 0}
    assert len(transcript["turns"]) == 2


def test_the_first_listed_of_several_conditions_is_reported(run: Callable[..., tuple[Document, Document]]) -> None:
    """Whichever of a round's turns was quicker."""
    until = [{"agree": ["a", "b"]}, {"agent": "b", "says": ["no"]}, {"agent": "a", "matches": "^Y"}]
    agents = [{key: value for key, value in agent.items() if key != "speak_after_within_round"} for agent in JURY]
    transcript, _ = run(said("Yes", "no"), until=until, agents=agents)
    assert transcript["ended_by"] == {"until": 1, "agent": "b", "round": 0}


def test_free_mode_ends_when_a_condition_holds(run: Callable[..., tuple[Document, Document]]) -> None:
    """The order of the record decides."""
    agents = [{"id": name, "model": "m"} for name in ("a", "b")]
    transcript, job = run(said("One", "stop"), mode="free", agents=agents, until=[{"agent": "b", "says": ["stop"]}])
    assert transcript["ended_by"] == {"until": 0, "agent": "b", "round": 0}
    assert len(transcript["turns"]) == job["progress"]["turns"]["total"] == 2


def test_a_conversations_own_conditions_replace_those_of_its_job(
    run: Callable[..., tuple[Document, Document]],
) -> None:
    """An empty list means none."""
    conversations = [{"prompt": "Talk.", "until": []}]
    transcript, _ = run(said(*["yes"] * 8), until=[{"agent": "a", "says": ["yes"]}], conversations=conversations)
    assert (transcript["ended_by"], len(transcript["turns"])) == ("rounds", 8)


@pytest.mark.system
def test_a_kill_changes_no_end(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Fulfilled conditions are on the record: the next life of the service ends the conversation by them."""
    go = tmp_path / "go"
    model = scripted_model(free_ports(1), slots=2, echo=r"SAY-\w+", hold=r"/\S+/go\b")
    agents = [
        {"id": "a", "model": "m", "system": "SAY-no"},
        {"id": "b", "model": "m", "system": f"SAY-maybe once there is {go}"},
    ]
    until = [{"unchanged": 1}, {"agent": "a", "says": ["say-NO"]}]
    job = {"rounds": 4, "until": until, "agents": agents, "conversations": [{"id": "c", "prompt": "Talk."}]}
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        job_id = service.post_job(job)
        path = f"/v1/jobs/{job_id}/conversations/c"
        wait_for(lambda: service.get(path)["turns"][0]["state"] == "completed", "one has spoken")
        service.kill()
        service.start()
        go.touch()
        service.wait_ended(job_id)
        transcript = service.get(path)
    assert transcript["ended_by"] == {"until": 1, "agent": "a", "round": 0}
    assert sorted(turn["agent"] for turn in transcript["turns"]) == ["a", "b"]
