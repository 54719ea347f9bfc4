"""Whether an answer is what its agent was asked for (contract, section 5.2). Pure."""

import re
import unicodedata
from dataclasses import dataclass

from service.conversations.markup import without_markup
from workers.tools.reading import read_json
from workers.tools.schemas import is_found, schema_fault

_FENCED = re.compile(r"\A```[a-z]*[^\S\n]*\n(?P<body>.*)\n```\Z", re.DOTALL)


def folded(words: str) -> str:
    """Return words without regard to letter case, composition, and how much space stands between them."""
    return " ".join(unicodedata.normalize("NFC", words).casefold().split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """One of three kinds; ``retries`` is how often an answer that is not valid is asked for again."""

    retries: int
    choices: tuple[str, ...] = ()
    pattern: str | None = None
    json_schema: dict[str, object] | None = None

    def fault_of(self, answer: str) -> str | None:
        """Return what is wrong with an answer, in words that its model can mend it by; None where nothing is."""
        text = without_markup(answer).strip()
        if self.choices:
            return self._choice_fault(text)
        if self.pattern is not None:
            return _pattern_fault(self.pattern, text)
        return _json_fault(self.json_schema or {}, text)

    def _choice_fault(self, text: str) -> str | None:
        # The longest first: where "no opinion" stands, "no" does not. Emphasis (_yes_) is no part of a word.
        longest_first = sorted({folded(choice) for choice in self.choices}, key=len, reverse=True)
        words = "|".join(re.escape(choice) for choice in longest_first)
        found = set(re.findall(rf"(?<![^\W_])(?:{words})(?![^\W_])", folded(text)))
        if len(found) == 1:
            return None
        told = ", ".join(self.choices)
        return f"it must hold exactly one of: {told}; it holds {' and '.join(sorted(found)) or 'none of them'}"


def _pattern_fault(pattern: str, text: str) -> str | None:
    try:
        return None if is_found(pattern, text) else f"it does not match the pattern {pattern}"
    except TimeoutError:
        return f"it cannot be told in time whether it matches the pattern {pattern}"


def _json_fault(schema: dict[str, object], text: str) -> str | None:
    fenced = _FENCED.match(text)
    try:
        value = read_json(fenced["body"] if fenced else text)
    except ValueError as error:
        return f"it is no JSON: {error}"
    return schema_fault(schema, value)
