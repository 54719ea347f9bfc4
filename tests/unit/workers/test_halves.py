"""The part of half an answer that another attempt goes on with."""

import time

import pytest

from transport.events import ReasoningDelta, TextDelta
from transport.request import ChatRequest, Constraint
from workers.policy.repetition import RepetitionLimits
from workers.requests.answer import Answer
from workers.requests.halves import HalfAnswer, may_begin_late
from workers.requests.request import Demand

CHOICES, SCHEMA = Constraint(choices=("yes", "no")), Constraint(json_schema={"type": "object"})


@pytest.mark.parametrize(
    ("params", "keeps_thought", "kept"),
    [
        pytest.param({"temperature": 0}, False, (("think",), ("yes",), 2), id="no constraint"),
        pytest.param(
            {"response_format": {"type": "text"}}, False, (("think",), ("yes",), 2), id="a format that is none"
        ),
        pytest.param({"grammar": "root ::= x"}, False, ((), (), 0), id="a caller's own, as in a run on lanes"),
        pytest.param({"tool_choice": "required"}, False, ((), (), 0), id="a forced call"),
        pytest.param({"grammar": "root ::= x"}, True, (("think",), (), 1), id="one that can begin after a thought"),
    ],
)
def test_a_constraint_keeps_at_most_the_thought(params: dict[str, object], keeps_thought: bool, kept: object) -> None:
    """A grammar begins at its own beginning: behind half of its words it would allow them twice."""
    answer = Answer(time.monotonic)
    generation = answer.begin_generation(RepetitionLimits(), 10)
    answer.asked, answer.keeps_thought = ChatRequest(model="m", messages=(), params=params), keeps_thought
    generation.receive(ReasoningDelta("think"))
    generation.receive(TextDelta("yes"))
    assert (answer.half.reasoning, answer.half.text, answer.half.tokens) == kept


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
