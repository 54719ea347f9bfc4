"""Answers that still have their slot are judged only for whether to ask again on it."""

import anyio
import pytest
from msgspec.structs import replace

from service.conversations.job.validation import Validation
from service.scheduling.asking.judging import GIVEN_UP, AnswerJudge, Overruns, do_nothing
from tests.harness.jobs import agent

SLOW = "(?:(?:a|aa)+)+b$"
LONG = "a" * 200
PATH = "agents[0].validation.pattern"


def judge(validation: Validation | None, overruns: Overruns) -> AnswerJudge:
    return AnswerJudge(replace(agent("a"), validation=validation), 0, (), overruns, do_nothing, lambda *_: None)


@pytest.mark.anyio
async def test_a_pattern_that_times_out_is_not_tried_while_its_slot_is_held() -> None:
    """The judgement of the turn reports it; to try it here would hold the slot for as long as it takes."""
    validation, overruns = Validation(retries=0, pattern=SLOW), Overruns()
    overruns.resume([(PATH, SLOW)])
    with anyio.fail_after(0.2):
        assert await judge(validation, overruns).is_worth_keeping(LONG)
        assert await judge(validation, overruns).find_fault(LONG) == GIVEN_UP


@pytest.mark.anyio
@pytest.mark.parametrize(("pattern", "is_kept"), [(None, True), ("^a+$", True), ("^b", False)])
async def test_an_invalid_answer_is_asked_for_again_on_its_slot(pattern: str | None, *, is_kept: bool) -> None:
    """It still has the slot."""
    validation = None if pattern is None else Validation(retries=0, pattern=pattern)
    assert await judge(validation, Overruns()).is_worth_keeping("aaa") is is_kept
