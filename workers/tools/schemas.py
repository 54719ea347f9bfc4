"""JSON schemas that come with jobs: checked before anything runs, applied without trusting them.

Applying a schema to a model's answer may take for ever: by a regular expression, by references that double at each
step, by sheer size. So every keyword checks a clock. Since some take long between two checks, only small input is
judged in process, for a moment, and everything else in another process.
"""

import functools
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, cast
from urllib.parse import unquote

import jsonschema
import regex
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from workers.offload.pool import ELSEWHERE_S, Purpose, offload

PATTERN_LIMIT_S: Final = 0.05  # for one match
CHECK_LIMIT_S: Final = 30.0  # for all schemas of one job together: the library's own check is slow
PATTERN_CHARS: Final = 16_384  # compiling takes a second for some 130,000
KNOWN: Final = 10_000  # schemas and patterns whose check is remembered
VALUES: Final = frozenset({"const", "enum", "default", "examples"})  # they hold instances
NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
MESSAGE_CHARS: Final = 1000
Asked = dict[bytes, tuple[str, str]]  # by digest: "schema" or "pattern", and its text
Keyword = Callable[[Any, Any, Any, Any], Iterator[jsonschema.ValidationError] | None]
_deadline: ContextVar[float] = ContextVar("deadline")  # in this thread's own time
_postponed: ContextVar[Asked | None] = ContextVar("postponed", default=None)
_troubles: dict[bytes, str | None] = {}  # by digest
TYPES: Final = "array, boolean, integer, null, number, object and string"


