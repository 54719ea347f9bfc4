"""The check of an answer against its agent's validation. Pure; the caller bounds its time.

Source: specification, "Answer validation".
"""

import json
import re
import unicodedata
from functools import lru_cache
from typing import Final

import msgspec

from service.conversations.job.markup import without_markup
from transport.request import Constraint, Thought
from workers.offload.pool import ELSEWHERE_S
from workers.tools.call_parser import read_json
from workers.tools.schemas import cut, is_found, schema_fault, within

MOST_MARKS: Final = 30
AROUND: Final = " .!*_~`\"'“”‘’‚„«»‹›「」『』。！…"  # noqa: RUF001 - marks of several scripts
COMPILED: Final = 2  # a compiled character costs as much as this many of a schema
_FENCED = re.compile(r"\A```[A-Za-z]*[^\S\n]*\n(?P<body>.*)\n```\Z", re.DOTALL)


def folded(words: str) -> str:
    """Return words without differences of letter case, composition and spacing."""
    return " ".join(_composed(words).casefold().split())


def spaced(words: str) -> str:
    """Return the same, with letter case."""
    return " ".join(_composed(words).split())


def plain(words: str) -> str:
    """Return folded words without surrounding quotation marks, emphasis, full stops and exclamation marks."""
    said = folded(words)
    return said.strip(AROUND) or said


def _composed(words: str) -> str:
    """Compose letters; that takes the square of a run of marks, so an endless run stays as it is."""
    return words if words.isascii() or _has_endless_marks(words) else unicodedata.normalize("NFC", words)


def _has_endless_marks(words: str) -> bool:
    """Whether a run of combining marks is longer than in Unicode's stream-safe text (UAX 15)."""
    every = MOST_MARKS + 1  # a run of this length covers one of these places
    for number, mark in enumerate(map(unicodedata.combining, words[MOST_MARKS::every])):
        if mark:
            begin = end = MOST_MARKS + number * every
            while begin > 0 and unicodedata.combining(words[begin - 1]):
                begin -= 1
            while end < len(words) and end - begin <= MOST_MARKS and unicodedata.combining(words[end]):
                end += 1
            if end - begin > MOST_MARKS:
                return True
    return False


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """One of three kinds of validation; ``retries`` bounds the requests after answers that are not valid.

    With ``is_constrained`` the engine constrains the model to it, if it can.
    """

    retries: int
    choices: tuple[str, ...] = ()
    pattern: str | None = None
    json_schema: dict[str, object] | None = None
    schema_chars: int = 0  # length of the schema
    is_constrained: bool = True

    @property
    def chars(self) -> int:
        """The length that a judgement costs: compiled text costs more than walked text."""
        return self.schema_chars + COMPILED * (len(self.pattern or "") + sum(map(len, self.choices)))

    @property
    def slow_field(self) -> str:
        """The name of the field that may take long to judge."""
        return "json_schema" if self.pattern is None else "pattern"

    @property
    def schema_text(self) -> str:
        """The schema as shown to a model."""
        return json.dumps(self.json_schema or {}, ensure_ascii=False)

    def constraint(self, thought: Thought = Thought.NONE) -> Constraint | None:
        """Return the constraint for an engine; None if every answer is valid."""
        if self.pattern == "":
            return None
        return Constraint(choices=self.choices, pattern=self.pattern, json_schema=self.json_schema, thought=thought)

    def fault_of(self, answer: str, limit_s: float = ELSEWHERE_S) -> str | None:
        """Return the fault of an answer, in words that help its model to correct it; None if it is valid.

        Raises:
            TimeoutError: the check takes longer than ``limit_s`` of this thread's own time.
        """
        return self.fault_of_words(without_markup(answer), limit_s)

    def fault_of_words(self, words: str, limit_s: float = ELSEWHERE_S) -> str | None:
        """Return the fault of a caller's words, in which no markup is read."""
        text = words.strip()
        if self.choices:
            return _choice_fault(self.choices, text)
        if self.pattern is not None:
            with within(limit_s):
                return None if is_found(self.pattern, text) else f"it does not match the pattern {cut(self.pattern)}"
        return _json_fault(self.json_schema or {}, text, limit_s)


@lru_cache(maxsize=64)
def _words_of(choices: tuple[str, ...]) -> re.Pattern[str]:
    # Longest first: "no opinion" must not match "no". Emphasis (_yes_) is no part of a word.
    longest_first = sorted(choices, key=len, reverse=True)
    words = "|".join(re.escape(choice) for choice in longest_first)
    return re.compile(rf"(?<![^\W_])(?:{words})(?![^\W_])")


def _held(choices: tuple[str, ...], text: str) -> set[str]:
    """Return the choices in a text, folded.

    If there are several, letter case decides: "a good answer is B" holds no A.
    """
    held = set(_words_of(tuple(dict.fromkeys(map(folded, choices)))).findall(folded(text)))
    if len(held) <= 1:
        return held
    as_written = set(_words_of(tuple(map(spaced, choices))).findall(spaced(text)))
    return {folded(choice) for choice in as_written} if len(as_written) == 1 else held


def chosen_in(choices: tuple[str, ...], answer: str) -> str | None:
    """Return the only choice in a valid answer; None if there is not exactly one."""
    return _chosen(choices, without_markup(answer))


def read_words(words: str, validation: Validation | None, *, has_markup: bool) -> str:
    """Return an answer as conditions read it, like its validation: a valid choice becomes that choice.

    Thoughts and markup are removed from a model's words; a caller's words have none (``has_markup``).
    """
    said = without_markup(words) if has_markup else words
    chosen = _chosen(validation.choices, said) if validation is not None and validation.choices else None
    return said.strip() if chosen is None else chosen


def _chosen(choices: tuple[str, ...], said: str) -> str | None:
    held = _held(choices, said)
    return next((choice for choice in choices if {folded(choice)} == held), None)


def _choice_fault(choices: tuple[str, ...], text: str) -> str | None:
    found = _held(choices, text)
    if len(found) == 1:
        return None
    held = cut(" and ".join(sorted(found)) or "none of them")
    return f"it must hold exactly one of: {cut(', '.join(choices))}; it holds {held}"


def read_answer(text: str) -> object:
    """Return the JSON value of an answer, which may be in a Markdown fence.

    Raises:
        ValueError: it is no JSON.
    """
    fenced = _FENCED.match(text.strip())
    return read_json(fenced["body"] if fenced else text)


def _json_fault(schema: dict[str, object], text: str, limit_s: float) -> str | None:
    try:
        value = read_answer(text)
    except ValueError as error:
        return cut(f"it is not JSON: {error}")
    return schema_fault(schema, value, limit_s)
