"""The list of a job's conversations: sums over turns, and how lines are found and sorted."""

from datetime import UTC, datetime, timedelta

import pytest

from service.conversations.document.job_document import posted_heads
from service.conversations.job.job import JobId, TurnKey, TurnKind
from service.conversations.job.states import ConversationState, TurnState
from service.conversations.job.until import Ending
from service.node.conversation_list import ListQuery, Order, Sums, lines_of, page_of, texts_of
from service.store.conversation_rows import ConversationRow
from service.store.turn_rows import TokensSaid, TurnHead

AT = datetime(2026, 11, 26, tzinfo=UTC)
DOCUMENT = """{"rounds": 2, "until": [{"agent": "a", "says": ["stop", "end"]}, {"agree": ["a", "b"]}],
 "conversations": [
  {"id": "x", "prompt": "About $Topic.", "variables": {"Topic": "Green Tea", "n": 3}},
  {"prompt": "About  cars\\n", "variables": {"Topic": "cars"}, "until": [{"answer_tokens": 9}]},
  {"id": "z", "prompt": "Nothing"}]}"""


def turn(conversation: str, text: str, *, tokens: int | None = 2, at_s: int = 0, **fields: object) -> TurnHead:
    began_at = AT + timedelta(seconds=at_s)
    made = TurnHead(
        key=TurnKey(JobId("job-1"), conversation, "a", 0),
        state=TurnState.COMPLETED,
        text=text,
        usage=TokensSaid(completion_tokens=tokens),
        started_at=began_at,
        finished_at=began_at + timedelta(seconds=1),
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def row(
    name: str, position: int, state: ConversationState = ConversationState.COMPLETED, **fields: object
) -> ConversationRow:
    given = {"reason": None, "ending": None, **fields}
    return ConversationRow(id=name, position=position, state=state, **given)  # type: ignore[arg-type]


def found(text: str = "", **query: object) -> list[str]:
    heads = posted_heads(DOCUMENT, 160)
    sums = {"x": Sums(), "c1": Sums()}
    sums["x"].add(turn("x", "I like it.", tokens=7))
    sums["c1"].add(turn("c1", "They are loud.", tokens=9, at_s=5))
    rows = [
        row("x", 0),
        row("c1", 1, ending=Ending(until=0, round=1)),
        row("z", 2, ConversationState.RUNNING, awaits=["g"]),
    ]
    lines = lines_of(rows, sums, heads)
    page = page_of(lines, lambda: texts_of(lines, heads), heads, ListQuery(text=text, **query), 10)  # type: ignore[arg-type]
    return [line.id for line in page.lines]


def test_sums_are_of_all_turns_and_words_of_the_last_that_was_said() -> None:
    """A summary costs tokens and adds no words; a failed turn is reported and removes no words."""
    sums = Sums()
    sums.add(turn("x", "First  words\nhere", tokens=3, at_s=2))
    sums.add(turn("x", "summed up", tokens=5, at_s=9, kind=TurnKind.SUMMARY))
    sums.add(turn("x", "", tokens=None, at_s=4, state=TurnState.FAILED, detail="it is too long"))
    assert (sums.turns, sums.tokens, sums.took_s) == (2, 8, 8.0)
    assert (sums.agent, sums.words, sums.failure) == ("a", "First words here", "a: it is too long")


def test_no_time_is_given_before_a_turn_has_ended() -> None:
    """No time is not the same as zero."""
    assert Sums().took_s is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ["x", "c1", "z"]),
        ("ABOUT", ["x", "c1"]),
        ("about green", ["x"]),
        ("topic=cars", ["c1"]),
        ("Topic='green tea'", ["x"]),
        ('"green tea"', ["x"]),
        ("n=3", ["x"]),
        ("n=4", []),
        ("no=variable", []),
        ("'it is still typed", []),
        ("loud", ["c1"]),
        ("9 tokens", ["c1"]),
    ],
)
def test_lines_are_found_by_all_the_words_of_a_search(text: str, names: list[str]) -> None:
    """In the name, the prompt, the last words, a variable or the reason of the end, in any letter case."""
    assert found(text) == names


def test_lines_are_found_by_state_and_by_awaited_callers() -> None:
    """Both combine with words."""
    assert found(state=ConversationState.RUNNING) == ["z"]
    assert found(is_awaited=True) == ["z"]
    assert found("about", state=ConversationState.RUNNING) == []


@pytest.mark.parametrize(
    ("order", "names"),
    [
        (Order.POSITION, ["x", "c1", "z"]),
        (Order.TOKENS, ["z", "x", "c1"]),
        (Order.TURNS, ["z", "x", "c1"]),
        (Order.STATE, ["x", "c1", "z"]),
        (Order.WORDS, ["z", "x", "c1"]),
    ],
)
def test_lines_are_sorted_both_ways(order: Order, names: list[str]) -> None:
    """Equal lines keep the order of the job."""
    assert found(order=order) == names
    backwards = found(order=order, is_descending=True)
    assert backwards[-1] == names[0] or order in {Order.TURNS, Order.STATE}
    assert sorted(backwards) == sorted(names)


def test_the_end_is_described_in_the_words_of_the_job() -> None:
    """A conversation's own conditions come before those of the job."""
    heads = posted_heads(DOCUMENT, 160)
    assert heads[0].told_end(Ending(until=0, round=1)) == "a says stop or end, in round 2"
    assert heads[0].told_end(Ending(until=1, round=0)) == "a, b agree, in round 1"
    assert heads[1].told_end(Ending(until=0, round=0)) == "answers of 9 tokens, in round 1"
    assert heads[2].told_end(Ending(leader="chair", round=3)) == "chair ended it in round 4"
    assert heads[2].told_end(Ending(until=31, round=0)) == "until[31], in round 1"


def test_the_memory_for_a_list_is_bounded() -> None:
    """The lists of several jobs hold ten thousand conversations."""
    variables = ", ".join(f'"v{number}": "{"y" * 500}"' for number in range(100))
    (head,) = posted_heads(f'{{"conversations": [{{"prompt": "{"p" * 9000}", "variables": {{{variables}}}}}]}}', 160)
    assert len(head.prompt) == 160
    assert sum(map(len, head.variables.values())) == 4 * 160
