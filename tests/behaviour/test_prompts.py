"""The recorded prompts that the service shows equal those that an engine was sent."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.service import Document, Service, recorded, scripted_model, serving
from tests.harness.waiting import wait_for

TOOL = "def add(a, b): return {'sum': a + b}"
ADD: Document = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}},  # in its author's order
            "required": ["b", "a"],
        },
    },
}
CALL = {"content": "Let me see.", "tool_calls": [{"id": "x", "name": "add", "arguments": '{"a":2, "b":3}'}]}
DEBATE: Document = {
    "rounds": 2,
    "agents": [
        {"id": "pro", "model": "m", "system": "For it.", "role": "advocate"},
        {"id": "con", "model": "m", "speak_after_within_round": ["pro"], "visible_to": []},
    ],
    "conversations": [{"prompt": "TOPIC"}],
}
TOOLS: Document = {
    "agents": [{"id": "a", "model": "m", "tools": [ADD]}],
    "conversations": [{"prompt": "TOPIC"}],
}
RETRIES: Document = {
    "agents": [
        {
            "id": "judge",
            "model": "m",
            "params": {"seed": 5, "temperature": 0.1},
            "validation": {"choices": ["yes", "no"], "retries": 3},
        }
    ],
    "conversations": [{"prompt": "TOPIC"}],
}
LEAVING: Document = {
    "rounds": 3,
    "agents": [
        {"id": "pro", "model": "m", "validation": {"pattern": "^Yes", "retries": 0}, "on_failure": "leave"},
        {"id": "con", "model": "m", "speak_after_within_round": ["pro"], "on_failure": "skip"},
    ],
    "conversations": [{"prompt": "TOPIC"}],
}
JOBS: dict[str, tuple[Document, list[object]]] = {
    "an agent leaves": (LEAVING, [{"content": each} for each in ("Yes.", "Words 1.", "No.", "Words 2.", "Words 3.")]),
    "an agent leaves a shared view": (
        {**LEAVING, "view": "shared", "prompts": {"left": "($agent is gone)"}},
        [{"content": each} for each in ("No.", "Words 1.", "Words 2.", "Words 3.")],
    ),
    "debate": (DEBATE, [{"content": f"Words {number}."} for number in range(4)]),
    "shared": (
        {**DEBATE, "view": "shared", "system": "Debate."},
        [{"content": f"Words {number}."} for number in range(4)],
    ),
    "free": (
        {
            "mode": "free",
            "rounds": 3,
            "agents": [{"id": "a", "model": "m"}, {"id": "b", "model": "m"}],
            "conversations": [{"prompt": "TOPIC"}],
        },
        [{"content": f"Words {number}."} for number in range(6)],
    ),
    "free and shared": (
        {
            "mode": "free",
            "view": "shared",
            "rounds": 3,
            "agents": [{"id": "a", "model": "m"}, {"id": "b", "model": "m"}],
            "conversations": [{"prompt": "TOPIC"}],
        },
        [{"content": f"Words {number}."} for number in range(6)],
    ),
    "tools": (TOOLS, [CALL, {"tool_calls": [{"name": "add", "arguments": '{"a": 1,"b": 1}'}]}, {"content": "Seven."}]),
    "calls as text": (
        TOOLS,
        [{"content": '{"tool_calls": [{"name": "add", "arguments": {"a": 2, "b": 3}}]}'}, {"content": "Five."}],
    ),
    "retries": (RETRIES, [{"content": "Hm."}, {"content": "Well."}, {"content": "Perhaps."}, {"content": "yes"}]),
    "the author's words": (
        {
            **DEBATE,
            "prompts": {
                "context": "$who, one of $agents.",
                "cue": "Go, $agent ($round/$rounds).",
                "quote": "$who> $words",
                "invalid": "$reason!",
            },
        },
        [{"content": f"Words {number}."} for number in range(4)],
    ),
}


@pytest.fixture
def ports(free_ports: Callable[[int], int]) -> tuple[int, int]:
    return free_ports(1), free_ports(1)


def scripted(folder: Path, port: int, answers: list[object], **model: object) -> Document:
    """Return a model whose engine gives these answers in order."""
    (folder / "script").write_text(json.dumps(answers))
    (folder / "mytools.py").write_text(TOOL)
    made = scripted_model(port, slots=1, script=str(folder / "script"), record=str(folder / "record.jsonl"))
    return {**made, "tools": {"python": {"add": "mytools:add"}}, **model}


def prompts_of(service: Service, job: str) -> list[Document]:
    """Return all prompts of a job's turns, in the order in which their attempts began."""
    (talk,) = service.get(f"/v1/jobs/{job}/result")["conversations"]
    found: list[tuple[str, Document]] = []
    for turn in talk["turns"]:
        place = f"/v1/jobs/{job}/conversations/{talk['id']}/turns/{turn['agent']}/{turn['round']}/prompt"
        asked = service.get(place)["attempts"]
        assert len(asked) == len(turn["attempts"])
        found += zip((attempt["started_at"] for attempt in turn["attempts"]), asked, strict=True)
    return [prompt for _, prompt in sorted(found, key=lambda each: each[0])]


def last_of_each(requests: list[Document]) -> list[Document]:
    """Return the requests that no later one extends by tool calls: the last of each attempt."""
    return [
        request
        for request, following in zip(requests, [*requests[1:], None], strict=True)
        if following is None
        or following["messages"][: len(request["messages"])] != request["messages"]
        or following["messages"][len(request["messages"])]["role"] != "assistant"
        or not ({"tool", "user"} & {following["messages"][-1]["role"]})
        or "tools" not in request
    ]


