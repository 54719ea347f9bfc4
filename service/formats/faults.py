"""Faults with place and remedy, made from pydantic's errors, for configurations and jobs."""

import difflib
import json
import re
import types
import typing
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, wraps
from typing import Any, Final, ParamSpec, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from service.errors import Fault

Section = TypeVar("Section", bound=BaseModel)
P = ParamSpec("P")
Rules = Iterator[tuple[object, str]]  # whether each rule is broken, and the message then
Checks = Iterator[tuple[object, str, str | Callable[[], str]]]  # the same with the place of the fault
MOST_SHOWN: Final = 40  # longest value that a message shows, in characters
SCALARS: Final[dict[str, str]] = {
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
BOUNDS: Final[dict[str, str]] = {
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


# Pydantic lists a member of a union as if it were a key.
BRANCH: Final = re.compile(r"(function-(after|before|plain|wrap)|literal)\[")


def _mend(error: ErrorDetails) -> str:
    """Return the remedy for a likely mistake, or nothing."""
    kind, given = error["type"], error.get("input")
    if kind == "string_type" and isinstance(given, bool | int | float):
        return "; put it in quotes"
    is_talk = kind == "model_type" and error.get("ctx", {}).get("class_name") == "ConversationSpec"
    return "; write {prompt: ...}" if is_talk and isinstance(given, str) else ""


def _given(error: ErrorDetails) -> str:
    """Return ``, not VALUE`` for a short value, else nothing."""
    value = error.get("input", ...)
    if not isinstance(value, str | int | float | bool | None):
        return ""
    shown = repr(value) if isinstance(value, str) else json.dumps(value)
    return f", not {shown}" if len(shown) <= MOST_SHOWN else ""


def _plain(bound: object) -> object:
    """Return a number as people write it: 0, not 0.0."""
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound


MUST_BE: Final[Mapping[str, tuple[str, Callable[[ErrorDetails], str]]]] = {
    **{kind: (words, _given) for kind, words in (SCALARS | BOUNDS).items()},
    **{kind: (words, _mend) for kind, words in OTHERS.items()},
}


def phrase(error: ErrorDetails) -> str:
    """Return the message of a pydantic error, in lower case at its start.

    The given value is shown only where a number or one of a few words is expected: elsewhere it may be a misplaced
    secret. Errors without their input show none.
    """
    kind, context = error["type"], error.get("ctx", {})
    if kind in MUST_BE:
        words, rest = MUST_BE[kind]
        return f"must be {words.format(**{key: _plain(each) for key, each in context.items()})}{rest(error)}"
    if kind == "string_pattern_mismatch" and context.get("pattern") in PATTERNS:
        return PATTERNS[context["pattern"]]
    text = error["msg"].removeprefix("Value error, ").replace(" after validation, not ", ", not ")
    return text if text[:2].isupper() else text[:1].lower() + text[1:]


class StrictModel(BaseModel):
    """The base of documents from callers: an unknown key is a fault."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_flag(cls, value: object, info: ValidationInfo) -> object:
        """Refuse true and false for numbers: they would become 1 and 0."""
        if not isinstance(value, bool | list | dict):  # the fast path: nearly all values of large jobs
            return value
        fault = _flag_fault(value, cls.model_fields[info.field_name or ""].annotation)
        if fault is not None:
            raise PydanticCustomError("flag_for_number", "{message}", {"message": fault})
        return value


def rules(method: Callable[[Section], Rules]) -> Any:  # noqa: ANN401 - a validator of pydantic
    """Make a validator of rules between a model's fields: the first broken one is the fault, and ends the reading."""

    @wraps(method)
    def check(section: Section) -> Section:
        for is_broken, message in method(section):
            if is_broken:
                raise ValueError(message)
        return section

    return model_validator(mode="after")(check)


def broken(checks: Callable[P, Checks]) -> Callable[P, Iterator[Fault]]:
    """Make an iterator over the faults of those rules that are broken; a message that takes long may be a function."""

    @wraps(checks)
    def find(*args: P.args, **kwargs: P.kwargs) -> Iterator[Fault]:
        for is_broken, path, message in checks(*args, **kwargs):
            if is_broken:
                yield Fault(path=path, message=message if isinstance(message, str) else message())

    return find


def _flag_fault(value: object, annotation: object) -> str | None:
    """Return the fault of true or false where a number is expected, in a value or in a section; else None."""
    section = _model_in(annotation)
    if isinstance(section, type) and is_dataclass(section) and isinstance(value, Mapping):
        faults = ((name, _flag_fault(value.get(name), each)) for name, each in _fields(section).items())
        return next((f"{name}: {fault}" for name, fault in faults if fault is not None), None)
    held = value if isinstance(value, list) else [value]
    flag = next((each for each in held if isinstance(each, bool)), None)
    kinds = _kinds_of(annotation)
    if flag is None or bool in kinds or not kinds & {int, float}:
        return None
    return f"must be {'a number' if float in kinds else 'an integer'}, not {json.dumps(flag)}"


@cache
def _kinds_of(annotation: Any) -> frozenset[object]:  # noqa: ANN401 - any annotation of a field
    """Return the plain types in an annotation; for a literal, the types of its words."""
    if typing.get_origin(annotation) is typing.Literal:
        return frozenset(type(each) for each in typing.get_args(annotation))
    parts = [part for part in typing.get_args(annotation) if isinstance(part, type) or typing.get_origin(part)]
    return frozenset[object]().union(*map(_kinds_of, parts)) if parts else frozenset({annotation})


def faults_of(error: ValidationError, model: type[BaseModel]) -> list[Fault]:
    """Return one fault for each error of ``model``'s validation."""
    faults: list[Fault] = []
    for entry in error.errors(include_url=False):
        location = [part for part in entry["loc"] if not (isinstance(part, str) and BRANCH.match(part))]
        if entry["type"] == "literal_error" and isinstance(entry["input"], dict) and len(location) < len(entry["loc"]):
            continue  # the mapping's own faults are in the list too
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
    """Return the message that ``name`` is not known, with the nearest of ``known``."""
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
    """Return a path, or its longest known beginning; "" if none is known."""
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
    """Return the member of a union that is not None, or the annotation itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(annotation) if member is not type(None)]
        return next(filter(_is_model, members), members[0])
    return annotation


def _is_model(annotation: object) -> bool:
    return isinstance(annotation, type) and (issubclass(annotation, BaseModel) or is_dataclass(annotation))


def _fields(model: object) -> dict[str, object]:
    """Return the keys of a model or of a dataclass, with their annotations."""
    if isinstance(model, type) and issubclass(model, BaseModel):
        return {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    if not (isinstance(model, type) and is_dataclass(model)):
        return {}
    hints = typing.get_type_hints(model)
    return {field.name: hints[field.name] for field in fields(model)}


def _element_of(annotation: object) -> object:
    arguments = [argument for argument in typing.get_args(annotation) if argument is not Ellipsis]
    return arguments[-1] if arguments else None


def defaults_of(kind: Any) -> Mapping[str, object]:  # noqa: ANN401 - a class of either kind
    """Return the default of each key of a model or of a dataclass."""
    if issubclass(kind, BaseModel):
        return {name: field.get_default(call_default_factory=True) for name, field in kind.model_fields.items()}
    return {field.name: field.default for field in fields(kind)}
