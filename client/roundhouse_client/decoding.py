"""Decoding of JSON into the values of ``values/``, by their fields' types alone.

Unknown fields stay in the value's ``document``, so that a newer service never breaks an older client. A missing field
is None if its type allows None; otherwise the answer is unusable.
"""

import json
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from datetime import datetime
from functools import cache
from typing import Any, Final, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from roundhouse_client.errors import AnswerMalformed
from roundhouse_client.values.value import Value

T = TypeVar("T")
Reader = Callable[[Any, str], Any]  # takes a part of a document, and its path
SHOWN: Final = 100  # shown characters of an answer that is not JSON


def decode(kind: type[T], document: object) -> T:
    """Return a document as a value of ``kind``.

    Raises:
        AnswerMalformed: a field is missing, or of another type; the text names its path.
    """
    annotation: Any = kind
    value: T = _reader(annotation)(document, kind.__name__)
    return value


def parse(text: bytes | str) -> Any:  # noqa: ANN401 - any JSON
    """Parse a JSON text.

    Raises:
        AnswerMalformed: it is not JSON.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise AnswerMalformed(f"an answer is not JSON: {text[:SHOWN]!r}") from error


@cache
def _reader(kind: Any) -> Reader:  # noqa: ANN401 - any annotation
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        (inner,) = (each for each in arguments if each is not types.NoneType)
        return _optional(_reader(inner))
    if origin is tuple:
        return _list(_reader(arguments[0]))
    if origin is Mapping:
        return _mapping(_reader(arguments[1]))
    if isinstance(kind, type) and issubclass(kind, Value):
        return _value(kind)
    return _PLAIN[kind]


def _value(kind: type[Value]) -> Reader:
    hints, described = get_type_hints(kind), fields(cast("Any", kind))
    readers = [(each.name, _reader(hints[each.name])) for each in described]
    newer = {each.name for each in described if each.default is not MISSING}  # an older service does not send them

    def read(document: Any, path: str) -> Value:  # noqa: ANN401 - any JSON
        if not isinstance(document, dict):
            raise AnswerMalformed(f"{path}: not an object")
        found = {
            name: reader(document.get(name), f"{path}.{name}")
            for name, reader in readers
            if name in document or name not in newer
        }
        value = kind(**found)
        object.__setattr__(value, "document", document)  # only answers have one: it is not a field
        return value

    return read


def _optional(inner: Reader) -> Reader:
    return lambda part, path: None if part is None else inner(part, path)


def _list(inner: Reader) -> Reader:
    def read(part: Any, path: str) -> tuple[Any, ...]:  # noqa: ANN401 - any JSON
        if not isinstance(part, list):
            raise AnswerMalformed(f"{path}: not a list")
        try:
            return tuple([inner(each, path) for each in part])
        except AnswerMalformed:  # places are only written for a fault: a row has thousands
            return tuple(inner(each, f"{path}[{number}]") for number, each in enumerate(part))

    return read


def _mapping(inner: Reader) -> Reader:
    def read(part: Any, path: str) -> dict[str, Any]:  # noqa: ANN401 - any JSON
        if not isinstance(part, dict):
            raise AnswerMalformed(f"{path}: not an object")
        return {name: inner(each, f"{path}.{name}") for name, each in part.items()}

    return read


def _of(*kinds: type) -> Reader:
    def read(part: Any, path: str) -> Any:  # noqa: ANN401 - any JSON
        if type(part) not in kinds:  # not isinstance: a bool is not a number
            raise AnswerMalformed(f"{path}: {'missing' if part is None else 'of another type'}")
        return part

    return read


def _time(part: Any, path: str) -> datetime:  # noqa: ANN401 - any JSON
    try:
        return datetime.fromisoformat(part)
    except (TypeError, ValueError) as error:
        raise AnswerMalformed(f"{path}: not a time") from error


_PLAIN: Final[Mapping[Any, Reader]] = {
    str: _of(str),
    int: _of(int),
    float: _of(float, int),
    bool: _of(bool),
    datetime: _time,
    object: lambda part, _path: part,
}