@pytest.mark.system
@pytest.mark.parametrize("name", JOBS)
def test_recorded_prompts_equal_the_sent_ones_byte_for_byte(tmp_path: Path, ports: tuple[int, int], name: str) -> None:
    """Specification, "Prompts that were asked": prompts recorded by reference equal what the engine was sent."""
    job, answers = JOBS[name]
    with serving(tmp_path, ports[0], {"m": scripted(tmp_path, ports[1], answers)}) as service:
        posted = service.post_job(job)
        assert service.wait_ended(posted)["state"] == "completed"
        told = prompts_of(service, posted)
    sent = last_of_each(recorded(tmp_path / "record.jsonl"))
    assert [prompt["messages"] for prompt in told] == [request["messages"] for request in sent]
    for prompt, request in zip(told, sent, strict=True):
        assert prompt["params"] == {name: request[name] for name in prompt["params"]}
        assert [tool["function"] for tool in prompt["tools"]] == [tool["function"] for tool in request.get("tools", [])]


def test_a_choice_is_constrained_and_a_retry_samples_differently(tmp_path: Path, ports: tuple[int, int]) -> None:
    """Specification, "Constraints" and "Answer validation": each attempt records its outcome."""
    job, answers = JOBS["retries"]
    with serving(tmp_path, ports[0], {"m": scripted(tmp_path, ports[1], answers)}) as service:
        posted = service.post_job(job)
        service.wait_ended(posted)
        (talk,) = service.get(f"/v1/jobs/{posted}/result")["conversations"]
    requests = recorded(tmp_path / "record.jsonl")
    assert {request["grammar"] for request in requests} == {'root ::= "yes" | "no"\n'}
    assert [request["seed"] for request in requests] == [5, 5, 6, 7]
    assert [request["temperature"] for request in requests] == [0.1, 0.1, 0.3, 0.5]
    assert [len(request["messages"]) for request in requests] == [2, 4, 4, 4]
    (turn,) = talk["turns"]
    assert [attempt["reason"] for attempt in turn["attempts"]] == ["invalid_answer"] * 3 + [None]
    assert {attempt["constrained_by"] for attempt in turn["attempts"]} == {"grammar"}
    assert turn["role"] == "participant"


def test_a_role_is_in_the_prompt_and_in_the_transcript(tmp_path: Path, ports: tuple[int, int]) -> None:
    """Specification, "Words around a job"."""
    job, answers = JOBS["debate"]
    with serving(tmp_path, ports[0], {"m": scripted(tmp_path, ports[1], answers)}) as service:
        posted = service.post_job(job)
        service.wait_ended(posted)
        (talk,) = service.get(f"/v1/jobs/{posted}/result")["conversations"]
    assert {(turn["agent"], turn["role"]) for turn in talk["turns"]} == {("pro", "advocate"), ("con", "participant")}
    assert recorded(tmp_path / "record.jsonl")[0]["messages"][0]["content"].startswith("You are pro (advocate). ")


@pytest.mark.system
def test_a_conversation_that_has_begun_keeps_its_words(tmp_path: Path, ports: tuple[int, int]) -> None:
    """This holds over a restart with other texts in the configuration; a new conversation gets the new ones."""
    job, answers = JOBS["debate"]
    model = scripted(tmp_path, ports[1], [*answers, *answers], bios={"cue": "OLD $round"})
    model["args"]["interval"] = 0.3
    with serving(tmp_path, ports[0], {"m": model}) as service:
        posted = service.post_job(job)
        record = tmp_path / "record.jsonl"
        wait_for(lambda: record.exists() and len(recorded(record)) == 2, "two turns were asked")
        service.kill()
        text = service.config.read_text()
        assert "OLD $round" in text
        service.config.write_text(text.replace("OLD $round", "NEW $round"))
        service.start()
        service.wait_ended(posted)
        told = prompts_of(service, posted)
        other = service.post_job({**job, "name": "other"})
        service.wait_ended(other)
        assert [("OLD" in json.dumps(prompt)) for prompt in prompts_of(service, other)] == [False] * 4
    sent = [request["messages"] for request in recorded(record)]
    assert all("NEW" not in json.dumps(prompt) for prompt in told)
    assert all(prompt["messages"] in sent for prompt in told)


@pytest.mark.system
def test_an_unknown_turn_has_no_prompt(tmp_path: Path, ports: tuple[int, int]) -> None:
    """A turn that was not asked yet has none so far."""
    job, answers = JOBS["debate"]
    model = scripted(tmp_path, ports[1], answers)
    model["args"]["prefill"] = 60.0
    with serving(tmp_path, ports[0], {"m": model}) as service:
        posted = service.post_job(job)
        place = f"/v1/jobs/{posted}/conversations/c0/turns"
        wait_for(lambda: service.get(f"{place}/pro/0/prompt")["attempts"], "it is asked")
        assert service.get(f"{place}/con/1/prompt") == {"attempts": []}
        for path in ("nobody/0", "pro/2", "pro/-1"):
            refused = service.http.get(f"{place}/{path}/prompt")
            assert (refused.status_code, refused.json()["code"]) == (404, "turn_not_found")


def test_a_conversation_of_many_turns_is_cancelled(tmp_path: Path, ports: tuple[int, int]) -> None:
    """Turns that were never asked end in pieces, after the job has left the scheduler."""
    with serving(tmp_path, ports[0], {"m": scripted_model(ports[1], prefill=60.0)}) as service:
        posted = service.post_job(
            {"rounds": 900, "agents": [{"id": "a", "model": "m"}], "conversations": [{"prompt": "TOPIC"}]}
        )
        wait_for(lambda: service.get("/v1/status")["pools"]["in_flight"], "it talks")
        service.http.post(f"/v1/jobs/{posted}/cancel")
        assert service.wait_ended(posted)["progress"]["turns"]["cancelled"] == 900
