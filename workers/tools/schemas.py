"""JSON schemas that come with jobs: checked before anything runs, applied without trusting them.

A schema and a model's answer can be such that applying the one to the other takes for ever: by a regular expression, by
references that double at each step, by sheer size. So every keyword looks at a clock.
"""

import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Final, cast
from urllib.parse import unquote

import jsonschema
import regex
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

PATTERN_LIMIT_S: Final = 0.05  # of one match
SCHEMA_LIMIT_S: Final = 0.2  # of one answer or one call, all together
Keyword = Callable[[Any, Any, Any, Any], Iterator[jsonschema.ValidationError] | None]
_deadline: ContextVar[float] = ContextVar("deadline")


def schema_trouble(schema: object) -> str | None:
    """Return why ``schema`` is no JSON schema, None where it is one."""
    if not isinstance(schema, dict):
        return "is not a JSON schema"
    try:
        json.dumps(schema)
        validator_for(schema, default=jsonschema.Draft202012Validator).check_schema(schema)
    except (TypeError, ValueError) as error:
        return f"is no JSON: {error}"
    except jsonschema.SchemaError as error:
        return error.message
    if _mentions(schema, "unevaluatedProperties"):
        return "unevaluatedProperties cannot be applied here; use additionalProperties"
    lost = next((target for target in _references(schema) if not _is_there(schema, target)), None)
    return None if lost is None else f"refers to {lost!r}, which is not in it"


def pattern_trouble(pattern: str) -> str | None:
    """Return why ``pattern`` is no regular expression, None where it is one."""
    try:
        regex.compile(pattern)
    except regex.error as error:
        return str(error)
    return None


def is_found(pattern: str, text: str) -> bool:
    """Whether a regular expression matches anywhere in ``text``.

    Raises:
        TimeoutError: that takes too long to find out.
    """
    return regex.search(pattern, text, timeout=PATTERN_LIMIT_S) is not None


def schema_fault(schema: dict[str, object], instance: Any) -> str | None:  # noqa: ANN401 - any JSON
    """Return what a schema finds wrong with ``instance``, None where nothing is."""
    token = _deadline.set(time.monotonic() + SCHEMA_LIMIT_S)
    try:
        error = jsonschema.exceptions.best_match(_validator(schema).iter_errors(instance))
    except Unresolvable as unresolvable:
        return f"the schema refers to {unresolvable}"
    except Exception as trouble:  # noqa: BLE001 - a schema may refer to itself without end, or divide by nothing
        return f"the schema cannot be applied: {type(trouble).__name__}: {trouble}"
    finally:
        _deadline.reset(token)
    return None if error is None else f"{error.json_path}: {error.message}"


def _validator(schema: dict[str, object]) -> Validator:
    # An empty registry: a schema comes with a job, and must not make us fetch what it refers to. The root alone says
    # which dialect it is: at a name of a dialect further down the library would go back to a validator of its own.
    known = validator_for(schema, default=jsonschema.Draft202012Validator)
    return _bounded(known)(cast("Any", _without_dialects(schema)), registry=Registry())


def _without_dialects(schema: object) -> object:
    if isinstance(schema, list):
        return [_without_dialects(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_dialects(value)
        for key, value in schema.items()
        if not (key == "$schema" and isinstance(value, str))
    }


def _references(schema: object) -> Iterator[str]:
    if isinstance(schema, list):
        for each in schema:
            yield from _references(each)
    elif isinstance(schema, dict):
        for key, value in schema.items():
            if key == "$ref" and isinstance(value, str):
                yield value
            else:
                yield from _references(value)


def _is_there(schema: object, target: str) -> bool:
    """Whether a reference leads to another place of the same schema; names of anchors are left to the library."""
    if target == "#" or not target.startswith("#/"):
        return target.startswith("#") and (target != "#" or not _is_bare_loop(schema))
    place: object = schema
    for step in map(unquote, target[2:].split("/")):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict) and name in place:
            place = place[name]
        elif isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        else:
            return False
    return True


def _is_bare_loop(schema: object) -> bool:
    return isinstance(schema, dict) and schema.get("$ref") == "#"


def _mentions(schema: object, keyword: str) -> bool:
    if isinstance(schema, list):
        return any(_mentions(each, keyword) for each in schema)
    return isinstance(schema, dict) and (keyword in schema or any(_mentions(each, keyword) for each in schema.values()))


@functools.cache
def _bounded(known: type[Validator]) -> type[Validator]:
    """Return the validator of a dialect in which nothing takes for ever."""

    def properties_of(
        validator: Validator, patterns: Mapping[str, object], instance: object, _schema: object
    ) -> Iterator[jsonschema.ValidationError]:
        for name, value in instance.items() if isinstance(instance, dict) else ():
            for pattern, subschema in patterns.items():
                if is_found(pattern, name):
                    yield from cast("Any", validator).descend(value, subschema, path=name, schema_path=pattern)

    def additional(
        validator: Validator, allowed: object, instance: object, schema: Mapping[str, Any]
    ) -> Iterator[jsonschema.ValidationError]:
        patterns = schema.get("patternProperties", {})
        if isinstance(instance, dict):
            instance = {
                name: value
                for name, value in instance.items()
                if not any(is_found(pattern, name) for pattern in patterns)
            }
        rest = {key: value for key, value in schema.items() if key != "patternProperties"}
        yield from known.VALIDATORS["additionalProperties"](validator, allowed, instance, rest)

    def pattern_of(
        _validator: Validator, pattern: str, instance: object, _schema: object
    ) -> Iterator[jsonschema.ValidationError]:
        if isinstance(instance, str) and not is_found(pattern, instance):
            yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")

    ours = {"pattern": pattern_of, "patternProperties": properties_of, "additionalProperties": additional}
    keywords = {**known.VALIDATORS, **ours}
    checks = {name: _timed(keyword) for name, keyword in keywords.items()}
    return cast("type[Validator]", extend(known, checks))  # type: ignore[no-untyped-call]


def _timed(keyword: Keyword) -> Keyword:
    def check(
        validator: object, value: object, instance: object, schema: object
    ) -> Iterator[jsonschema.ValidationError]:
        if time.monotonic() > _deadline.get():
            raise TimeoutError(f"not done within {SCHEMA_LIMIT_S:g} s")
        yield from keyword(validator, value, instance, schema) or ()

    return check
