"""JSON schemas that come with jobs: checked before anything runs, applied without trusting them."""

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

import jsonschema
import regex
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

PATTERN_LIMIT_S: Final = 0.05  # a job's expression and a model's text can be such that matching takes for ever


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
    return None


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
    try:
        error = jsonschema.exceptions.best_match(_validator(schema).iter_errors(instance))
    except Unresolvable as unresolvable:
        return f"the schema refers to {unresolvable}"
    except Exception as trouble:  # noqa: BLE001 - a schema may refer to itself without end, or divide by nothing
        return f"the schema cannot be applied: {type(trouble).__name__}: {trouble}"
    return None if error is None else f"{error.json_path}: {error.message}"


def _validator(schema: dict[str, object]) -> Validator:
    # An empty registry: a schema comes with a job, and must not make us fetch what it refers to.
    known = validator_for(schema, default=jsonschema.Draft202012Validator)
    return _with_bounded_patterns(known)(schema, registry=Registry())


@functools.cache
def _with_bounded_patterns(known: type[Validator]) -> type[Validator]:
    """Return the validator of a dialect in which no regular expression takes for ever."""

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

    checks = {
        "pattern": pattern_of,
        "patternProperties": properties_of,
        "additionalProperties": additional,
        "unevaluatedProperties": lambda *_: (),  # it looks for patterns by itself, without a limit
    }
    return cast("type[Validator]", extend(known, checks))  # type: ignore[no-untyped-call]
