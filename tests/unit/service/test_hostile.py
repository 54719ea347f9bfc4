"""What strangers send to be looked at: refused with a word of ours, in a time that does not grow with their wit."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.body import count_nodes
from service.conversations.job_parser import check_schemas
from service.conversations.limits import Limits
from service.errors import InvalidJob
from workers.tools import schemas
from workers.tools.schemas import MESSAGE_CHARS, PATTERN_CHARS, find_troubles, pattern_trouble, schema_trouble

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


async def test_what_is_known_of_schemas_is_bounded() -> None:
    """However many come at once."""
    await find_troubles([], [f"a{number}" for number in range(schemas.KNOWN + 50)], is_small=False)
    assert len(schemas._troubles) <= schemas.KNOWN


async def test_more_agents_than_may_be_are_not_looked_into() -> None:
    """Sizes come first."""
    agents = [{"id": f"a{number}", "model": "m", "validation": {"pattern": f"x{number}"}} for number in range(300)]
    with pytest.raises(InvalidJob, match=r"limits\.agents"):
        await check_schemas({"agents": agents}, Limits(), is_small=True)


@pytest.mark.parametrize("rest", [b"", b"\\"])
def test_values_are_counted_in_one_pass(rest: bytes) -> None:
    """A text that does not end took ten seconds for 40 KB, and four times as many for twice that."""
    began_at = time.process_time()
    assert count_nodes(b'[1, "a, b", ' + b'"' + b'\\"' * 500_000 + rest) == 3
    assert time.process_time() - began_at < 5
