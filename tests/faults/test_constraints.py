"""Answers that an engine constrains, and engines that accept no constraints."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.behaviour.test_prompts import prompts_of
from tests.harness.processes import running_program
from tests.harness.service import Document, recorded, scripted_model, serving
from transport.dialects.dialect import PLAIN
from transport.dialects.llama_server import LLAMA_SERVER
from transport.dialects.vllm import VLLM
from transport.events import TextDelta, Usage
from transport.request import Constraint, Thought
from workers.requests.constraints import AGAIN_S, TRIAL_WORDS, ConstraintPlan, EngineConstraints
from workers.requests.generation import Generation

CHOICES = Constraint(choices=("yes", "no"))
SCHEMA: dict[str, object] = {"type": "object", "properties": {"age": {"type": "integer"}}}
SENT, TOLD = ConstraintPlan(is_sent=True, is_told=False), ConstraintPlan(is_sent=False, is_told=True)
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
def test_each_engine_gets_constraints_in_its_own_form(
    constraint: Constraint, llama: Document | None, vllm: Document | None, plain: Document | None
) -> None:
    """Specification, "Constraints"; None means words in the prompt."""
    assert LLAMA_SERVER.constrain(constraint) == llama
    assert VLLM.constrain(constraint) == vllm
    assert PLAIN.constrain(constraint) == plain


async def ask_nothing(_params: Mapping[str, object], _tools: tuple[Mapping[str, Any], ...]) -> Generation | None:
    """Stand for an engine that needs no trial."""
    raise AssertionError("it was tried")


class Tried:
    """A server on trial: it answers ``words``, and counts ``tokens`` in a prompt, ``more`` of them with tools."""

    def __init__(self, words: str | None, tokens: int = 7, more: int = 0) -> None:
        self.words, self.tokens, self.more = words, tokens, more
        self.asked: list[Mapping[str, object]] = []

    async def ask(self, params: Mapping[str, object], tools: tuple[Mapping[str, Any], ...]) -> Generation | None:
        self.asked.append(params)
        if self.words is None:
            return None
        generation = Generation(lambda: 0.0)
        generation.receive(TextDelta(self.words))
        generation.receive(Usage(self.tokens + self.more * len(tools), 1, 0))
        return generation


@pytest.mark.parametrize(
    ("words", "plan", "ignored"),
    [('"zq-4417"', SENT, ()), ("zq-4417", TOLD, ("response_format",)), ("Hello!", TOLD, ("response_format",)),
     ('"yes"', TOLD, ("response_format",)), ("", TOLD, ()), (None, TOLD, ())],
)  # fmt: skip
async def test_an_attached_server_is_tried_with_choices_that_no_model_would_say(
    words: str | None, plan: ConstraintPlan, ignored: tuple[str, ...]
) -> None:
    """Once per incarnation; an inconclusive trial is repeated later."""
    server, now = Tried(words), [0.0]
    known = EngineConstraints(PLAIN, server.ask, lambda: now[0])
    for _ in range(3):
        await known.settle(1, has_constraint=True, has_tools=False)
        assert (known.plan(CHOICES), known.ignored) == (plan, ignored)
    assert len(server.asked) == 1
    now[0] = AGAIN_S
    await known.settle(1, has_constraint=True, has_tools=False)
    assert len(server.asked) == (1 if words else 2)
    await known.settle(2, has_constraint=True, has_tools=False)
    assert len(server.asked) == (2 if words else 3), "another may be there by now"


async def test_an_answer_without_its_form_revokes_the_trial() -> None:
    """The model was not constrained; a refusal counts the same."""
    known = EngineConstraints(PLAIN, Tried('"zq-4417"').ask, lambda: 0.0)
    await known.settle(1, has_constraint=True, has_tools=False)
    known.note_answer(CHOICES, '"yes"')
    known.note_answer(Constraint(json_schema=SCHEMA), '{"age": 5}')
    assert known.plan(CHOICES) == SENT
    known.note_refused(CHOICES)
    assert (known.plan(CHOICES), known.plan(Constraint(choices=("a",)))) == (TOLD, SENT)
    known.note_answer(Constraint(choices=("a",)), "I would say a.")
    assert (known.plan(Constraint(choices=("a",))), known.ignored) == (TOLD, ("response_format",))


@pytest.mark.parametrize(
    ("tokens", "more", "ignored"), [(7, 40, ()), (7, 0, ("tools",)), (0, 0, ())], ids=["read", "ignored", "not told"]
)
async def test_tools_that_add_no_tokens_to_a_prompt_are_not_in_it(
    tokens: int, more: int, ignored: tuple[str, ...]
) -> None:
    """A server that reports no tokens is not suspected."""
    server = Tried("Hello!", tokens, more)
    known = EngineConstraints(PLAIN, server.ask, lambda: 0.0)
    for _ in range(2):
        await known.settle(1, has_constraint=False, has_tools=True)
        assert (known.ignored, len(server.asked)) == (ignored, 2)


async def test_an_engine_of_ours_is_believed_until_it_refuses() -> None:
    """It keeps a constraint or says that it cannot."""
    known = EngineConstraints(LLAMA_SERVER, ask_nothing, lambda: 0.0)
    await known.settle(1, has_constraint=True, has_tools=True)
    assert known.plan(CHOICES) == SENT
    assert known.plan(Constraint(pattern="(?=a)")) == TOLD
    known.note_refused(CHOICES)
    assert known.plan(CHOICES) == TOLD
    assert known.plan(Constraint(choices=("a",))) == SENT


def test_a_server_that_ignores_a_constraint_is_found(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """The attempts claim no constraint, the prompt asks in words, and the status shows what is ignored."""
    port = free_ports(1)
    (tmp_path / "answers").write_text(json.dumps({"judge": {"status": 200, "body": WHOLE}}))
    files = ["--answers", str(tmp_path / "answers"), "--record", str(tmp_path / "record")]
    model = {"engine": "attached", "url": f"http://127.0.0.1:{port}/v1", "slots": 4}
    with (
        running_program([sys.executable, "-I", "-S", str(REPLAY), "--port", str(port), *files]),
        serving(tmp_path / "s", free_ports(1), {"m": model}) as service,
    ):
        agent = {"id": "a", "model": "m", "validation": {"choices": ["yes", "no"]}}
        job = service.post_job({"agents": [agent], "conversations": [{"prompt": "<judge>"}] * 6})
        service.wait_ended(job)
        turns = [talk["turns"][0] for talk in service.get(f"/v1/jobs/{job}/result")["conversations"]]
        assert service.get("/v1/workers/m-0")["ignored"] == ["response_format"]
    assert [(turn["state"], turn["text"]) for turn in turns] == [("completed", "Yes, by all means.")] * 6
    assert {attempt["constrained_by"] for turn in turns for attempt in turn["attempts"]} == {None}
    sent = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
    assert [TRIAL_WORDS in json.dumps(each) for each in sent if "response_format" in each] == [True], "once"
    told = [each for each in sent if "<judge>" in json.dumps(each)]
    assert all("Answer with exactly one of: yes, no." in json.dumps(each) for each in told)


WHOLE = '{"choices": [{"index": 0, "message": {"content": "Yes, by all means."}, "finish_reason": "stop"}]}'
REPLAY = Path(__file__).parents[1] / "harness" / "programs" / "replay.py"
TOOL = "def look(what): return {'seen': what}"
LOOK: Document = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"what": {"type": "string"}}}},
}
CALL = {"tool_calls": [{"id": "x", "name": "look", "arguments": '{"what": "price"}'}]}
Ask = Callable[..., tuple[Document, list[Document]]]


@pytest.fixture
def ask(tmp_path: Path, free_ports: Callable[[int], int]) -> Ask:
    """Ask one agent, whose engine gives these answers in order.

    Return its turn, and the requests that the engine got.
    """

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


def test_with_tools_only_the_answer_is_constrained(ask: Ask) -> None:
    """A model with tools may make calls. Without a call, it is asked for its answer again, constrained."""
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


def test_a_valid_free_answer_is_not_asked_for_again(ask: Ask) -> None:
    """Beside tools, where it was unconstrained."""
    turn, sent = ask([CALL, {"content": "no"}], {"tools": [LOOK], "validation": {"choices": ["yes", "no"]}})
    assert (turn["text"], len(sent), turn["attempts"][0]["constrained_by"]) == ("no", 2, None)


@pytest.mark.system
def test_an_authors_own_constraint_wins_and_waits_for_the_last_answer(ask: Ask) -> None:
    """With tools it would prevent every call, or force calls for ever."""
    own = {"type": "json_object"}
    agent = {"tools": [LOOK], "params": {"response_format": own}, "validation": {"json_schema": SCHEMA}}
    turn, sent = ask([CALL, {"content": "Five."}, {"content": '{"age": 5}'}], agent)
    assert turn["text"] == '{"age": 5}'
    assert [request.get("response_format") for request in sent] == [None, None, own]
    assert turn["attempts"][0]["constrained_by"] == "response_format"


def test_constrain_off_sends_no_constraint(ask: Ask) -> None:
    """For agents that should argue first and choose later."""
    turn, sent = ask([{"content": "After all: yes"}], {"validation": {"choices": ["yes", "no"], "constrain": "off"}})
    assert (turn["text"], turn["attempts"][0]["constrained_by"]) == ("After all: yes", None)
    assert "grammar" not in sent[0]
    assert "exactly one of" not in json.dumps(sent[0]["messages"])


def test_a_refused_constraint_is_replaced_by_words(ask: Ask) -> None:
    """Within the same attempt, and in later ones from the start; the engine decides what it accepts."""
    body = '{"error": {"code": 400, "message": "failed to parse grammar", "type": "invalid_request_error"}}'
    args = {"reject": 400, "reject-body": body, "reject-first": 1}
    turn, sent = ask([{"content": "yes"}], {"validation": {"choices": ["yes", "no"]}}, args=args)
    assert (turn["state"], turn["text"], len(turn["attempts"])) == ("completed", "yes", 1)
    (taken,) = sent  # refused requests are not recorded
    assert "grammar" not in taken
    assert "Answer with exactly one of: yes, no." in taken["messages"][0]["content"]
    assert turn["attempts"][0]["constrained_by"] is None


def test_a_constraint_refused_after_tools_repeats_no_call(ask: Ask) -> None:
    """The attempt goes on where it was: calls that were made are not made again."""
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
def test_wrong_arguments_may_go_back_to_the_model(ask: Ask) -> None:
    """With ``tools.arguments: tell`` the model first gets them as an error, within its budget."""
    wrong = {"tool_calls": [{"id": "x", "name": "look", "arguments": '{"what": 5}'}]}
    turn, sent = ask([wrong, CALL, {"content": "Done."}], {"tools": [LOOK]}, arguments="tell")
    assert (turn["state"], turn["text"]) == ("completed", "Done.")
    assert [call["reason"] for call in turn["tool_calls"]] == ["tool_arguments", None]
    assert "is not of type 'string'" in sent[1]["messages"][-1]["content"]
    failed, _ = ask([wrong], {"tools": [LOOK]}, arguments="fail")
    assert (failed["state"], failed["reason"]) == ("failed", "tool_arguments")


@pytest.mark.system
def test_the_same_call_with_the_same_result_ends_the_loop(ask: Ask) -> None:
    """After three in a row the model answers once, and a further call fails the turn."""
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
    """Ask agents of an engine with a template; return their turns, the engine's requests, and what it had to render.

    The prompts that the service reports equal those sent, byte for byte.
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
def test_a_thought_comes_where_the_template_puts_it(
    think: Think, thinks: str | None, grammar: str, answer: Document
) -> None:
    """Before the answer, which is the choice alone.

    An engine that cannot render is constrained from the first token.
    """
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
def test_a_retry_answers_without_a_thought(
    think: Think, agent: Document, thinks: str, answers: list[str], grammars: list[str]
) -> None:
    """A thought that was cut off left no room.

    A thought that the prompt opens is closed, or the answer would be part of it.
    """
    (turn,), sent, rendered = think([{"content": answer} for answer in answers], agent, thinks=thinks)
    assert (turn["state"], turn["text"]) == ("completed", "yes")
    assert [attempt["reason"] for attempt in turn["attempts"]] == ["invalid_answer", None]
    assert [request["grammar"] for request in sent] == grammars
    assert len(rendered) == 1


def test_an_engine_is_asked_once_for_each_way_to_render(think: Think) -> None:
    """Parameters that shape the prompt may switch thoughts off; other parameters change nothing."""
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


def test_the_next_incarnation_of_an_engine_is_tried_again(think: Think, tmp_path: Path) -> None:
    """It may have another template."""
    args = {"die-on": "Go.", "die-once": str(tmp_path / "died")}
    (turn,), sent, rendered = think([THOUGHTFUL], JUDGE, thinks="first", **args)
    assert (turn["text"], [request["grammar"] for request in sent]) == ("yes", [FIRST, FIRST])
    assert len(rendered) == 2


def test_a_schema_is_sent_unchanged(think: Think) -> None:
    """llama.cpp itself places it after the thought."""
    judge = {**JUDGE, "validation": {"json_schema": SCHEMA}}
    (turn,), sent, rendered = think([{"content": 'Hm.</think>{"age": 5}'}], judge, thinks="first")
    assert (turn["text"], turn["attempts"][0]["constrained_by"]) == ('{"age": 5}', "response_format")
    assert (sent[0]["response_format"], rendered) == (AS_JSON["response_format"], [])
