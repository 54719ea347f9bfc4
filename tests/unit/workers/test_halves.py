"""The part of half an answer that another attempt goes on with."""

import pytest

from transport.request import Constraint
from workers.requests.halves import HalfAnswer, Kept, kept_part, may_begin_late
from workers.requests.request import Demand

CHOICES, SCHEMA = Constraint(choices=("yes", "no")), Constraint(json_schema={"type": "object"})


@pytest.mark.parametrize(
    ("params", "keeps_thought", "kept"),
    [
        pytest.param({"temperature": 0}, False, Kept.ALL, id="no constraint"),
        pytest.param({"response_format": {"type": "text"}}, False, Kept.ALL, id="a format that is none"),
        pytest.param({"grammar": "root ::= x"}, False, Kept.NOTHING, id="a caller's own"),
        pytest.param({"tool_choice": "required"}, False, Kept.NOTHING, id="a forced call"),
        pytest.param({"grammar": "root ::= x"}, True, Kept.THOUGHT, id="one that can begin after a thought"),
    ],
)
def test_a_constraint_keeps_at_most_the_thought(params: dict[str, object], keeps_thought: bool, kept: Kept) -> None:
    """A grammar begins at its own beginning: behind half of its words it would allow them twice."""
    assert kept_part(params, keeps_thought=keeps_thought) is kept


@pytest.mark.parametrize(
    ("demand", "may"),
    [
        pytest.param(Demand(constraint=CHOICES), True, id="choices"),
        pytest.param(Demand(constraint=CHOICES, at_once=True), False, id="a retry, without a thought"),
        pytest.param(Demand(constraint=SCHEMA), False, id="a schema, whose grammar is the engine's"),
        pytest.param(Demand(), False, id="the caller's own"),
    ],
)
def test_a_constraint_of_ours_can_begin_within_a_thought(demand: Demand, may: bool) -> None:
    """Its grammar then begins with the rest of the thought."""
    assert may_begin_late(demand) is may


@pytest.mark.parametrize(
    ("pieces", "begun"),
    [
        pytest.param(("I", " think", " so"), "I think", id="its last word is written again"),
        pytest.param(("I", " think", " so", ".", "\n", "\n"), "I think so", id="with the blanks behind it"),
        pytest.param(("I think so",), "I think so", id="two breaks without a word between them lose nothing"),
        pytest.param(("\n",), None, id="blanks alone"),
    ],
)
def test_a_thought_goes_on_with_a_word_of_its_own(pieces: tuple[str, ...], begun: str | None) -> None:
    """If the answer followed at once, it might be a thought that the engine takes for one."""
    half = HalfAnswer(reasoning=pieces).begun(())
    assert (half.reasoning if half else None) == begun
