"""A conversation's own values in the prompt and in systems (specification, "Variables"). Pure."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from service.conversations.job.wording import NAMES

NAME: Final = r"[A-Za-z_][A-Za-z0-9_]*"
RESERVED: Final = frozenset().union(*NAMES.values())  # names used in the pieces of a job's words
_PLACE: Final = re.compile(rf"\$(?:(?P<dollar>\$)|(?P<plain>{NAME})|\{{(?P<braced>{NAME})\}})")


def fill(text: str, variables: Mapping[str, str] | None) -> str:
    """Return a text with values in place of names, each inserted once and not expanded again.

    ``$$`` is a dollar, and a dollar before an unknown name stays; without ``variables`` every dollar stays.
    """
    if variables is None or "$" not in text:
        return text

    def value(found: re.Match[str]) -> str:
        if found["dollar"]:
            return "$"
        return variables.get(found["plain"] or found["braced"], found[0])

    return _PLACE.sub(value, text)


def count_names(text: str) -> Counter[str]:
    """Count how often a text names each variable."""
    return Counter(found["plain"] or found["braced"] or "$" for found in _PLACE.finditer(text))


def added_chars(names: Counter[str], values: Mapping[str, object]) -> int:
    """Return by how much a text with these names grows at most: a few bytes may name a long value many times."""
    return sum(names[name] * len(written(value)) for name, value in values.items() if name in names)


def names_in(text: str) -> Iterator[str]:
    """Yield the names of variables in a text."""
    for found in _PLACE.finditer(text):
        name = found["plain"] or found["braced"]
        if name:
            yield name


def written(value: object) -> str:
    """Return a value as it is inserted: a text as it is, a number or a truth value as in JSON."""
    return value if isinstance(value, str) else json.dumps(value)
