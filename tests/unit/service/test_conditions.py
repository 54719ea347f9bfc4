"""Conditions that the words of one turn fulfil (specification, "Ends")."""

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.conversations.document.job_document import posted_conditions
from service.conversations.job import until
from service.conversations.job.until import Condition, Ending, Ends, TurnDigest, digest_of, find_fulfilled
from service.conversations.job.validation import Validation, chosen_in, folded, plain, read_words


@pytest.mark.parametrize(
    ("words", "field", "equals", "is_fulfilled"),
    [
        ('{"verdict": "agree"}', "verdict", "agree", True),
        (' {"verdict": " AGREE "} ', "verdict", "agree", True),
        ('```json\n{"verdict": "agree"}\n```', "verdict", "agree", True),
        ('{"verdict": "disagree"}', "verdict", "agree", False),
        ('{"other": "agree"}', "verdict", "agree", False),
        ('I agree: {"verdict": "agree"}', "verdict", "agree", False),
        ('["agree"]', "verdict", "agree", False),
        ("agree", "verdict", "agree", False),
        ("", "verdict", "agree", False),
        ('{"a": {"b": 1.0}}', "a.b", 1, True),
        ('{"a.b": 1}', "a.b", 1, False),
        ('{"a": "b"}', "a.b", 1, False),
        ('{"a": true}', "a", 1, False),
        ('{"a": 1}', "a", True, False),
        ('{"a": 0}', "a", False, False),
        ('{"a": true}', "a", True, True),
        ('{"a": "true"}', "a", True, False),
        ('{"a": "1"}', "a", 1, False),
        ('{"a": [1]}', "a", 1, False),
        ('{"a": null}', "a", "null", False),
        ('{"a": NaN}', "a", 0, False),
        ('{"a": ""}', "a", "", True),
        ("[" * 100_000, "a", "", False),
    ],
)
def test_a_field_of_json_is_compared_with_its_value(
    words: str, field: str, equals: object, *, is_fulfilled: bool
) -> None:
    """The JSON is what a reader sees of the turn. A boolean is no number, and other words have no fields."""
    judged = find_fulfilled({3: Condition(agent="a", field=field, equals=equals)}, words, [], 1.0)
    assert judged.fulfils == ((3,) if is_fulfilled else ())
    assert judged.overran == ()


def test_conditions_are_described_in_words() -> None:
    """The page of a job shows them this way."""
    document = """{"conversations": [], "until": [
        {"agent": "j", "field": "a.b", "equals": true}, {"agent": "j", "field": "a", "equals": "x"},
        {"agent": "j", "says": ["y", "n"]}, {"agent": "j", "matches": "z"}, {"signal": "s"}, {"agree": ["j", "k"]},
        {"unchanged": 2}, {"answer_tokens": 9}]}"""
    assert posted_conditions(document, 100) == [
        "j says a.b: true",
        "j says a: x",
        "j says y or n",
        "j matches z",
        "an agent sends s",
        "j, k agree",
        "unchanged for 2 rounds",
        "answers of 9 tokens",
    ]
    assert posted_conditions('{"conversations": [], "until": null}', 100) == []
    assert posted_conditions('{"conversations": []}', 100) == []


@pytest.mark.parametrize(
    ("words", "has_markup", "is_fulfilled"),
    [
        ('<think>Hm.</think>{"v": "yes"}', True, True),
        ('<answer>{"v": "yes"}</answer>', True, True),
        ('```JSON\n{"v": "yes"}\n```', True, True),
        ('<think>Hm.</think>{"v": "yes"}', False, False),  # a caller's words are as they are
        ('{"v": "yes", "w": "<think>"}', False, True),
    ],
)
def test_a_condition_reads_a_field_as_a_validation_does(words: str, *, has_markup: bool, is_fulfilled: bool) -> None:
    """A valid answer is read as the same JSON by both."""
    condition = {0: Condition(agent="a", field="v", equals="yes")}
    read = read_words(words, None, has_markup=has_markup)
    assert bool(find_fulfilled(condition, read, [], 1.0).fulfils) is is_fulfilled


VOTES = Validation(retries=0, choices=("approve", "reject"))
APPROVALS = [
    "approve",
    '"approve"',
    "Approve.",
    "**approve**",
    "I approve.",
    "APPROVE!",
    "`approve`",
    "My vote: approve",
    "<think>reject? no</think>approve",
    "reject it?</think>Approve",
    "<answer>approve</answer>",
    "Approve\n\nIt holds.",
]


