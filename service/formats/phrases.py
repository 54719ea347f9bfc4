"""What is wrong with a value, in the documentation's words: pydantic's own are those of Python."""

import json
from collections.abc import Mapping
from typing import Final

from pydantic_core import ErrorDetails

MOST_SHOWN: Final = 40  # characters of a value
SCALARS: Final[Mapping[str, str]] = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
}
OTHERS: Final[Mapping[str, str]] = {
    "string_type": "text",
    "path_type": "a path",
    "url_type": "a URL",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dataclass_type": "a mapping",
}
BOUNDS: Final[Mapping[str, str]] = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "literal_error": "{expected}",
    "enum": "{expected}",
}


PATTERNS: Final[Mapping[str, str]] = {
    r"^[A-Za-z0-9][A-Za-z0-9._:-]*$": "letters, digits and . _ : - alone, no spaces; a letter or a digit first",
    r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$": "letters, digits and . _ : / - alone, no spaces; a letter or a digit first",
}


def phrase(error: ErrorDetails) -> str:
    """Return what an error of pydantic's says, beginning with a small letter.

    What was given is shown where it could only be a number or one of a few words: elsewhere it may be a secret in the
    wrong place. Errors that were taken without their input show none.
    """
    kind, context = error["type"], error.get("ctx", {})
    if kind in BOUNDS:
        return f"must be {BOUNDS[kind].format(**{key: _plain(each) for key, each in context.items()})}{_given(error)}"
    if kind in SCALARS:
        return f"must be {SCALARS[kind]}{_given(error)}"
    if kind in OTHERS:
        return f"must be {OTHERS[kind]}{_mend(error)}"
    if kind == "string_pattern_mismatch" and context.get("pattern") in PATTERNS:
        return PATTERNS[context["pattern"]]
    text = error["msg"].removeprefix("Value error, ").replace(" after validation, not ", ", not ")
    return text if text[:2].isupper() else text[:1].lower() + text[1:]


def _mend(error: ErrorDetails) -> str:
    """Return how what is meant is written, where that can be told."""
    kind, given = error["type"], error.get("input")
    if kind == "string_type" and isinstance(given, bool | int | float):
        return "; put it in quotes"
    is_talk = kind == "model_type" and error.get("ctx", {}).get("class_name") == "ConversationSpec"
    return "; write {prompt: ...}" if is_talk and isinstance(given, str) else ""


def _given(error: ErrorDetails) -> str:
    """Return ``, not VALUE`` of a value that is short."""
    value = error.get("input", ...)
    if not isinstance(value, str | int | float | bool | None):
        return ""
    shown = repr(value) if isinstance(value, str) else json.dumps(value)
    return f", not {shown}" if len(shown) <= MOST_SHOWN else ""


def _plain(bound: object) -> object:
    """Return a number as people write it: 0, not 0.0."""
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound
