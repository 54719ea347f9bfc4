"""The contents of an answer: its words and thoughts, whether it is valid, the choice in it, and what conditions see.

Source: specification, "Agent markup", "Answer validation", "Ends".
"""

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from tests.reference.job import Agent, Document

AROUND = " .!*_~`\"'"  # others are of other scripts
_THOUGHT = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_UNSAID = re.compile(r"<(tool_request|observation)\b[^<>]*>.*?(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
_ALOUD = re.compile(r"<(answer|speak)>(.*?)(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
_WAIT = re.compile(r"<wait ?/?>", re.IGNORECASE)
_FENCE = re.compile(r"\A```[A-Za-z]*\n(.*)\n```\Z", re.DOTALL)


def without_thoughts(text: str) -> tuple[str, str]:
    """Return the text without thoughts, and the thoughts.

    A thought without an end runs to the end of the text; an end without a beginning makes all before it a thought.
    """
    public, thoughts, at, is_thought = "", [], 0, False
    for tag in _THOUGHT.finditer(text):
        piece, at = text[at : tag.start()], tag.end()
        if is_thought:
            thoughts.append(piece)
        elif tag[1]:
            thoughts, public = [*thoughts, public + piece], ""
        else:
            public += piece
        is_thought = not tag[1]
    if is_thought:
        thoughts.append(text[at:])
    else:
        public += text[at:]
    return public, "\n\n".join(each.strip() for each in thoughts if each.strip())


def said(text: str) -> str:
    """Return the words that an answer with markup says aloud."""
    rest = _UNSAID.sub("", without_thoughts(text)[0])
    aloud = [found[2].strip() for found in _ALOUD.finditer(rest)]
    if aloud:
        return "\n\n".join(aloud)
    return "" if _WAIT.search(rest) else rest.strip()


def words_of(agent: Agent, text: str) -> str:
    """Return an agent's words: of one without markup all that it has answered but its thoughts."""
    if agent.markup:
        return said(text)
    return without_thoughts(text)[0].strip() if _THOUGHT.search(text) else text


def folded(text: str) -> str:
    """Return a text folded over letter case and spacing."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def plain(text: str) -> str:
    """Return the same without the marks around words: quotation marks, emphasis, full stops and their like."""
    words = folded(text)
    return words.strip(AROUND) or words


# Validation


def choice_in(choices: Sequence[str], words: str) -> str | None:
    """Return the one choice that stands in words as a whole word.

    The longest counts where several begin alike. Where several stand there, one that stands in its own letter case
    alone is meant.
    """
    for is_exact in (False, True):
        found = {match.casefold() if not is_exact else match for match in _whole_words(choices, words, is_exact)}
        if len(found) == 1:
            only = found.pop()
            return next(each for each in choices if _spaced(each, is_exact) == only)
    return None


def _spaced(text: str, is_exact: bool) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split()) if is_exact else folded(text)


def _whole_words(choices: Sequence[str], words: str, is_exact: bool) -> list[str]:
    longest_first = sorted((_spaced(each, is_exact) for each in choices), key=len, reverse=True)
    pattern = "|".join(re.escape(each) for each in longest_first)
    return re.findall(rf"(?<![^\W_])(?:{pattern})(?![^\W_])", _spaced(words, is_exact))


def value_of(text: str) -> object:
    """Return the JSON of words, which may stand in a fence.

    Raises:
        ValueError: they are none.
    """
    fenced = _FENCE.match(text.strip())
    return json.loads(fenced[1] if fenced else text)


def fits(schema: Document, value: object) -> bool:
    """Whether a value fits a schema of objects, texts, numbers and truth values."""
    kinds: Mapping[str, type | tuple[type, ...]] = {
        "object": dict, "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list,
    }  # fmt: skip
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if not isinstance(value, dict):
        return True
    known = schema.get("properties", {})
    if any(name not in value for name in schema.get("required", ())):
        return False
    if schema.get("additionalProperties") is False and any(name not in known for name in value):
        return False
    return all(fits(known[name], each) for name, each in value.items() if name in known)


def is_valid(validation: Document | None, text: str, *, by_model: bool = True) -> bool:
    """Return whether an answer, or a caller's words, satisfies a validation."""
    if validation is None:
        return True
    words = said(text) if by_model else text.strip()
    if validation.get("choices"):
        return choice_in(validation["choices"], words) is not None
    if validation.get("pattern") is not None:
        return re.search(validation["pattern"], words) is not None
    try:
        return fits(validation["json_schema"], value_of(words))
    except ValueError:
        return False


# Conditions


def judged_words(agent: Agent, text: str) -> str:
    """Return what conditions see of an agent's words: what its validation reads, and of choices the one made."""
    words = said(text).strip() if agent.by == "model" else text.strip()
    choices = (agent.validation or {}).get("choices")
    return words if not choices else choice_in(choices, words) or words


def fulfils(condition: Document, agent: Agent, turn: Document) -> bool:
    """Return whether a completed turn fulfils a condition by itself."""
    if condition.get("agent") not in (None, agent.id):
        return False
    words = judged_words(agent, turn["text"])
    if "says" in condition:
        return plain(words) in {plain(each) for each in condition["says"]}
    if "matches" in condition:
        return bool(words) and re.search(condition["matches"], words) is not None
    if "field" in condition:
        return _has_field(condition, words)
    return "signal" in condition and any(each["name"] == condition["signal"] for each in turn["signals"])


def _has_field(condition: Document, words: str) -> bool:
    try:
        found: Any = value_of(words)
    except ValueError:
        return False
    for name in condition["field"].split("."):
        if not isinstance(found, dict) or name not in found:
            return False
        found = found[name]
    wanted = condition["equals"]
    if isinstance(found, str) and isinstance(wanted, str):
        return folded(found) == folded(wanted)
    return isinstance(found, bool) == isinstance(wanted, bool) and bool(found == wanted)
