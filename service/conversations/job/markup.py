"""The markup of agents with ``markup: true`` (specification, "Agent markup"). Pure."""

import re
from typing import Final

import msgspec

from workers.tools.thoughts import split_thoughts

# A missing end tag is the end of the text.
_ALOUD: Final = re.compile(
    r"(?<!`)<(?P<tag>answer|speak)\b[^<>]*>(?!`)(?P<words>.*?)(?:</(?P=tag)>|\Z)", re.DOTALL | re.IGNORECASE
)
_UNSAID: Final = re.compile(
    r"(?<!`)<(?P<tag>tool_request|observation)\b[^<>]*>(?!`).*?(?:</(?P=tag)>|\Z)", re.DOTALL | re.IGNORECASE
)
_WAIT: Final = re.compile(r"(?<!`)<wait\b[^<>]*>(?!`)", re.IGNORECASE)
_TAGS: Final = re.compile(r"(?<!`)</?(?:answer|speak|wait)\b[^<>]*>(?!`)", re.IGNORECASE)  # one tag inside the other


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """The public words of an answer, and its thoughts."""

    words: str
    thinking: str = ""


def read_markup(text: str) -> Said:
    """Return the public and the private part of an answer; an agent that waits says nothing aloud."""
    public, thinking = split_thoughts(text)
    rest = _UNSAID.sub("", public)
    aloud = [_TAGS.sub("", found["words"]).strip() for found in _ALOUD.finditer(rest)]
    if aloud:
        return Said(words="\n\n".join(aloud), thinking=thinking)
    if _WAIT.search(rest):
        return Said(words="", thinking=thinking)
    return Said(words=rest if rest == text else rest.strip(), thinking=thinking)


def without_markup(text: str) -> str:
    """Return an answer as its validation reads it, with or without markup."""
    return read_markup(text).words
