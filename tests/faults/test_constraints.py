"""Answers that an engine holds its model to, and engines that do not take that."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.behaviour.test_prompts import prompts_of
from tests.harness.service import Document, recorded, scripted_model, serving
from transport.dialects.dialect import PLAIN
from transport.dialects.llama_server import LLAMA_SERVER
from transport.dialects.vllm import VLLM
from transport.request import Constraint, Thought
from workers.requests.constraints import ConstraintPlan, EngineConstraints

CHOICES = Constraint(choices=("yes", "no"))
SCHEMA: dict[str, object] = {"type": "object", "properties": {"age": {"type": "integer"}}}
SENT, BOTH, TOLD = (
    ConstraintPlan(is_sent=True, is_told=False),
    ConstraintPlan(is_sent=True, is_told=True),
    ConstraintPlan(is_sent=False, is_told=True),
)
AS_JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}}
THOUGHT = 'thought ::= ([^<] | "<" [^/] | "</" [^t])* "</think>" [ \\t\\n]*\n'
QUOTED = {"type": "string", "enum": ["yes", "no"]}


@pytest.mark.parametrize(
    ("constraint", "llama", "vllm", "plain"),
    [
        (
            CHOICES,
            {"grammar": 'root ::= "yes" | "no"\n'},
            {"structured_outputs": {"choice": ["yes", "no"]}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": QUOTED}}},
        ),
        (
            Constraint(pattern="^[0-9]$"),
            {"grammar": "root ::= [0-9]\n"},
            {"structured_outputs": {"regex": "([0-9])"}},
            None,
        ),
        (Constraint(pattern=r"(?=a)"), None, {"structured_outputs": {"regex": "((?=a))"}}, None),
        (Constraint(json_schema=SCHEMA), AS_JSON, {"structured_outputs": {"json": SCHEMA}}, AS_JSON),
        (Constraint(json_schema=SCHEMA, thought=Thought.OPTIONAL), None, None, None),
        (
            Constraint(choices=("a.b",), thought=Thought.OPTIONAL),
            {"grammar": f'root ::= ("<think>" thought)? answer\nanswer ::= "a.b"\n{THOUGHT}'},
            {"structured_outputs": {"regex": r"(<think>[^<]*</think>\s*)?(a\.b)"}},
            None,
        ),
    ],
)
def test_each_engine_is_asked_in_its_own_way(
    constraint: Constraint, llama: Document | None, vllm: Document | None, plain: Document | None
) -> None:
    """Specification, "Constraints"; None is told in words."""
    assert LLAMA_SERVER.constrain(constraint) == llama
    assert VLLM.constrain(constraint) == vllm
    assert PLAIN.constrain(constraint) == plain


def test_an_attached_server_is_believed_once_it_has_shaped_an_answer() -> None:
    """A choice in quotes is what no words ask for; an answer without them takes that back."""
    known = EngineConstraints(PLAIN)
    assert known.plan(CHOICES) == BOTH
    known.note_answer(CHOICES, "yes")
    assert known.plan(CHOICES) == BOTH
    known.note_answer(CHOICES, '"yes"')
    assert known.plan(CHOICES) == SENT
    known.note_answer(Constraint(json_schema=SCHEMA), '{"age": 5}')
    assert known.plan(CHOICES) == SENT
    known.note_answer(CHOICES, "I would say yes.")
    assert known.plan(CHOICES) == BOTH
    known.note_answer(Constraint(json_schema=SCHEMA), '{"age": 5}')
    assert known.plan(CHOICES) == BOTH, "words may bring that about"
    known.note_refused(CHOICES)
    assert known.plan(CHOICES) == TOLD


def test_an_engine_of_ours_is_believed_until_it_refuses() -> None:
    """It keeps a constraint or says that it cannot."""
    known = EngineConstraints(LLAMA_SERVER)
    assert known.plan(CHOICES) == SENT
    assert known.plan(Constraint(pattern="(?=a)")) == TOLD
    known.note_refused(CHOICES)
    assert known.plan(CHOICES) == TOLD
    assert known.plan(Constraint(choices=("a",))) == SENT


TOOL = "def look(what): return {'seen': what}"
LOOK: Document = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"what": {"type": "string"}}}},
}
CALL = {"tool_calls": [{"id": "x", "name": "look", "arguments": '{"what": "price"}'}]}
Ask = Callable[..., tuple[Document, list[Document]]]


@pytest.fixture
def ask(tmp_path: Path, free_ports: Callable[[int], int]) -> Ask:
    """Ask one agent, whose engine gives these answers in their order; return its turn, and what the engine was sent."""

    def ask(
        answers: list[object], agent: Document, args: Document | None = None, **tools: object
    ) -> tuple[Document, list[Document]]:
        (tmp_path / "mytools.py").write_text(TOOL)
        (tmp_path / "script").write_text(json.dumps(answers))
        files: Document = {"script": str(tmp_path / "script"), "record": str(tmp_path / "record")}
        made = {
            **scripted_model(free_ports(1), **files, **(args or {})),
            "tools": {"python": {"look": "mytools:look"}, **tools},
        }
        with serving(tmp_path, free_ports(1), {"m": made}) as service:
            job = service.post_job(
                {"agents": [{"id": "a", "model": "m", **agent}], "conversations": [{"prompt": "Go."}]}
            )
            service.wait_ended(job)
            (talk,) = service.get(f"/v1/jobs/{job}/result")["conversations"]
        return talk["turns"][0], recorded(tmp_path / "record")

    return ask


def test_with_tools_only_the_answer_is_held_to_it(ask: Ask) -> None:
    """A model that may call tools is free to; the answer that it gives instead is asked for again, constrained."""
    agent = {"tools": [LOOK], "validation": {"choices": ["yes", "no"]}}
    turn, sent = ask([CALL, {"content": "Well, it costs five."}, {"content": "yes"}], agent)
    assert (turn["state"], turn["text"], len(turn["attempts"])) == ("completed", "yes", 1)
    assert [("grammar" in request, request.get("tool_choice")) for request in sent] == [
        (False, None),
        (False, None),
        (True, "none"),
    ]
    assert sent[1]["messages"] == sent[2]["messages"]
    assert turn["attempts"][0]["constrained_by"] == "grammar"


def test_an_answer_that_is_valid_anyhow_is_not_asked_for_again(ask: Ask) -> None:
    """Beside tools, where nothing held it."""
    turn, sent = ask([CALL, {"content": "no"}], {"tools": [LOOK], "validation": {"choices": ["yes", "no"]}})
    assert (turn["text"], len(sent), turn["attempts"][0]["constrained_by"]) == ("no", 2, None)


@pytest.mark.system
def test_an_authors_own_constraint_wins_and_waits_for_the_last_answer(ask: Ask) -> None:
    """With tools it would force the model out of every call, or into one for ever."""
    own = {"type": "json_object"}
    agent = {"tools": [LOOK], "params": {"response_format": own}, "validation": {"json_schema": SCHEMA}}
    turn, sent = ask([CALL, {"content": "Five."}, {"content": '{"age": 5}'}], agent)
    assert turn["text"] == '{"age": 5}'
    assert [request.get("response_format") for request in sent] == [None, None, own]
    assert turn["attempts"][0]["constrained_by"] == "response_format"


def test_constrain_off_sends_and_tells_nothing(ask: Ask) -> None:
    """For whom shall argue first, and choose then."""
    turn, sent = ask([{"content": "After all: yes"}], {"validation": {"choices": ["yes", "no"], "constrain": "off"}})
    assert (turn["text"], turn["attempts"][0]["constrained_by"]) == ("After all: yes", None)
    assert "grammar" not in sent[0]
    assert "exactly one of" not in json.dumps(sent[0]["messages"])


def test_a_refused_constraint_is_told_in_words(ask: Ask) -> None:
    """Once in the same attempt, and from then on at once; the engine is the judge of what it takes."""
    body = '{"error": {"code": 400, "message": "failed to parse grammar", "type": "invalid_request_error"}}'
    args = {"reject": 400, "reject-body": body, "reject-first": 1}
    turn, sent = ask([{"content": "yes"}], {"validation": {"choices": ["yes", "no"]}}, args=args)
    assert (turn["state"], turn["text"], len(turn["attempts"])) == ("completed", "yes", 1)
    (taken,) = sent  # what it refuses it does not record
    assert "grammar" not in taken
    assert "Answer with exactly one of: yes, no." in taken["messages"][0]["content"]
    assert turn["attempts"][0]["constrained_by"] is None


def test_a_constraint_that_is_refused_after_tools_costs_no_call(ask: Ask) -> None:
    """The attempt goes on where it was: what was called stays called, and is not called again."""
    body = '{"error": {"code": 400, "message": "failed to parse grammar", "type": "invalid_request_error"}}'
    args = {"reject": 400, "reject-body": body, "reject-on": '"grammar"'}
    agent = {"tools": [LOOK], "validation": {"choices": ["yes", "no"], "retries": 0}}
    turn, sent = ask([CALL, {"content": "Well."}, {"content": "yes"}], agent, args=args)
    assert (turn["state"], turn["text"], len(turn["attempts"])) == ("completed", "yes", 1)
    assert [call["result"] for call in turn["tool_calls"]] == [{"seen": "price"}]
    assert sent[-1]["messages"][-1]["role"] == "tool"
    assert sent[-1]["messages"][1:] == sent[-2]["messages"][1:], (
        "it is not told of its own calls as of an earlier attempt's"
    )
    assert "Answer with exactly one of: yes, no." in sent[-1]["messages"][0]["content"]


@pytest.mark.system
def test_wrong_arguments_may_be_told(ask: Ask) -> None:
    """``tools.arguments: tell``: the model hears of them first, within its budget."""
    wrong = {"tool_calls": [{"id": "x", "name": "look", "arguments": '{"what": 5}'}]}
    turn, sent = ask([wrong, CALL, {"content": "Done."}], {"tools": [LOOK]}, arguments="tell")
    assert (turn["state"], turn["text"]) == ("completed", "Done.")
    assert [call["reason"] for call in turn["tool_calls"]] == ["tool_arguments", None]
    assert "is not of type 'string'" in sent[1]["messages"][-1]["content"]
    failed, _ = ask([wrong], {"tools": [LOOK]}, arguments="fail")
    assert (failed["state"], failed["reason"]) == ("failed", "tool_arguments")


@pytest.mark.system
def test_the_same_call_with_the_same_result_ends_the_loop(ask: Ask) -> None:
    """Three times running: then one answer, and a further call fails the turn."""
    turn, sent = ask([CALL, CALL, CALL, {"content": "Five."}], {"tools": [LOOK]})
    assert (turn["state"], turn["text"], len(sent)) == ("completed", "Five.", 4)
    assert [request["messages"][-1]["content"].rsplit("\n\n")[-1] for request in sent[1:]] == [
        "(7 tool iterations left)",
        "(6 tool iterations left)",
        "(no tool iterations left)",
    ]
    assert sent[3]["messages"][0] == sent[0]["messages"][0], "the BIOS tells the whole budget, and stays as it is"
    stuck, _ = ask([CALL, CALL, CALL, CALL], {"tools": [LOOK]})
    assert (stuck["state"], stuck["reason"]) == ("failed", "tool_budget")
    assert "the same calls brought the same results" in stuck["detail"]
    asks = [CALL] * 6 + [{"content": "It is there."}]
    turn, _ = ask(asks, {"tools": [LOOK]}, stuck=None)
    assert (turn["state"], turn["text"]) == ("completed", "It is there."), "an agent that polls has its iterations"
    turn, _ = ask([CALL, CALL, CALL], {"tools": [LOOK]}, stuck=2)
    assert (turn["state"], turn["detail"][-70:].count("2 iterations")) == ("failed", 1)


HELD = 'root ::= "yes" | "no"\n'
FREE = 'answer ::= "yes" | "no"\n'
FIRST = f"root ::= thought answer\n{FREE}{THOUGHT}"
MAYBE = f'root ::= ("<think>" thought)? answer\n{FREE}{THOUGHT}'
ENDED = f'root ::= "</think>" [ \\t\\n]* answer\n{FREE}'
JUDGE: Document = {"id": "a", "validation": {"choices": ["yes", "no"]}}
SILENT: Document = {"chat_template_kwargs": {"enable_thinking": False}}
THOUGHTFUL, THOUGHTLESS = {"content": "Hm <b>.</think>\n\nyes"}, {"content": "yes"}
Think = Callable[..., tuple[list[Document], list[Document], list[Document]]]


@pytest.fixture
def think(tmp_path: Path, free_ports: Callable[[int], int]) -> Think:
    """Ask agents of an engine with a template; return their turns, what it was sent, and what it had to render.

    What the service tells of their prompts is what was sent, byte for byte.
    """

    def think(
        answers: list[object], *agents: Document, rounds: int = 1, **args: object
    ) -> tuple[list[Document], list[Document], list[Document]]:
        (tmp_path / "script").write_text(json.dumps(answers))
        flags: Document = {"script": str(tmp_path / "script"), "record": str(tmp_path / "record"), **args}
        with serving(tmp_path, free_ports(1), {"m": scripted_model(free_ports(1), **flags)}) as service:
            job = service.post_job(
                {
                    "agents": [{"model": "m", **agent} for agent in agents],
                    "conversations": [{"prompt": "Go."}],
                    "rounds": rounds,
                }
            )
            service.wait_ended(job)
            (talk,) = service.get(f"/v1/jobs/{job}/result")["conversations"]
            told = prompts_of(service, job)
        requests = recorded(tmp_path / "record")
        sent = [request for request in requests if "stream" in request]
        for asked, request in zip(told, sent, strict=True):
            assert asked["messages"] == request["messages"]
            assert asked["params"] == {name: request[name] for name in asked["params"]}
            assert asked["params"].get("grammar") == request.get("grammar")
        return talk["turns"], sent, [request for request in requests if "stream" not in request]

    return think


@pytest.mark.parametrize(
    ("thinks", "grammar", "answer"),
    [
        ("first", FIRST, THOUGHTFUL),
        ("maybe", MAYBE, {"reasoning": "Hm.", "content": "\n\nyes"}),
        ("never", HELD, THOUGHTLESS),
        (None, HELD, THOUGHTLESS),
    ],
)
def test_a_thought_stands_where_the_template_has_it(
    think: Think, thinks: str | None, grammar: str, answer: Document
) -> None:
    """Before the answer, which is the choice alone; an engine that cannot tell is held from the first token."""
    (turn,), sent, rendered = think([answer], JUDGE, thinks=thinks)
    assert (turn["state"], turn["text"], len(turn["attempts"])) == ("completed", "yes", 1)
    assert [request["grammar"] for request in sent] == [grammar]
    assert len(rendered) == (thinks is not None)


@pytest.mark.system
@pytest.mark.parametrize(
    ("agent", "thinks", "answers", "grammars"),
    [
        (JUDGE, "first", ["Hm, yes or no: let me s", "</think>\n\nyes"], [FIRST, ENDED]),
        ({**JUDGE, "markup": True}, "first", ["Hm, yes or no: let me s", "</think>\n\nyes"], [FIRST, ENDED]),
        (JUDGE, "maybe", ["<think>Hm, let me s", "yes"], [MAYBE, HELD]),
        ({**JUDGE, "markup": True}, "never", ["<think>Hm, let me s", "yes"], [MAYBE, MAYBE]),
    ],
)
def test_a_retry_answers_at_once(
    think: Think, agent: Document, thinks: str, answers: list[str], grammars: list[str]
) -> None:
    """A thought that was cut left no room; one that the prompt begins is ended, or the answer would be part of it."""
    (turn,), sent, rendered = think([{"content": answer} for answer in answers], agent, thinks=thinks)
    assert (turn["state"], turn["text"]) == ("completed", "yes")
    assert [attempt["reason"] for attempt in turn["attempts"]] == ["invalid_answer", None]
    assert [request["grammar"] for request in sent] == grammars
    assert len(rendered) == 1


def test_an_engine_is_asked_once_for_each_way_to_render(think: Think) -> None:
    """Agents whose parameters shape the prompt otherwise may have no thought; other parameters change nothing."""
    agents = (
        {**JUDGE, "params": {**SILENT, "temperature": 0.5}},
        {**JUDGE, "id": "b", "speak_after_within_round": ["a"]},
        {**JUDGE, "id": "c", "speak_after_within_round": ["b"], "params": {"temperature": 0.7}},
    )
    turns, sent, rendered = think([THOUGHTLESS, THOUGHTFUL, THOUGHTFUL] * 2, *agents, rounds=2, thinks="first")
    assert [turn["text"] for turn in turns] == ["yes"] * 6
    assert [request["grammar"] for request in sent] == [HELD, FIRST, FIRST] * 2
    probe = {"messages": [{"role": "user", "content": "?"}]}
    assert rendered == [{**SILENT, **probe}, probe]


def test_the_next_life_of_an_engine_is_asked_anew(think: Think, tmp_path: Path) -> None:
    """It may have another template."""
    args = {"die-on": "Go.", "die-once": str(tmp_path / "died")}
    (turn,), sent, rendered = think([THOUGHTFUL], JUDGE, thinks="first", **args)
    assert (turn["text"], [request["grammar"] for request in sent]) == ("yes", [FIRST, FIRST])
    assert len(rendered) == 2


def test_a_schema_is_sent_as_it_is(think: Think) -> None:
    """Where a thought stands before it is llama.cpp's own affair."""
    judge = {**JUDGE, "validation": {"json_schema": SCHEMA}}
    (turn,), sent, rendered = think([{"content": 'Hm.</think>{"age": 5}'}], judge, thinks="first")
    assert (turn["text"], turn["attempts"][0]["constrained_by"]) == ('{"age": 5}', "response_format")
    assert (sent[0]["response_format"], rendered) == (AS_JSON["response_format"], [])