@pytest.mark.parametrize("words", APPROVALS)
def test_an_answer_valid_as_a_choice_is_that_choice_to_conditions(words: str) -> None:
    """Both readers agree on what "approve" is."""
    assert VOTES.fault_of(words) is None
    read = read_words(words, VOTES, has_markup=True)
    conditions = {0: Condition(agent="a", says=("approve",)), 1: Condition(agent="a", matches="^approve$")}
    conditions |= {2: Condition(agent="a", says=("reject",)), 3: Condition(agent="a", matches="reject")}
    assert find_fulfilled(conditions, read, [], 1.0).fulfils == (0, 1)
    until = (Condition(agree=("a", "b")),)
    assert digest_of(until, (), read, 1) == digest_of(until, (), "approve", 1)


@pytest.mark.parametrize(
    ("words", "is_said"),
    [
        ("Thanks!", True),
        ("“thanks”", True),
        ("**Thanks.**", True),
        ("thanks?", False),
        ("thanks, no", False),
        ("no thanks", False),
    ],
)
def test_characters_around_the_words_do_not_count(words: str, *, is_said: bool) -> None:
    """A question mark or another word does count."""
    condition = {0: Condition(agent="a", says=("thanks",))}
    assert bool(find_fulfilled(condition, words, [], 1.0).fulfils) is is_said


@pytest.mark.parametrize(
    ("choices", "words", "chosen"),
    [
        (("A", "B", "tie"), "I think that a good answer is B.", "B"),
        (("A", "B", "tie"), "A is a good answer, but B is better.", None),
        (("A", "B", "tie"), "b", "B"),
        (("yes", "no", "no opinion"), "No opinion.", "no opinion"),
        (("CORRECT", "INCORRECT"), "INCORRECT", "INCORRECT"),
        (("1", "2"), "1 or 2", None),
    ],
)
def test_a_choice_matches_by_its_own_letter_case_among_several(
    choices: tuple[str, ...], words: str, chosen: str | None
) -> None:
    """Choices of one letter are articles as well."""
    validation = Validation(retries=0, choices=choices)
    assert chosen_in(choices, words) == chosen
    assert (validation.fault_of(words) is None) is (chosen is not None)


@pytest.mark.parametrize(
    "marks", ["\u0301" * 200_000, "\u0308\u0301" * 100_000, "\u0316\u0301" * 100_000], ids=["one", "two", "unordered"]
)
def test_endless_runs_of_combining_marks_are_not_composed(marks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Composition takes quadratic time: a minute for the words of one turn."""
    with monkeypatch.context() as patched:
        patched.setattr(unicodedata, "normalize", None)
        told = folded(f"A{marks}")
    assert told == f"a{marks}".casefold()


def test_composed_and_decomposed_letters_are_equal() -> None:
    """This holds for as many marks as any language uses."""
    assert folded("Cafe\u0301  x") == folded("caf\u00e9 X")
    assert folded("a" + "\u0316" * 15 + "\u0301") == folded("\u00e1" + "\u0316" * 15)


@given(st.lists(st.tuples(st.sampled_from(["", "a", "\u6f22"]), st.sampled_from([0, 1, 15, 29, 30, 31, 32, 70]))))
def test_only_runs_longer_than_in_any_language_stay_uncomposed(runs: list[tuple[str, int]]) -> None:
    """Such a run is found wherever it stands, although only every thirty-first character is examined."""
    words = "".join(letter + "\u0316" * (count - 1) + "\u0301" * bool(count) for letter, count in runs)
    is_endless = re.search(r"[\u0316\u0301]{31}", words) is not None
    assert (folded(words) == words.casefold()) is (is_endless or unicodedata.is_normalized("NFC", words))


def test_words_that_heirs_share_are_folded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred forks of thirty turns of 64 KB each once held the service for seconds."""
    asked: list[str] = []

    def folding(words: str) -> str:
        asked.append(words)
        return plain(words)

    monkeypatch.setattr(until, "plain", folding)
    conditions = (Condition(agree=("a", "b")),)
    said = [f"{number} " + "\u00e9" * 1000 for number in range(30)]
    digests = {digest_of(conditions, (), words, 1).words for words in said * 100}
    assert (len(asked), len(digests)) == (30, 30)
    assert {digest_of(conditions, (), words.upper(), 1).words for words in said} == digests


def test_a_round_that_is_partly_an_heirs_own_is_judged() -> None:
    """Specification, "Begun from a record": in free mode the first own turn that ends may be rounds ahead of others."""
    ends = Ends((Condition(answer_tokens=3),), ("a", "b"))
    for number in range(2):
        ends.count_turn(0, number, TurnDigest(tokens=1, is_inherited=True))
    ends.count_turn(0, 2, TurnDigest(tokens=1))
    ends.count_turn(1, 0, TurnDigest(tokens=1))
    assert ends.end_round(0) == Ending(until=0, round=0)
