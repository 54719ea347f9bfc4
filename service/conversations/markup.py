"""The markup of agents that say ``markup: true`` (specification, "Agent markup"). Pure."""

import re
from typing import Final

import msgspec

_THINKING: Final = re.compile(r"<(?P<end>/?)think(?:ing)?\b[^<>]*>", re.IGNORECASE)
# An end that is missing is the end of the text.
_ALOUD: Final = re.compile(
    r"<(?P<tag>answer|speak)\b[^<>]*>(?P<words>.*?)(?:</(?P=tag)>|\Z)", re.DOTALL | re.IGNORECASE
)
_UNSAID: Final = re.compile(
    r"<(?P<tag>tool_request|observation)\b[^<>]*>.*?(?:</(?P=tag)>|\Z)", re.DOTALL | re.IGNORECASE
)
_WAIT: Final = re.compile(r"<wait\b[^<>]*>", re.IGNORECASE)
_TAGS: Final = re.compile(r"</?(?:answer|speak|wait)\b[^<>]*>", re.IGNORECASE)  # one in the other


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """The public words of an answer, and its thoughts."""

    words: str
    thinking: str = ""


def read_markup(text: str) -> Said:
    """Return the two parts of an answer; who waits says nothing aloud."""
    public, thinking = _without_thinking(text)
    rest = _UNSAID.sub("", public)
    aloud = [_TAGS.sub("", found["words"]).strip() for found in _ALOUD.finditer(rest)]
    if aloud:
        return Said(words="\n\n".join(aloud), thinking=thinking)
    if _WAIT.search(rest):
        return Said(words="", thinking=thinking)
    return Said(words=rest if rest == text else rest.strip(), thinking=thinking)


def without_markup(text: str) -> str:
    """Return an answer as its validation reads it, whether its agent uses markup or not."""
    return read_markup(text).words


def without_thinking(text: str) -> str:
    """Return an answer without its thoughts, its other markup as it stands."""
    return _without_thinking(text)[0].strip()


def _without_thinking(text: str) -> tuple[str, str]:
    """Separate an answer into public words and thoughts.

    A thought may hold another one. An end without a beginning ends a thought that the chat template had begun: all
    before it was thought. A beginning without an end is a model that was cut off: the rest is thought.
    """
    public: list[str] = []
    private: list[str] = []
    depth = at = 0
    for tag in _THINKING.finditer(text):
        if tag[0].endswith("/>"):
            continue  # begins and ends in itself: an empty thought, which goes with the last line
        piece, at = text[at : tag.start()], tag.end()
        if not tag["end"]:
            (private if depth else public).append(piece)
            depth += 1
        elif depth:
            private.append(piece)
            depth -= 1
        else:
            private += ["".join((*public, piece))]
            public = []
    (private if depth else public).append(text[at:])
    return _THINKING.sub("", "".join(public)), "\n\n".join(thought.strip() for thought in private if thought.strip())
