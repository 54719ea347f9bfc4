"""How an answer is processed: markup, validation, and what other agents hear of it in free mode."""

import json
import time

import pytest

from service.conversations.job.job import Agent, Job, JobId, Mode
from service.conversations.job.markup import Said, read_markup
from service.conversations.job.validation import Validation
from service.conversations.talk.discussion import Discussion
from service.scheduling.asking.judging import TOO_LONG, judge_answer
from workers.offload.pool import offloading


@pytest.mark.parametrize(
    ("text", "words", "thinking"),
    [
        ("Plain words.", "Plain words.", ""),
        ("  spaces stay ", "  spaces stay ", ""),
        ("<thinking>hm</thinking>Yes.", "Yes.", "hm"),
        ("<think>a</think><thinking>b</thinking> Yes. ", "Yes.", "a\n\nb"),
        ("aside <answer>Yes.</answer> aside", "Yes.", ""),
        ("<speak>One.</speak> and <answer>two.</answer>", "One.\n\ntwo.", ""),
        ("<answer>Yes", "Yes", ""),
        ("<thinking>cut off in the middle <answer>no</answer>", "", "cut off in the middle <answer>no</answer>"),
        ("<wait/>", "", ""),
        ("<thinking>nothing to say</thinking>\n<wait />", "", "nothing to say"),
        ("<wait></wait>", "", ""),
        ('Let me see. <tool_request name="t">{}</tool_request> So.', "Let me see.  So.", ""),
        ("<observation>{}</observation>Done.", "Done.", ""),
        ("SECRET</think>hello", "hello", "SECRET"),
        ('<Thinking level="1">SECRET</Thinking>hello', "hello", "SECRET"),
        ("<thinking>a <thinking>b</thinking> c</thinking>hello", "hello", "a\n\nb\n\nc"),
        ("<ANSWER>yes</ANSWER> no", "yes", ""),
        ("<answer><speak>X</speak></answer>", "X", ""),
        ("<speak>X<wait/></speak>", "X", ""),
        ("<thinking/>X <thinking/>Y", "X Y", ""),
        ("<answer>I <thinking>secret</thinking>agree.</answer>", "I agree.", "secret"),
    ],
)
def test_markup_separates_words_from_thoughts(text: str, words: str, thinking: str) -> None:
    """Specification, "Agent markup"."""
    assert read_markup(text) == Said(words=words, thinking=thinking)


@pytest.mark.parametrize(
    ("answer", "is_valid"),
    [
        ("yes", True),
        ("My answer is: YES.", True),
        ("<thinking>yes or no?</thinking> No!", True),
        ("yes and no", False),
        ("yesterday", False),
        ("perhaps", False),
        ("", False),
        ("I have no opinion", True),
        ("Yes. Yes!", True),
        ("<answer>yes</answer> but I thought no", True),
        ("thoughts yes or no</think>no", True),
        ("__yes__", True),
        ("I have no\nopinion", True),
        ("no  opinion, or no", False),
    ],
)
def test_exactly_one_choice_as_a_whole_word(answer: str, is_valid: bool) -> None:
    """Specification, "Answer validation"; of several matching choices the longest counts."""
    validation = Validation(retries=1, choices=("yes", "no", "no opinion"))
    assert (validation.fault_of(answer) is None) is is_valid


def test_a_pattern_matches_anywhere_and_is_bounded_in_time() -> None:
    """A job's regular expression must not block the service."""
    assert Validation(retries=0, pattern=r"\bscore: \d+").fault_of("My score: 7 of 10") is None
    assert "does not match" in (Validation(retries=0, pattern="^x$").fault_of("y") or "")
    slow = Validation(retries=0, pattern="(.*),(.*),(.*),(.*),(.*);")
    with pytest.raises(TimeoutError):
        slow.fault_of("a," * 400)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ('{"score": 3}', None),
        ('<think>hm</think>```json\n{"score": 3}\n```', None),
        ('{"score": "3"}', "$.score"),
        ("three", "not JSON"),
        ('{"score": NaN}', "not JSON"),
    ],
)
def test_json_by_its_schema(answer: str, told: str | None) -> None:
    """Thoughts and code fences around the JSON are allowed."""
    schema: dict[str, object] = {"type": "object", "properties": {"score": {"type": "integer"}}, "required": ["score"]}
    fault = Validation(retries=0, json_schema=schema).fault_of(answer)
    assert (fault is None) if told is None else (told in (fault or ""))


def test_no_schema_runs_without_end() -> None:
    """References that double, dialects named again below the root, and thousands of slow matches."""
    doubling: dict[str, object] = {"$defs": {"a0": {"type": "string"}}, "$ref": "#/$defs/a30"}
    definitions = doubling["$defs"]
    assert isinstance(definitions, dict)
    for level in range(1, 31):
        definitions[f"a{level}"] = {"allOf": [{"$ref": f"#/$defs/a{level - 1}"}] * 2}
    with pytest.raises(TimeoutError):
        Validation(retries=0, json_schema=doubling).fault_of('"x"')
    dialect = "https://json-schema.org/draft/2020-12/schema"
    again: dict[str, object] = {
        "$schema": dialect,
        "properties": {"child": {"$ref": "#"}, "name": {"$schema": dialect, "pattern": "(.*),(.*),(.*),(.*),(.*);"}},
    }
    with pytest.raises(TimeoutError):
        Validation(retries=0, json_schema=again).fault_of(json.dumps({"child": {"name": "a," * 400}}))


