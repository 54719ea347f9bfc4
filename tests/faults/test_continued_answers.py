"""An answer goes on where its engine broke off: its words come once, and the record says where."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.service import Document, Service, recorded, scripted_model, serving

Ports = Callable[[int], int]
TOKENS = 12
LOOK = """
def look() -> int:
    with open("{ran}", "a") as file:
        file.write("ran\\n")
    return 5
"""
ANSWER = " ".join(f"word{number}" for number in range(TOKENS))


def job(continuation: object = "on", **agent: object) -> Document:
    params = {"max_tokens": 40, "seed": 5}
    return {
        "continuation": continuation,
        "agents": [{"id": "a", "model": "m", "params": params, **agent}],
        "conversations": [{"id": "c", "prompt": "Go."}],
    }


def turn_of(service: Service, document: Document) -> dict[str, Any]:
    job_id = service.post_job(document)
    assert service.wait_ended(job_id)["state"] == "completed"
    turn: dict[str, Any]
    (turn,) = service.get(f"/v1/jobs/{job_id}/conversations/c")["turns"]
    return turn


def chats(record: Path) -> list[dict[str, Any]]:
    return [each for each in recorded(record) if each.get("stream")]


def dying(folder: Path, port: int, **flags: object) -> Document:
    """Return a model whose engine ends after seven tokens of its first answer."""
    given = {"goes_on": "kept", "tokens": TOKENS, "die_after": 7, "die_once": str(folder / "died")}
    model = scripted_model(port)
    return {**model, "args": {**given, "record": str(folder / "record"), **flags}}


def test_an_answer_goes_on_after_its_engine_has_died(tmp_path: Path, free_ports: Ports) -> None:
    """Its budget of tokens counts once, its usage too, and a seed gives another one."""
    with serving(tmp_path, free_ports(1), {"m": dying(tmp_path, free_ports(1))}) as service:
        turn = turn_of(service, job())
    first, second = chats(tmp_path / "record")
    assert turn["text"] == ANSWER
    assert turn["usage"] == {"prompt_tokens": 7, "completion_tokens": TOKENS, "cached_tokens": 0}
    assert turn["continued"] == [{"at_tokens": 7, "because": "engine_died", "worker": "m-0"}]
    assert [each["text"] for each in turn["attempts"]] == [ANSWER.partition(" word7")[0], ANSWER]
    assert second["messages"] == [
        *first["messages"],
        {"role": "assistant", "content": turn["attempts"][0]["text"]},
    ]
    assert (first["max_tokens"], second["max_tokens"]) == (40, 33)
    assert first["seed"] != second["seed"]


@pytest.mark.parametrize(
    ("flags", "agent"),
    [
        pytest.param({"goes_on": "rewritten"}, {}, id="a template that rewrites it"),
        pytest.param({"goes_on": "unlike"}, {}, id="an engine that goes on with other words"),
        pytest.param({"goes_on": "refused"}, {}, id="an engine that refuses it"),
        pytest.param({"goes_on": "declined"}, {}, id="an engine that fails with it"),
        pytest.param({"goes_on": "closed"}, {}, id="an engine that closes its connection on it"),
        pytest.param({}, {"params": {"presence_penalty": 0.5}}, id="a penalty on its own words"),
        pytest.param({}, {"continuation": "off"}, id="a job that wants none"),
    ],
)
def test_an_answer_that_cannot_go_on_starts_over(
    tmp_path: Path, free_ports: Ports, flags: dict[str, object], agent: dict[str, object]
) -> None:
    """Its words are whole all the same, and the tokens that were not used do not count as its own."""
    with serving(tmp_path, free_ports(1), {"m": dying(tmp_path, free_ports(1), **flags)}) as service:
        turn = turn_of(service, job(**agent))
    assert turn["text"] == ANSWER
    assert turn["continued"] == []
    assert turn["usage"]["completion_tokens"] == TOKENS
    assert "continue_final_message" not in chats(tmp_path / "record")[-1]


@pytest.mark.parametrize("how", ["rewritten", "declined"])
def test_tokens_that_are_not_gone_on_with_are_wasted(tmp_path: Path, free_ports: Ports, how: str) -> None:
    """They counted as the answer's when the engine died; the attempt that starts over takes them back."""
    with serving(tmp_path, free_ports(1), {"m": dying(tmp_path, free_ports(1), goes_on=how)}) as service:
        turn_of(service, job())
        (row,) = service.get("/v1/usage")["usage"]
    assert (row["answer_tokens"], row["wasted_tokens"]) == (TOKENS, 7)


