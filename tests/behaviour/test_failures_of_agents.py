"""Failures that do not end the conversation (specification, "Failures of agents")."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.harness.service import Document, recorded, scripted_model, serving
from tests.harness.waiting import wait_for

BAD, GOOD = {"content": "Nonsense."}, {"content": "Yes, indeed."}


def cast(on_failure: str, other: str = "end") -> list[Document]:
    """Return two agents; the first fails with every answer that does not begin with Yes."""
    validation = {"pattern": "^Yes", "retries": 0}
    return [
        {"id": "a", "model": "m", "validation": validation, "on_failure": on_failure, "role": "critic"},
        {"id": "b", "model": "m", "validation": validation, "on_failure": other, "speak_after_within_round": ["a"]},
    ]


@pytest.fixture
def run(tmp_path: Path, free_ports: Callable[[int], int]) -> Callable[..., tuple[Document, Document, list[Document]]]:
    """Run a job on a scripted engine; return its transcript, the job as shown, and the engine's requests."""

    def run(script: Sequence[object], **job: object) -> tuple[Document, Document, list[Document]]:
        (tmp_path / "script").write_text(json.dumps(script))
        record = tmp_path / "record"
        model = scripted_model(free_ports(1), slots=1, script=str(tmp_path / "script"), record=str(record))
        with serving(tmp_path, free_ports(1), {"m": model}) as service:
            job_id = service.post_job({"rounds": 3, "conversations": [{"prompt": "Talk."}], **job})
            service.wait_ended(job_id)
            transcript = service.get(f"/v1/jobs/{job_id}/result")["conversations"][0]
            return transcript, service.get(f"/v1/jobs/{job_id}"), recorded(record)

    return run


def states(transcript: Document) -> list[tuple[str, int, str]]:
    return [(turn["agent"], turn["round"], turn["state"]) for turn in transcript["turns"]]


def test_by_default_a_failed_turn_fails_its_conversation(
    run: Callable[..., tuple[Document, Document, list[Document]]],
) -> None:
    """As before ``on_failure`` existed."""
    transcript, _, asked = run([BAD], agents=cast("end"))
    assert (transcript["state"], transcript["reason"], transcript["left"]) == ("failed", "validation_exhausted", [])
    assert (len(transcript["turns"]), len(asked)) == (6, 1)


def test_an_agent_that_skips_is_silent_in_that_round(
    run: Callable[..., tuple[Document, Document, list[Document]]],
) -> None:
    """Agents that wait for it go on as after silence; its failure is on the record, and in no prompt."""
    transcript, job, asked = run([BAD, *[GOOD] * 5], agents=cast("skip"))
    assert (transcript["state"], transcript["ended_by"], transcript["left"]) == ("completed", "rounds", [])
    assert states(transcript)[:2] == [("a", 0, "failed"), ("b", 0, "completed")]
    assert [state for *_, state in states(transcript)].count("completed") == 5
    assert transcript["turns"][0]["reason"] == "validation_exhausted"
    assert (job["progress"]["turns"]["total"], job["progress"]["turns"]["failed"]) == (6, 1)
    assert job["state"] == "completed"
    assert not any("Nonsense" in json.dumps(each) or "left" in json.dumps(each) for each in asked)


def test_an_agent_that_left_is_announced_where_it_would_have_spoken(
    run: Callable[..., tuple[Document, Document, list[Document]]],
) -> None:
    """In every later prompt at the same place, so that each extends the one before; the reason stays private."""
    transcript, job, asked = run([GOOD, GOOD, BAD, GOOD, GOOD], agents=cast("leave"))
    assert (transcript["state"], transcript["left"]) == ("completed", ["a"])
    assert states(transcript) == [
        *[(name, 0, "completed") for name in ("a", "b")],
        ("a", 1, "failed"),
        *[("b", number, "completed") for number in (1, 2)],
    ]
    assert (job["progress"]["turns"]["total"], job["progress"]["turns"]["pending"]) == (5, 0)
    first, second = asked[-2]["messages"], asked[-1]["messages"]
    assert first[-1]["content"] == "a (critic) has left."
    assert second[: len(first)] == first
    assert not any("Nonsense" in json.dumps(each) for each in asked)


