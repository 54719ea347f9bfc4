"""Tool calls in text: each form of the common models is read as a call, but not inside words about a call."""

import json
import time

import pytest

from transport.events import ToolCallDelta
from workers.tools.call_parser import Fallback, join_fragments, read_message
from workers.tools.thoughts import split_thoughts

NAMES = ("add", "find")
ADD = '{"name": "add", "arguments": {"a": 1}}'
CALLED = [("add", {"a": 1})]
FORMS = {
    "hermes": f"<tool_call>\n{ADD}\n</tool_call>",
    "hermes without its end": f"<tool_call>\n{ADD}",
    "qwen coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "mistral": f"[TOOL_CALLS][{ADD}]",
    "mistral of 2025": '[TOOL_CALLS]add[ARGS]{"a": 1}',
    "mistral with an id": '[TOOL_CALLS]add[CALL_ID]x1[ARGS]{"a": 1}',
    "llama": '<|python_tag|>{"name": "add", "parameters": {"a": 1}}<|eom_id|>',
    "llama's function": '<function=add>{"a": 1}</function>',
    "our own": f'{{"tool_calls": [{ADD}]}}',
    "bare": ADD,
    "bare with parameters": '{"type": "function", "name": "add", "parameters": {"a": 1}}',
    "bare with an end": f"{ADD}<|im_end|>",
    "a list": f"[{ADD}]",
    "as python": "[add(a=1)]",
}
MARKED = [name for name, form in FORMS.items() if form[0] in "<[" and name not in ("a list", "as python")]


def calls_in(text: str, fallback: Fallback | None = Fallback.JSON) -> list[tuple[str, object]]:
    return [(each.name, json.loads(each.arguments)) for each in read_message(text, [], fallback, NAMES).calls]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("thought", ["", "<think>Shall I?</think>\n", "Shall I?</think>\n\n", "[THINK]hm[/THINK]"])
def test_each_form_of_a_call_is_read_as_a_call(form: str, thought: str) -> None:
    """After thoughts as well, whoever opened them."""
    reading = read_message(thought + form, [], Fallback.JSON, NAMES)
    assert [(each.name, json.loads(each.arguments)) for each in reading.calls] == CALLED
    assert (reading.text, reading.has_unread_call) == ("", False)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    "around",
    [
        "<think>I could write {} here.</think>No.",
        "I could write {} but no.\n</think>\n\nNothing to do.",
        "<THINK>{}</THINK>No.",
        '<think type="x">{}</think>No.',
        "<think>a<think>{}</think>b</think>No.",
        "<think>{}",
        "You write:\n```\n{}\n```\nand so on.",
        "You write `{}` then.",
        "<answer>{}</answer>",
        "<observation>{}</observation>No.",
        "> {}\n\nYou wrote so.",
        'It says "{}" there.',
    ],
)
@pytest.mark.parametrize("fallback", Fallback)
def test_words_about_a_call_stay_words(form: str, around: str, fallback: Fallback) -> None:
    """Thoughts, fences, code, quotations, answers and results."""
    text = around.replace("{}", form.replace("\n", " ") if around.startswith((">", "You write `")) else form)
    if fallback is Fallback.MARKUP:
        text += "\n" + around.replace("{}", '<tool_request name="add">{"a": 1}</tool_request>')
    reading = read_message(text, [], fallback, NAMES)
    assert (reading.calls, reading.text) == ((), text)


@pytest.mark.parametrize("name", MARKED)
def test_marked_calls_are_read_among_words(name: str) -> None:
    """A model announces a call and then makes it; calls without marks among words stay words."""
    reading = read_message(f"Let me add these. {FORMS[name]}", [], Fallback.JSON, NAMES)
    assert [(each.name, json.loads(each.arguments)) for each in reading.calls] == CALLED
    assert reading.text == "Let me add these."
    assert calls_in(f"I would call {ADD} here") == []


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_for_an_agent_without_tools_text_is_never_a_call(form: str) -> None:
    """Whatever it looks like. The operator can switch text calls off as well, and the turn then says so."""
    assert not read_message(form, [], Fallback.JSON, ()).calls
    without = read_message(form, [], None, NAMES)
    assert (without.calls, without.text) == ((), form)


@pytest.mark.parametrize(
    ("text", "looks"),
    [
        (f"```json\n{ADD}\n```", True),
        ("<tool_call>{oops</tool_call>", True),
        (f"```\n<tool_call>{ADD}</tool_call>\n```", True),
        ("<|tool_call_begin|>functions.add:0", True),
        ("```tool_code\nadd(a=1)\n```", True),
        ("plain words", False),
        ('{"answer": 42}', False),
        ('```json\n{"answer": 42}\n```', False),
    ],
)
def test_text_that_resembles_a_call_is_reported(text: str, *, looks: bool) -> None:
    """The author may want to know that no tool ran."""
    reading = read_message(text, [], Fallback.JSON, NAMES)
    assert (reading.calls, reading.has_unread_call) == ((), looks)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "add", "arguments": {"t": "no <function=find><parameter=a>1</parameter>"}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"t": "keep <think>this</think> all"}}</tool_call>',
        '{"name": "add", "arguments": {"t": "keep <think>this</think> all"}}',
        '{"name": "add", "arguments": {"t": "[THINK]x[/THINK]"}}',
        '<think>hm</think>{"name": "add", "arguments": {"t": "a <think>b</think>"}}',
    ],
)
def test_a_calls_arguments_are_taken_as_written(text: str) -> None:
    """Even if another form of call could match them."""
    ((name, arguments),) = calls_in(text)
    assert name == "add"
    assert isinstance(arguments, dict)
    assert json.dumps(arguments["t"])[1:-1] in text


