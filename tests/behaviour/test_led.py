"""Conversations whose leader names the next speaker (specification, "Led mode")."""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from tests.harness.service import Document, recorded, scripted_model, serving
from tests.harness.waiting import wait_for

CAST: list[Document] = [
    {"id": "host", "model": "m", "visible_to": ["ann"]},
    {"id": "ann", "model": "m"},
    {"id": "bob", "model": "m"},
]
Run = Callable[..., tuple[Document, Document, list[Document]]]


@pytest.fixture
def run(tmp_path: Path, free_ports: Callable[[int], int]) -> Run:
    """Run a job on a scripted engine; return its transcript, the job as shown, and the engine's requests."""

    def run(words: Sequence[str], **job: object) -> tuple[Document, Document, list[Document]]:
        (tmp_path / "script").write_text(json.dumps([{"content": each} for each in words]))
        record = tmp_path / "record"
        model = scripted_model(free_ports(1), slots=2, script=str(tmp_path / "script"), record=str(record))
        with serving(tmp_path, free_ports(1), {"m": model}) as service:
            led = {"mode": "led", "leader": "host", "rounds": 4, "agents": CAST}
            job_id = service.post_job({**led, "conversations": [{"prompt": "Talk."}], **job})
            service.wait_ended(job_id)
            transcript = service.get(f"/v1/jobs/{job_id}/result")["conversations"][0]
            return transcript, service.get(f"/v1/jobs/{job_id}"), recorded(record)

    return run


def spoken(transcript: Document) -> list[tuple[str, int, str]]:
    return [(turn["agent"], turn["round"], turn["text"]) for turn in transcript["turns"]]


def test_the_leader_names_the_next_speaker_and_ends_the_conversation(run: Run) -> None:
    """One choice and one turn are a round; agents that were not named have no turns."""
    transcript, job, asked = run(["bob", "I am Bob.", "Bob", "Still Bob.", "end"])
    assert spoken(transcript) == [
        ("host", 0, "bob"),
        ("bob", 0, "I am Bob."),
        ("host", 1, "Bob"),
        ("bob", 1, "Still Bob."),
        ("host", 2, "end"),
    ]
    assert (transcript["state"], transcript["ended_by"]) == ("completed", {"leader": "host", "round": 2})
    counts = job["progress"]["turns"]
    assert (counts["total"], counts["completed"], counts["pending"]) == (5, 5, 0)
    assert asked[0]["grammar"] == 'root ::= "ann" | "bob" | "end"\n'
    assert "grammar" not in asked[1]


def test_every_prompt_extends_the_one_before_and_respects_visibility(run: Run) -> None:
    """Agents that may read the leader's words read them, in the round that they opened and later."""
    _, _, asked = run(["ann", "I am Ann.", "bob", "I am Bob.", "ann", "Ann again.", "end"])
    host, ann, bob = (asked[number::2] for number in (0, 1, 1))
    for earlier, later in pairwise(host):
        assert later["messages"][: len(earlier["messages"])] == earlier["messages"]
    assert ann[2]["messages"][: len(ann[0]["messages"])] == ann[0]["messages"]
    assert ann[0]["messages"][-1]["content"] == "Talk.\n\nhost: ann"
    assert ann[2]["messages"][-1]["content"] == "host: bob\n\nbob: I am Bob.\n\nhost: ann"
    assert bob[1]["messages"][-1]["content"] == "Talk.\n\nann: I am Ann."


def test_an_answer_that_names_no_agent_is_asked_for_again(run: Run) -> None:
    """Like an invalid choice; in the end it fails the conversation."""
    transcript, _, asked = run(["ann or bob", "ann", "I am Ann.", "end"])
    assert [attempt["outcome"] for attempt in transcript["turns"][0]["attempts"]] == ["failed", "completed"]
    assert "exactly one of: ann, bob, end" in asked[1]["messages"][-1]["content"]
    assert transcript["state"] == "completed"


def test_the_rounds_bound_the_leaders_choices(run: Run) -> None:
    """Then the conversation ends without a further word of the leader."""
    transcript, job, _ = run(["ann", "One.", "ann", "Two."], rounds=2)
    assert (transcript["ended_by"], job["progress"]["turns"]["total"]) == ("rounds", 4)