HARD: dict[str, tuple[dict[str, object], str]] = {
    "unique items": ({"uniqueItems": True}, json.dumps([{"a": n} for n in range(8000)])),
    "a pattern": ({"pattern": "(.*),(.*),(.*),(.*),(.*);"}, json.dumps("a," * 400)),
    "enum": ({"items": {"enum": [f"x{n}" for n in range(3000)]}}, json.dumps(["y"] * 3000)),
    "a huge message": ({"type": "string"}, json.dumps(["x" * 400_000])),
}


async def fault_of(validation: Validation, answer: str) -> str | None:
    try:
        return await judge_answer(validation, answer)
    except TimeoutError:
        return TOO_LONG


@pytest.mark.anyio
@pytest.mark.parametrize("name", HARD)
async def test_no_validation_blocks_the_event_loop(name: str) -> None:
    """51 KB with uniqueItems blocked the loop for 21 s; now nothing takes 50 ms of the loop's own time.

    Source: specification, "Bounded work".
    """
    schema, answer = HARD[name]
    validation = Validation(retries=0, json_schema=schema, schema_chars=len(json.dumps(schema)))
    async with offloading():
        await fault_of(validation, answer)  # starts the process, and imports what is imported late
        spent = time.thread_time()
        fault = await fault_of(validation, answer)
        assert time.thread_time() - spent < 0.05
    assert fault is None if name == "unique items" else 0 < len(fault or "") < 1100


@pytest.mark.anyio
async def test_a_re_prompt_names_only_a_few_of_many_choices() -> None:
    """The re-prompt does not list them all; a valid choice is still found among them."""
    validation = Validation(retries=0, choices=tuple(f"choice number {n}" for n in range(1000)))
    async with offloading():
        assert await fault_of(validation, "I take choice number 999.") is None
        spent = time.thread_time()  # its process is there
        assert len(await fault_of(validation, "None.") or "") < 2200
        assert time.thread_time() - spent < 0.05


def test_items_are_unique_as_json_schema_has_it() -> None:
    """1 and 1.0 are equal, 1 and true are not, and the order of keys does not count."""
    unique = Validation(retries=0, json_schema={"uniqueItems": True})
    for equal in ("[1, 1.0]", '[{"a": 1, "b": [2]}, {"b": [2.0], "a": 1}]', '["x", "x"]'):
        assert "non-unique" in (unique.fault_of(equal) or "")
    for different in ("[1, true]", "[0, false, null]", '["1", 1]', '[{"a": 1}, {"a": 2}]', '[1, "\\u0031"]'):
        assert unique.fault_of(different) is None


def heard(discussion: Discussion, agent: Agent, number: int) -> list[tuple[str, int]]:
    return [(utterance.agent, utterance.round) for utterance in discussion.heard_by(agent, number)]


AGENTS = tuple(Agent(id=name, role="", model="m", system="") for name in ("A1", "A2", "A3"))
FREE = Job(id=JobId("j"), name="j", agents=AGENTS, conversations=(), mode=Mode.FREE)


def test_an_agent_that_speaks_for_long_lags_behind() -> None:
    """Specification, "Free mode": a prompt's contents are fixed when its turn starts."""
    a1, a2, a3 = AGENTS
    talk = Discussion(FREE)
    for agent in ("A1", "A2"):  # 0 s
        talk.make_prompt(agent, 0)
    talk.add("A1", 0, "hang")  # 4 s
    talk.make_prompt("A3", 0)
    assert heard(talk, a3, 0) == [("A1", 0)]
    talk.add("A2", 0, "hold on")  # 8 s
    talk.add("A3", 0, "seconded")
    talk.make_prompt("A1", 1)
    talk.make_prompt("A2", 1)
    assert heard(talk, a1, 1) == [("A1", 0), ("A2", 0), ("A3", 0)]
    assert heard(talk, a2, 1) == [("A2", 0), ("A1", 0), ("A3", 0)]  # A1 spoke while A2 did, so after it
    talk.add("A1", 1, "any proof?")  # 11 s
    talk.make_prompt("A3", 1)
    assert heard(talk, a3, 1) == [("A1", 0), ("A3", 0), ("A2", 0), ("A1", 1)]
    talk.add("A3", 1, "quiet")  # 13 s
    talk.make_prompt("A1", 2)
    assert heard(talk, a1, 2) == [("A1", 0), ("A2", 0), ("A3", 0), ("A1", 1), ("A3", 1)]
    assert heard(talk, a2, 1) == [("A2", 0), ("A1", 0), ("A3", 0)]  # the information lag


def test_in_free_mode_a_later_prompt_extends_an_earlier_one() -> None:
    """Prefix caches of engines keep an unchanged beginning: an agent's own view only grows."""
    a2 = AGENTS[1]
    talk = Discussion(FREE)
    before: list[tuple[str, int]] = []
    for number in range(4):
        talk.make_prompt("A2", number)
        now = heard(talk, a2, number)
        assert now[: len(before)] == before
        talk.add("A1", number, "meanwhile")
        talk.add("A2", number, "mine")
        before = [*now, ("A2", number)]


def test_a_turn_without_a_record_of_what_it_heard_moves_no_words() -> None:
    """There is none for an heir's new agent before it joins, nor after a restart for a turn that failed."""
    a2 = AGENTS[1]
    talk = Discussion(FREE)
    talk.add("A1", 0, "first")
    talk.make_prompt("A2", 1)
    before = heard(talk, a2, 1)
    talk.add("A2", 1, "mine")
    talk.add("A1", 1, "meanwhile")
    talk.make_prompt("A2", 2)
    assert before == [("A1", 0)]
    assert heard(talk, a2, 2) == [*before, ("A2", 1), ("A1", 1)]
