"""The findings on a completed turn: reasons to doubt that its words are an answer. Pure."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from workers.requests.answer import Answer, Finish
from workers.tools.thoughts import without_thoughts

NO_ANSWER: Final = "the model declined to answer, or a filter ended its answer"
WAIT: Final = "<wait"  # agent markup for an intended silence


class Finding(StrEnum):
    """One word per finding; the same in results, tables and pages."""

    NO_FINISH_REASON = "no_finish_reason"
    CUT_OFF = "cut_off"
    FILTERED = "filtered"
    REFUSAL = "refusal"
    NOTHING_SAID = "nothing_said"
    UNREAD_CALL = "unread_call"


SENTENCES: Final[Mapping[str, str]] = {
    Finding.NO_FINISH_REASON: "the server did not say that the answer is whole",
    Finding.CUT_OFF: "the answer was cut off at its limit of tokens",
    Finding.FILTERED: "the server's filter ended the answer",
    Finding.REFUSAL: "the model declined to answer",
    Finding.NOTHING_SAID: "nothing was said",
    Finding.UNREAD_CALL: "the words look like a tool's call, and none was made",
}


def findings_of(answer: Answer, words: str) -> tuple[str, ...]:
    """Return the findings on a complete answer, whose public part is ``words``."""
    finish = answer.finish
    found = {
        Finding.NO_FINISH_REASON: answer.generation.finish_reason is None,
        Finding.CUT_OFF: finish is Finish.CUT_OFF,
        Finding.FILTERED: finish is Finish.FILTERED,
        Finding.REFUSAL: answer.generation.is_refusal,
        Finding.NOTHING_SAID: not (words.strip() or answer.signals or WAIT in answer.text.casefold()),
        Finding.UNREAD_CALL: answer.has_unread_call,
    }
    return tuple(finding.value for finding, is_so in found.items() if is_so)


def told_of(findings: object) -> str:
    """Return findings in words, as in a turn's document."""
    known = [SENTENCES.get(str(each), str(each)) for each in findings] if isinstance(findings, list | tuple) else []
    return "; ".join(known)


def fault_beside(answer: Answer, fault: str | None) -> str | None:
    """Return the fault of an answer for which validation found ``fault``: the reason if there is nothing to validate.

    An answer that a server marks as a refusal is none, whatever its words.
    """
    if answer.is_declined:
        return NO_ANSWER
    if fault is None or without_thoughts(answer.text).strip():
        return fault
    if answer.finish is not Finish.CUT_OFF:
        return "nothing was said"
    usage = answer.usage
    tokens = f"all {usage.completion_tokens} tokens" if usage is not None else "all tokens"
    return f"nothing was said: {tokens} went into the thought; raise max_tokens"