@pytest.mark.parametrize(
    ("until", "words", "turns", "ended_by"),
    [
        ({"agent": "bob", "says": ["stop"]}, ["bob", "Go.", "bob", "Stop"], 4, {"agent": "bob", "round": 1}),
        ({"agent": "host", "says": ["ann"]}, ["bob", "Go.", "ann"], 3, {"agent": "host", "round": 1}),
        ({"agree": ["ann", "bob"]}, ["ann", "Rome", "bob", "Paris", "ann", "paris"], 6, {"agent": None, "round": 2}),
        ({"unchanged": 2}, ["ann", "A", "bob", "B", "bob", "B", "ann", "A"], 8, {"agent": None, "round": 3}),
    ],
    ids=["says", "the choice", "agree", "unchanged"],
)
def test_conditions_hold_in_led_conversations_too(
    run: Run, until: Document, words: Sequence[str], turns: int, ended_by: Document
) -> None:
    """Agreement and standstill compare each agent's last words; the agent named last need not have spoken."""
    transcript, _, _ = run(words, until=[until], rounds=9)
    assert transcript["ended_by"] == {"until": 0, **ended_by}
    assert len(transcript["turns"]) == turns


def test_no_agent_that_left_is_named_again(run: Run) -> None:
    """The choices are computed for each turn; without agents the conversation fails."""
    validation = {"pattern": "^Yes", "retries": 0}
    cast = [CAST[0], *({**agent, "validation": validation, "on_failure": "leave"} for agent in CAST[1:])]
    transcript, job, asked = run(["bob", "No.", "ann", "Yes.", "ann", "No."], agents=cast)
    assert [asked[number]["grammar"] for number in (0, 2, 4)] == [
        'root ::= "ann" | "bob" | "end"\n',
        'root ::= "ann" | "end"\n',
        'root ::= "ann" | "end"\n',
    ]
    assert (transcript["state"], transcript["left"]) == ("failed", ["bob", "ann"])
    assert job["progress"]["turns"]["total"] == len(transcript["turns"]) == 6


@pytest.mark.system
def test_a_kill_changes_no_choice(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """The named agent is on the record, and the leader is not asked again."""
    go, record = tmp_path / "go", tmp_path / "record"
    model = scripted_model(free_ports(1), slots=1, echo=r"pick-\w+", hold=r"/\S+/go\b", record=str(record))
    agents = [
        {"id": "host", "model": "m", "system": "pick-bob"},
        {"id": "ann", "model": "m"},
        {"id": "bob", "model": "m", "system": f"Once there is {go}"},
    ]
    job = {
        "mode": "led",
        "leader": "host",
        "rounds": 1,
        "agents": agents,
        "conversations": [{"id": "c", "prompt": "x"}],
    }
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        job_id = service.post_job(job)
        path = f"/v1/jobs/{job_id}/conversations/c"
        states = ["completed", "in_flight"]  # the leader's turn is durable once it is shown as ended
        wait_for(lambda: [turn["state"] for turn in service.get(path)["turns"]] == states, "bob's turn has begun")
        wait_for(lambda: len(recorded(record)) == 2, "bob is asked")
        service.kill()
        service.start()
        go.touch()
        service.wait_ended(job_id)
        transcript = service.get(path)
    assert (transcript["state"], transcript["ended_by"]) == ("completed", "rounds")
    assert [(turn["agent"], turn["state"]) for turn in transcript["turns"]] == [
        ("host", "completed"),
        ("bob", "completed"),
    ]
    assert len(recorded(record)) == 3


def test_a_cancelled_conversation_lists_only_the_turn_that_was_next(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """Turns for which no agent was named are not listed."""
    model = scripted_model(free_ports(1), slots=1, echo=r"pick-\w+", hold=r"/never/\w+")
    agents = [
        {"id": "host", "model": "m", "system": "pick-bob"},
        {"id": "ann", "model": "m"},
        {"id": "bob", "model": "m", "system": "Once there is /never/go"},
    ]
    job = {
        "mode": "led",
        "leader": "host",
        "rounds": 9,
        "agents": agents,
        "conversations": [{"id": "c", "prompt": "x"}],
    }
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        job_id = service.post_job(job)
        path = f"/v1/jobs/{job_id}/conversations/c"
        wait_for(lambda: [turn["agent"] for turn in service.get(path)["turns"]] == ["host", "bob"], "bob is asked")
        service.http.post(f"/v1/jobs/{job_id}/cancel")
        service.wait_ended(job_id)
        transcript, shown = service.get(path), service.get(f"/v1/jobs/{job_id}")
    assert [(turn["agent"], turn["state"]) for turn in transcript["turns"]] == [
        ("host", "completed"),
        ("bob", "cancelled"),
    ]
    assert (transcript["ended_by"], shown["progress"]["turns"]["total"]) == (None, 2)
