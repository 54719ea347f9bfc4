"""From pydantic's errors to faults that name the place and the mend, for configurations and jobs alike."""

import difflib
import json
import re
import types
import typing
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from service.errors import Fault

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
    """Return the message of an error of pydantic's, beginning with a small letter.

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


# A member of a union, which pydantic names as if it were a key.
BRANCH: Final = re.compile(r"(function-(after|before|plain|wrap)|literal)\[")


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


class StrictModel(BaseModel):
    """The base of documents from callers: an unknown key is a fault."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def faults_of(error: ValidationError, model: type[BaseModel]) -> list[Fault]:
    """Return one fault for each error of ``model``'s validation."""
    faults: list[Fault] = []
    for entry in error.errors(include_url=False):
        location = [part for part in entry["loc"] if not (isinstance(part, str) and BRANCH.match(part))]
        if entry["type"] == "literal_error" and isinstance(entry["input"], dict) and len(location) < len(entry["loc"]):
            continue  # what is wrong with the mapping is told as well
        if entry["type"] in {"extra_forbidden", "unexpected_keyword_argument"}:
            known = _keys_at(model, location[:-1])
            faults.append(Fault(path=path_of(location), message=unknown("key", str(location[-1]), known)))
        elif entry["type"] == "missing":
            faults.append(Fault(path=path_of(location), message="is required"))
        else:
            faults.append(Fault(path=path_of(location), message=_nearest_word(entry) or phrase(entry)))
    return faults


def _nearest_word(entry: ErrorDetails) -> str | None:
    """Return a message that suggests the nearest valid word; None if none is near."""
    given, expected = entry.get("input"), str(entry.get("ctx", {}).get("expected", ""))
    if entry["type"] not in {"literal_error", "enum"} or not isinstance(given, str):
        return None
    near = difflib.get_close_matches(given, re.findall(r"'([^']*)'", expected), n=1, cutoff=0.6)
    return f"{phrase(entry)}; did you mean {near[0]!r}?" if near else None


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Say that ``name`` is not known, and which of ``known`` is nearest."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if near:
        return f"unknown {kind} {name!r}; did you mean {near[0]!r}?"
    return f"unknown {kind} {name!r}; known: {', '.join(names) or 'none'}"


def path_of(location: Sequence[str | int]) -> str:
    """Return ``agents[0].model`` for ("agents", 0, "model")."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def nearest_path(path: str, known: Container[str]) -> str:
    """Return a path, or the nearest part around it, that is known; nothing where none is."""
    while path and path not in known:
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    return path


def _keys_at(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    current: object = model
    for part in location:
        current = _model_in(current)
        current = _fields(current).get(str(part)) if _is_model(current) else _element_of(current)
    return list(_fields(_model_in(current)))


def _model_in(annotation: object) -> object:
    """Return the member of a union that is no None, or the annotation itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(annotation) if member is not type(None)]
        return next(filter(_is_model, members), members[0])
    return annotation


def _is_model(annotation: object) -> bool:
    return isinstance(annotation, type) and (issubclass(annotation, BaseModel) or is_dataclass(annotation))


def _fields(model: object) -> dict[str, object]:
    """Return the keys of a model or of a dataclass, with what each is."""
    if isinstance(model, type) and issubclass(model, BaseModel):
        return {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    if not (isinstance(model, type) and is_dataclass(model)):
        return {}
    hints = typing.get_type_hints(model)
    return {field.name: hints[field.name] for field in fields(model)}


def _element_of(annotation: object) -> object:
    arguments = [argument for argument in typing.get_args(annotation) if argument is not Ellipsis]
    return arguments[-1] if arguments else None