def test_when_the_last_one_leaves_the_conversation_fails(
    run: Callable[..., tuple[Document, Document, list[Document]]],
) -> None:
    """With the reason of that turn; turns without an agent to speak have no entry."""
    transcript, job, _ = run([BAD, GOOD, BAD], agents=cast("leave", "leave"))
    assert (transcript["state"], transcript["reason"]) == ("failed", "validation_exhausted")
    assert states(transcript) == [("a", 0, "failed"), ("b", 0, "completed"), ("b", 1, "failed")]
    assert (transcript["left"], job["progress"]["turns"]["total"]) == (["a", "b"], 3)


def test_free_mode_goes_on_without_the_agent_that_left(
    run: Callable[..., tuple[Document, Document, list[Document]]],
) -> None:
    """The news comes when it became visible."""
    agents = [
        {key: value for key, value in each.items() if key != "speak_after_within_round"} for each in cast("leave")
    ]
    transcript, _, asked = run([BAD, GOOD, GOOD, GOOD], agents=agents, mode="free")
    assert (transcript["state"], transcript["left"]) == ("completed", ["a"])
    assert states(transcript)[1:] == [("b", number, "completed") for number in range(3)]
    assert asked[1]["messages"][-1]["content"] == "Talk.\n\na (critic) has left."


@pytest.mark.system
def test_a_kill_changes_nothing_for_the_agents_that_stay(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """The record has who left: the next life asks nothing of it, and announces it as this one would have."""
    go, record = tmp_path / "go", tmp_path / "record"
    model = scripted_model(free_ports(1), slots=1, echo=r"SAY-\w+", hold=r"/\S+/go\b", record=str(record))
    agents = [
        {"id": "a", "model": "m", "on_failure": "leave", "validation": {"pattern": "^Yes", "retries": 0}},
        {"id": "b", "model": "m", "system": f"SAY-on once there is {go}", "speak_after_within_round": ["a"]},
    ]
    job = {"rounds": 2, "agents": agents, "conversations": [{"id": "c", "prompt": "SAY-no"}]}
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        job_id = service.post_job(job)
        path = f"/v1/jobs/{job_id}/conversations/c"
        wait_for(lambda: [turn["state"] for turn in service.get(path)["turns"]] == ["failed", "in_flight"], "it left")
        service.kill()
        service.start()
        go.touch()
        service.wait_ended(job_id)
        transcript = service.get(path)
    assert (transcript["state"], transcript["left"]) == ("completed", ["a"])
    assert states(transcript) == [("a", 0, "failed"), ("b", 0, "completed"), ("b", 1, "completed")]
    asked = recorded(record)
    assert asked[-1]["messages"][: len(asked[1]["messages"])] == asked[1]["messages"] == asked[2]["messages"]


def test_a_long_conversation_is_cancelled_after_an_agent_has_left(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """Its many turns are written slowly, after its job has ended here; the service goes on."""
    go = tmp_path / "go"
    model = scripted_model(free_ports(1), slots=1, echo=r"SAY-\w+", hold=r"/\S+/go\b")
    agents = [
        {"id": "a", "model": "m", "on_failure": "leave", "validation": {"pattern": "^Yes", "retries": 0}},
        {"id": "b", "model": "m", "system": f"SAY-on once there is {go}", "speak_after_within_round": ["a"]},
    ]
    job = {"rounds": 1000, "agents": agents, "conversations": [{"id": "c", "prompt": "SAY-no"}]}
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        job_id = service.post_job(job)
        path = f"/v1/jobs/{job_id}/conversations/c"
        wait_for(lambda: [turn["state"] for turn in service.get(path)["turns"]] == ["failed", "in_flight"], "it left")
        service.http.post(f"/v1/jobs/{job_id}/cancel")
        ended = service.wait_ended(job_id)
        assert (ended["state"], ended["progress"]["turns"]["cancelled"]) == ("cancelled", 1000)
        assert ended["progress"]["turns"]["total"] == 1001