def test_words_that_may_begin_a_stop_word_are_not_kept(tmp_path: Path, free_ports: Ports) -> None:
    """The engine writes them again: it would not find a stop word that begins before the break."""
    with serving(tmp_path, free_ports(1), {"m": dying(tmp_path, free_ports(1))}) as service:
        turn = turn_of(service, job(params={"stop": ["rd6 and more"]}))
    assert turn["text"] == ANSWER
    assert turn["continued"][0]["at_tokens"] == 6


def test_calls_that_were_answered_are_not_made_again(tmp_path: Path, free_ports: Ports) -> None:
    """The message after them goes on; the next attempt counts its calls from there."""
    script = [{"content": "I look.", "tool_calls": [{"name": "look", "arguments": "{}"}]}, {"content": ANSWER}]
    (tmp_path / "script").write_text(json.dumps(script))
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    (tmp_path / "mytools.py").write_text(LOOK.format(ran=tmp_path / "ran"))
    model = {
        **dying(tmp_path, free_ports(1), script=str(tmp_path / "script")),
        "tools": {"python": {"look": "mytools:look"}},
    }
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        turn = turn_of(service, job(tools=[tool]))
    assert (tmp_path / "ran").read_text().splitlines() == ["ran"]
    assert (turn["text"], len(turn["tool_calls"])) == (ANSWER, 1)
    assert turn["continued"][0]["at_tokens"] == 7 + 4


def test_a_constrained_answer_goes_on_within_its_thought(tmp_path: Path, free_ports: Ports) -> None:
    """Its grammar begins with the rest of the thought, so the answer behind it has the form."""
    (tmp_path / "script").write_text(json.dumps([{"content": "yes"}]))
    model = dying(tmp_path, free_ports(1), script=str(tmp_path / "script"), muses=9, thinks="first")
    choices = {"choices": ["yes", "no"]}
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        turn = turn_of(service, job(validation=choices))
        (row,) = service.get("/v1/usage")["usage"]
    first, second = chats(tmp_path / "record")
    half = " ".join(f"thought{number}" for number in range(6))
    assert turn["text"] == "yes"
    assert turn["thinking"] == f"{half} thought6 thought7 thought8"
    assert turn["continued"] == [{"at_tokens": 6, "because": "engine_died", "worker": "m-0"}]
    assert second["messages"][-1] == {"role": "assistant", "content": "", "reasoning_content": half}
    assert "root ::= thought answer" in second["grammar"]
    assert "grammar" in first
    assert (row["answer_tokens"], row["wasted_tokens"]) == (10, 0)


def test_a_constrained_answer_is_written_again_after_its_thought(tmp_path: Path, free_ports: Ports) -> None:
    """No grammar can begin in the middle of its form: the thought is kept, and the words behind it are not."""
    (tmp_path / "script").write_text(json.dumps([{"content": "yes it is"}]))
    model = dying(tmp_path, free_ports(1), script=str(tmp_path / "script"), muses=5, thinks="first")
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        turn = turn_of(service, job(validation={"pattern": "yes it is|no"}))
        (row,) = service.get("/v1/usage")["usage"]
    _, second = chats(tmp_path / "record")
    assert turn["text"] == "yes it is"
    assert turn["continued"][0]["at_tokens"] == 4
    assert second["messages"][-1]["content"] == ""
    assert (row["answer_tokens"], row["wasted_tokens"]) == (8, 2)