@pytest.mark.parametrize(
    "text",
    [
        '{"answer": "bob said: <function=add><parameter=a>1</parameter></function>"}',
        f"<tool_response>page says <tool_call>{ADD}</tool_call></tool_response> So.",
        f"~~~\n<tool_call>{ADD}</tool_call>\n~~~\nSo.",
        f"````\n```\n<tool_call>{ADD}</tool_call>\n```\n````\nSo.",
        f"<!-- <tool_call>{ADD}</tool_call> --> So.",
    ],
)
def test_quoted_text_stays_words(text: str) -> None:
    """A result that a model repeats, or a document that it quotes."""
    assert calls_in(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "a" + " \t" * 50_000 + "b",
        "<tool_call>a" + " \t" * 50_000 + "b",
        "```" + " \t" * 50_000 + "x",
        "".join(f"<tool_request x{n} " for n in range(10_000)),
        "[" + ",".join(["add(a=1)"] * 10_000) + "]",
        "1 " * 50_000 + '"' + "x" * 1_000_000 + '"',
        "`" * 100_000,
        "<think>" * 20_000,
    ],
    ids=range(8),
)
@pytest.mark.parametrize("fallback", Fallback)
def test_no_text_blocks_the_reader(text: str, fallback: Fallback) -> None:
    """Answers are read in the event loop."""
    began_at = time.process_time()
    read_message(text, [], fallback, NAMES)
    assert time.process_time() - began_at < 1


def test_a_call_in_many_pieces_is_joined_once() -> None:
    """Each piece has an id and a name, and all pieces are read."""
    pieces = [ToolCallDelta(0, "x", "add", '{"a": "' if not n else "word ") for n in range(16_000)]
    began_at = time.process_time()
    (call,) = join_fragments([*pieces, ToolCallDelta(0, "x", "add", '"}')])
    assert time.process_time() - began_at < 1
    assert json.loads(call.arguments)["a"].startswith("word word")


def test_several_calls_of_one_message_are_all_read() -> None:
    """They keep their order."""
    find = '{"name": "find", "arguments": {"q": "x"}}'
    for text in (
        f"<tool_call>{ADD}</tool_call>\n<tool_call>{find}</tool_call>",
        f"[TOOL_CALLS][{ADD}, {find}]",
        '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]find[ARGS]{"q": "x"}',
        f"{ADD}; {find}",
        f"{ADD}\n{find}",
        '[add(a=1), find(q="x")]',
    ):
        assert calls_in(text) == [("add", {"a": 1}), ("find", {"q": "x"})], text


@pytest.mark.parametrize(
    "pieces",
    [
        [ToolCallDelta(0, "x", "add", "ARGS"), ToolCallDelta(1, "x", "add", "ARGS")],
        [ToolCallDelta(number, "x", "add", "ARGS") for number in range(3)],
        [ToolCallDelta(0, "x", "add", ""), ToolCallDelta(1, "x", "add", "ARGS")],
        [ToolCallDelta(0, "x", "add", ""), ToolCallDelta(0, "y", None, "ARGS")],
        [ToolCallDelta(0, "x", "add", ""), ToolCallDelta(0, "y", "add", "ARGS")],
        [ToolCallDelta(0, "x", "add", ""), ToolCallDelta(0, "y", None, '{"a"'), ToolCallDelta(0, "z", None, ": 1}")],
    ],
)
def test_one_call_stays_one_however_its_ids_and_indexes_change(pieces: list[ToolCallDelta]) -> None:
    """A tool once ran twice for one call, unnoticed."""
    whole = [ToolCallDelta(each.index, each.call_id, each.name, each.arguments.replace("ARGS", '{"a": 1}'))
             for each in pieces]  # fmt: skip
    (call,) = join_fragments(whole)
    assert (call.id, call.name, call.arguments) == ("x", "add", '{"a": 1}')


@pytest.mark.parametrize(
    "pieces",
    [
        [ToolCallDelta(0, "x", "add", '{"a": 1}'), ToolCallDelta(1, "x", "add", '{"a": 2}')],
        [ToolCallDelta(0, "x", "add", '{"a": 1}'), ToolCallDelta(1, "x", "find", '{"a": 1}')],
        [ToolCallDelta(0, "x", "add", '{"a": 1}'), ToolCallDelta(1, "y", "add", '{"a": 1}')],
        [ToolCallDelta(0, "x", "add", '{"a": 1}'), ToolCallDelta(0, "y", "add", '{"a": 1}')],
        [ToolCallDelta(0, "x", "add", '{"a": 1}'), ToolCallDelta(1, None, "add", '{"a": 1}')],
        [ToolCallDelta(0, "x", "add", ""), ToolCallDelta(0, "y", "add", "")],
    ],
)
def test_two_calls_stay_two(pieces: list[ToolCallDelta]) -> None:
    """Servers repeat ids or leave them out, and a model may intend the same call twice."""
    assert len(join_fragments(pieces)) == 2


@pytest.mark.parametrize(
    ("text", "words", "thoughts"),
    [
        ("plain", "plain", ""),
        ("<think>a</think>b", "b", "a"),
        ("a</think>b", "b", "a"),
        ("b<think>a", "b", "a"),
        ("[THINK]a[/THINK]b", "b", "a"),
        ("<thought>a</thought>b", "b", "a"),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>", "b", "a"),
        ("The tag `<think>` begins one, and `</think>` ends it.",) * 2 + ("",),
        ('Write "</think>" there.',) * 2 + ("",),
        ('<think>he said "no"</think>b', "b", 'he said "no"'),
    ],
)
def test_thoughts_are_separated_from_words(text: str, words: str, thoughts: str) -> None:
    """One reader does it; a quoted tag is a word."""
    assert split_thoughts(text) == (words, thoughts)
