"""What strangers send to be looked at: refused with a word of ours, in a time that does not grow with their wit."""

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
def test_what_is_no_schema_is_said_to_be_none(schema: dict[str, object]) -> None:
    """Each was a 500 of the library's own; and what is quoted of it is short."""
    told = schema_trouble(schema)
    assert told is not None
    assert len(told) <= MESSAGE_CHARS + 2


@given(JSON)
def test_no_schema_raises(schema: object) -> None:
    """Whatever it is."""
    schema_trouble(schema)


@pytest.mark.parametrize("pattern", ["(", "a{99999999999999999999}", "(?u)(?L)a", "a" * (PATTERN_CHARS + 1)])
def test_what_is_no_pattern_is_said_to_be_none(pattern: str) -> None:
    """One that takes long to compile is none either: it would be compiled again wherever an answer is judged."""
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
def test_what_only_looks_like_a_reference_is_none(schema: dict[str, object]) -> None:
    """Values and names are nobody's keywords."""
    assert schema_trouble(schema) is None


def test_a_reference_into_nowhere_is_found_in_any_schema() -> None:
    """Below names too."""
    assert schema_trouble({"properties": {"const": {"$ref": "#/$defs/gone"}}})


async def in_place(function: Callable[..., T], *arguments: object) -> T:
    return function(*arguments)


async def test_what_is_known_of_schemas_is_bounded() -> None:
    """However many come at once."""
    with postponing() as asked:
        assert not any(pattern_trouble(f"a{number}") for number in range(schemas.KNOWN + 50))
    assert not await find_troubles(asked)
    assert len(schemas._troubles) <= schemas.KNOWN


async def test_more_agents_than_may_be_are_not_looked_into() -> None:
    """Sizes come first."""
    agents = [{"id": f"a{number}", "model": "m", "validation": {"pattern": f"x{number}"}} for number in range(300)]
    with pytest.raises(InvalidJob, match=r"limits\.agents"):
        await read_document({"agents": agents}, Limits(), in_place)


@pytest.mark.parametrize("rest", [b"", b"\\"])
def test_values_are_counted_in_one_pass(rest: bytes) -> None:
    """A text that does not end took ten seconds for 40 KB, and four times as many for twice that."""
    began_at = time.process_time()
    assert count_nodes(b'[1, "a, b", ' + b'"' + b'\\"' * 500_000 + rest) == 3
    assert time.process_time() - began_at < 5


def test_values_are_counted_without_a_copy_in_pieces() -> None:
    """One took 45 to 60 times the body: an object for each text that is left out."""
    body = b'["' + b'","'.join([b"a"] * 50_000) + b'"]'
    tracemalloc.start()
    try:
        assert count_nodes(body) == 50_000
        assert tracemalloc.get_traced_memory()[1] < len(body)
    finally:
        tracemalloc.stop()


def test_a_body_of_texts_is_read_for_the_memory_of_its_texts() -> None:
    """What tells keys that stand twice adds nothing to it that could be seen."""
    body = b"{" + b",".join(b'"k%d":":%d"' % (place, place) for place in range(20_000)) + b"}"
    tracemalloc.start()
    try:
        document = decode_document(body, Limits())
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(document, dict)
    assert most - held < 3 * len(body)
