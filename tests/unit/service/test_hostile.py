"""Hostile input to be examined is refused with a message of ours, in bounded time."""

import time
import tracemalloc
from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.body import count_nodes, decode_document
from service.conversations.document.limits import Limits
from service.conversations.document.reading import read_document
from service.errors import InvalidJob
from workers.tools import schemas
from workers.tools.schemas import (
    MESSAGE_CHARS,
    PATTERN_CHARS,
    find_troubles,
    pattern_trouble,
    postponing,
    schema_trouble,
)

T = TypeVar("T")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from([*"ab", "$ref", "$schema", "type", "allOf"]), inner)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize(
    "schema",
    [
        {"$schema": []},
        {"$schema": 5},
        {"$schema": "http://["},
        {"pattern": "a{99999999999999999999}"},
        {"pattern": "(?u)(?L)a"},
        {"allOf": [{}], "$ref": "#/allOf/" + "1" * 5000},
        {"$ref": "x" * 2_000_000},
    ],
)
def test_an_invalid_schema_is_refused_with_a_message(schema: dict[str, object]) -> None:
    """Each of these was a 500 from the library. The message quotes little of the schema."""
    told = schema_trouble(schema)
    assert told is not None
    assert len(told) <= MESSAGE_CHARS + 2


@given(JSON)
def test_no_schema_raises(schema: object) -> None:
    """Validation returns faults for any value."""
    schema_trouble(schema)


@pytest.mark.parametrize("pattern", ["(", "a{99999999999999999999}", "(?u)(?L)a", "a" * (PATTERN_CHARS + 1)])
def test_an_invalid_pattern_is_refused_with_a_message(pattern: str) -> None:
    """A pattern that takes long to compile counts as invalid: each answer that it judges would compile it again."""
    assert pattern_trouble(pattern)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": {"$ref": "x"}},
        {"enum": [{"$ref": "http://x"}]},
        {"properties": {"unevaluatedProperties": {"type": "string"}, "$ref": {"type": "string"}}},
        {"$defs": {"a": {"type": "string"}}, "$ref": "#/$defs/a"},
    ],
)
def test_what_only_looks_like_a_reference_is_accepted(schema: dict[str, object]) -> None:
    """A reference's keyword may also be a value or the name of a property."""
    assert schema_trouble(schema) is None


def test_a_reference_into_nowhere_is_found_in_any_schema() -> None:
    """It is found below names of properties too."""
    assert schema_trouble({"properties": {"const": {"$ref": "#/$defs/gone"}}})


async def in_place(function: Callable[..., T], *arguments: object) -> T:
    return function(*arguments)


async def test_memory_for_known_schemas_is_bounded() -> None:
    """However many arrive at once."""
    with postponing() as asked:
        assert not any(pattern_trouble(f"a{number}") for number in range(schemas.KNOWN + 50))
    assert not await find_troubles(asked)
    assert len(schemas._troubles) <= schemas.KNOWN


async def test_too_many_agents_are_refused_unread() -> None:
    """Sizes are checked first."""
    agents = [{"id": f"a{number}", "model": "m", "validation": {"pattern": f"x{number}"}} for number in range(300)]
    with pytest.raises(InvalidJob, match=r"limits\.agents"):
        await read_document({"agents": agents}, Limits(), in_place)


@pytest.mark.parametrize("rest", [b"", b"\\"])
def test_values_are_counted_in_one_pass(rest: bytes) -> None:
    """A text without an end took ten seconds for 40 KB, and four times as long for twice the size."""
    began_at = time.process_time()
    assert count_nodes(b'[1, "a, b", ' + b'"' + b'\\"' * 500_000 + rest) == 3
    assert time.process_time() - began_at < 5


def test_values_are_counted_without_a_copy_in_pieces() -> None:
    """A copy took 45 to 60 times the body: an object for each text that is left out."""
    body = b'["' + b'","'.join([b"a"] * 50_000) + b'"]'
    tracemalloc.start()
    try:
        assert count_nodes(body) == 50_000
        assert tracemalloc.get_traced_memory()[1] < len(body)
    finally:
        tracemalloc.stop()


def test_a_body_of_texts_is_read_in_the_memory_of_its_texts() -> None:
    """The check for keys that stand twice adds no measurable memory."""
    body = b"{" + b",".join(b'"k%d":":%d"' % (place, place) for place in range(20_000)) + b"}"
    tracemalloc.start()
    try:
        document = decode_document(body, Limits())
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(document, dict)
    assert most - held < 3 * len(body)
