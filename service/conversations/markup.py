"""The markup of agents that say ``markup: true`` (contract, section 5.4; seed 004, section 3). Pure."""

import re
from dataclasses import dataclass
from typing import Final

# An end that is missing is the end of the text: a model that was cut off in its thoughts has said nothing aloud.
_THINKING: Final = re.compile(r"<(?P<tag>thinking|think)>(?P<words>.*?)(?:</(?P=tag)>|\Z)", re.DOTALL)
_ALOUD: Final = re.compile(r"<(?P<tag>answer|speak)>(?P<words>.*?)(?:</(?P=tag)>|\Z)", re.DOTALL)
_UNSAID: Final = re.compile(r"<(?P<tag>tool_request|observation)\b[^>]*>.*?(?:</(?P=tag)>|\Z)", re.DOTALL)
_WAIT: Final = re.compile(r"<wait\s*/?>(?:\s*</wait>)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What an answer says aloud, and what it keeps to itself."""

    words: str
    thinking: str = ""


def read_markup(text: str) -> Said:
    """Return the two parts of an answer; who waits says nothing aloud."""
    thinking = "\n\n".join(found["words"].strip() for found in _THINKING.finditer(text))
    rest = _UNSAID.sub("", _THINKING.sub("", text))
    aloud = [found["words"].strip() for found in _ALOUD.finditer(rest)]
    if aloud:
        return Said(words="\n\n".join(aloud), thinking=thinking)
    if _WAIT.search(rest):
        return Said(words="", thinking=thinking)
    return Said(words=rest.strip() if thinking or rest != text else rest, thinking=thinking)


def without_markup(text: str) -> str:
    """Return an answer as its validation reads it, whether its agent uses markup or not."""
    return read_markup(text).words