def schema_trouble(schema: object) -> str | None:
    """Return why ``schema`` is no JSON schema, None if it is one; the finding is kept for equal schemas."""
    if not isinstance(schema, dict):
        return "is not a JSON schema"
    try:
        text = json.dumps(schema, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        return f"is not JSON: {error}"
    return _known("schema", text, lambda: _schema_trouble(schema))


def pattern_trouble(pattern: str) -> str | None:
    """Return why ``pattern`` is no regular expression, None if it is one."""
    return _known("pattern", pattern, lambda: _pattern_trouble(pattern))


def _known(kind: str, text: str, find_out: Callable[[], str | None]) -> str | None:
    digest = _digest(kind, text)
    postponed = _postponed.get()
    if postponed is not None:
        postponed[digest] = kind, text
        return None
    if digest not in _troubles:
        _keep(digest, find_out())
    return _troubles[digest]


def _keep(digest: bytes, trouble: str | None) -> None:
    _troubles[digest] = None if trouble is None else cut(trouble)
    while len(_troubles) > KNOWN:
        del _troubles[next(iter(_troubles))]


@contextmanager
def postponing() -> Iterator[Asked]:
    """Check no schema and no pattern for a block; yield those that it would have checked, for ``find_troubles``."""
    asked: Asked = {}
    token = _postponed.set(asked)
    try:
        yield asked
    finally:
        _postponed.reset(token)


async def find_troubles(asked: Asked) -> bool:
    """Check schemas and patterns in another process; return whether any has a fault.

    From then on ``schema_trouble`` and ``pattern_trouble`` know the answers.

    Raises:
        TimeoutError: the checks take too long.
        OffloadCrowded: too many checks wait already.
    """
    troubles = {digest: _troubles[digest] for digest in asked if digest in _troubles}
    new = {digest: what for digest, what in asked.items() if digest not in troubles}
    if new:
        found = await offload(_all_troubles, list(new.values()), limit_s=CHECK_LIMIT_S, purpose=Purpose.DOCUMENTS)
        for digest, trouble in zip(new, found, strict=True):
            troubles[digest] = trouble
            _keep(digest, trouble)
    return any(trouble is not None for trouble in troubles.values())


def _digest(kind: str, text: str) -> bytes:
    return hashlib.sha256(f"{kind} {text}".encode("utf-8", "surrogatepass")).digest()


def _all_troubles(asked: list[tuple[str, str]]) -> list[str | None]:
    return [_pattern_trouble(text) if kind == "pattern" else _schema_trouble(json.loads(text)) for kind, text in asked]


def _schema_trouble(schema: dict[str, object]) -> str | None:
    try:
        validator_for(schema, default=jsonschema.Draft202012Validator).check_schema(schema)
        if _mentions(schema, "unevaluatedProperties"):
            return "unevaluatedProperties cannot be applied here; use additionalProperties"
        lost = next((target for target in _references(schema) if not _is_there(schema, target)), None)
    except jsonschema.SchemaError as error:
        return _schema_fault(error)
    except Exception as error:  # noqa: BLE001 - the library fails on many invalid schemas, in many ways
        return f"cannot be checked: {type(error).__name__}: {error}"
    return None if lost is None else f"refers to {lost!r}, which is not in it"


def _schema_fault(error: jsonschema.SchemaError) -> str:
    """Return the fault of a schema, and its place."""
    place = ".".join(map(str, error.absolute_path))
    is_word = isinstance(error.instance, str) and error.absolute_path and error.absolute_path[-1] == "type"
    fault = f"{error.instance!r} is no type; there are {TYPES}" if is_word else error.message
    return f"{place}: {fault}" if place else fault


def _pattern_trouble(pattern: str) -> str | None:
    if len(pattern) > PATTERN_CHARS:
        return f"{len(pattern)} characters are more than {PATTERN_CHARS}"
    try:
        regex.compile(pattern)
    except RecursionError:
        return "is nested too deeply"
    except Exception as error:  # noqa: BLE001 - numbers too large and flags that contradict each other among others
        return str(error)
    return None


def cut(message: str) -> str:
    """Shorten a message that may quote a long instance: it goes into prompts and answers."""
    return message if len(message) <= MESSAGE_CHARS else f"{message[:MESSAGE_CHARS]} …"


def is_found(pattern: str, text: str) -> bool:
    """Whether a regular expression matches anywhere in ``text``.

    Raises:
        TimeoutError: that takes too long to find out.
    """
    left_s = min(PATTERN_LIMIT_S, _deadline.get(math.inf) - time.thread_time())
    if left_s <= 0:
        raise TimeoutError("no time is left")
    return regex.search(pattern, text, timeout=left_s) is not None


def schema_fault(schema: dict[str, object], instance: Any, limit_s: float = ELSEWHERE_S) -> str | None:  # noqa: ANN401 - any JSON
    """Return the schema's fault with ``instance``, or None.

    Raises:
        TimeoutError: that takes longer than ``limit_s`` of this thread's own time to find out.
    """
    with within(limit_s):
        try:
            error = jsonschema.exceptions.best_match(_validator(schema).iter_errors(instance))
        except Unresolvable as unresolvable:
            return cut(f"the schema refers to {unresolvable}")
        except TimeoutError:
            raise
        except Exception as trouble:  # noqa: BLE001 - a schema may refer to itself without end, or divide by zero
            return cut(f"the schema cannot be applied: {type(trouble).__name__}: {trouble}")
    return None if error is None else cut(f"{error.json_path}: {error.message}")


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Bound the checks in a block by this thread's own time."""
    token = _deadline.set(time.thread_time() + limit_s)
    try:
        yield
    finally:
        _deadline.reset(token)


def _validator(schema: dict[str, object]) -> Validator:
    # An empty registry: a schema comes with a job, and must not make us fetch its references. Only the root names the
    # dialect: at a dialect's name further down the library would switch to its own validator.
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


def _schemas_in(schema: object) -> Iterator[dict[str, object]]:
    """Yield a schema and all possible schemas below it, without instances and names that only look like one."""
    if isinstance(schema, list):
        for each in schema:
            yield from _schemas_in(each)
    elif isinstance(schema, dict):
        yield schema
        for key, value in schema.items():
            if key in NAMED and isinstance(value, dict):
                yield from _schemas_in(list(value.values()))
            elif key not in VALUES:
                yield from _schemas_in(value)


def _references(schema: object) -> Iterator[str]:
    targets = (each.get("$ref") for each in _schemas_in(schema))
    return (target for target in targets if isinstance(target, str))


def _is_there(schema: object, target: str) -> bool:
    """Whether a reference leads to another place of the same schema; the library resolves names of anchors."""
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
    return any(keyword in each for each in _schemas_in(schema))


def _pattern_of(
    _validator: Validator, pattern: str, instance: object, _schema: object
) -> Iterator[jsonschema.ValidationError]:
    if isinstance(instance, str) and not is_found(pattern, instance):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def _unique_of(
    _validator: Validator, is_wanted: object, instance: object, _schema: object
) -> Iterator[jsonschema.ValidationError]:
    # The library compares each item with each: 21 s for 4,000 of them.
    if is_wanted and isinstance(instance, list) and len({_canonical(item) for item in instance}) < len(instance):
        yield jsonschema.ValidationError(f"{instance!r} has non-unique elements")


@functools.cache
def _bounded(known: type[Validator]) -> type[Validator]:
    """Return the validator of a dialect, in which every keyword is bounded in time."""

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

    ours = {
        "uniqueItems": _unique_of,
        "pattern": _pattern_of,
        "patternProperties": properties_of,
        "additionalProperties": additional,
    }
    keywords = {**known.VALIDATORS, **ours}
    checks = {name: _timed(keyword) for name, keyword in keywords.items()}
    return cast("type[Validator]", extend(known, checks))  # type: ignore[no-untyped-call]


def _canonical(value: object) -> str:
    """Return the same text for values that JSON schema takes as equal: 1 and 1.0 are, 1 and true are not."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list) else value


def _timed(keyword: Keyword) -> Keyword:
    def check(
        validator: object, value: object, instance: object, schema: object
    ) -> Iterator[jsonschema.ValidationError]:
        if time.thread_time() > _deadline.get():
            raise TimeoutError("no time is left")
        yield from keyword(validator, value, instance, schema) or ()

    return check
