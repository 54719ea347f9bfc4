"""YAML that is written as JSON value by value says what the same text says as a document of nodes."""

import json
import tracemalloc

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from service.errors import ConfigError
from service.formats.documents import parse_document
from service.formats.yaml_json import yaml_to_json

WORDS = ["", "yes", "no", "null", "~", "1", "1.5", "0x1f", "1_000", "1:30", "2026-01-01", "<<", "=", "a: b", "- a", "#"]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from([*WORDS, "*a", "&a", "!x", "|"])
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
)
DOCUMENTS = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4))
MOST = 1 << 20


def by_nodes(text: str) -> object:
    """Return what a text says by its nodes, as JSON would carry it; the error's type where it is refused."""
    try:
        return json.loads(msgspec.json.encode(parse_document(text, "line")[0]))
    except (ConfigError, OverflowError, UnicodeError, ValueError):
        return ConfigError


def by_events(text: str) -> object:
    try:
        written = yaml_to_json(text, "line", MOST)
    except (ConfigError, OverflowError, UnicodeError, ValueError):
        return ConfigError
    assert written is not None
    return json.loads(written)


@given(DOCUMENTS, st.sampled_from([True, False, None]), st.sampled_from([None, '"', "'", "|", ">"]), st.booleans())
def test_a_document_says_the_same(document: object, flow: bool | None, style: str | None, unicode: bool) -> None:
    """However PyYAML writes it; what it does not escape, it folds where it breaks lines (U+0085)."""
    text = yaml.safe_dump(document, default_flow_style=flow, default_style=style, allow_unicode=unicode)
    said = by_nodes(text)
    assert by_events(text) == said
    if said is not ConfigError and style is None and not unicode:
        assert said == document


LINES = st.lists(
    st.sampled_from(
        [
            *("a: 1", "b:", "  c: [1, 2", "]", "- x", " - y: {z: 1}", "---", "...", "? k", ": v", "a: 1", "<<: {}"),
            *("!!str 1", "n: !!int x", "n: !!float 1", "s: !!str 1", "t: !!set {a}", "d: 2026-01-01", "i: .inf"),
            *("o: 0o7", "h: 0x_", "[a: b]", "{a, b: c}", "1: 2", "? [x] : y", "e: |", "  text", "f: >-", "\tx: 1"),
            *("'q': \"\\x41\"", "# c", "%YAML 1.1", "u: \\u", "{a: 1, a: 2}"),
        ]
    ),
    max_size=6,
)


@given(LINES)
def test_what_is_refused_is_refused_alike(lines: list[str]) -> None:
    """No text is taken by the one way and refused by the other."""
    text = "\n".join(lines) + "\n"
    assert by_events(text) == by_nodes(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: &x 1\nb: *x\n", "line:1: not YAML: aliases and anchors are for files"),
        ("a: *x\n", "line:1: not YAML: aliases and anchors are for files"),
        ("a: 1\nb: 2\na: 3\n", "line:3: the key 'a' stands there twice"),
        ("a: 1\n? [b]\n: 2\n", "line:2: a key must be text; put it in quotes"),
        ("a:\n  <<: {b: 1}\n", "line:2: mappings are not merged"),
        ("a: 1\n---\nb: 2\n", "line:2: not YAML: expected a single document"),
        ("a: !!binary aGk=\n", "line:1: JSON has no binary aGk="),
        ("a: " + "[" * 300 + "]" * 300, "line: nested too deeply"),
    ],
)
def test_a_refusal_names_the_line(text: str, told: str) -> None:
    """As that of a file does."""
    with pytest.raises(ConfigError) as refused:
        yaml_to_json(text, "line", MOST)
    assert str(refused.value).startswith(told)


@pytest.mark.system
@pytest.mark.parametrize("value", ["0,", "a,", "{},", "[],", "{a: 1},"])
def test_many_values_take_little_memory(value: str) -> None:
    """A few times the text, where nodes took hundreds of times as much."""
    text = "a: [" + value * (20_000 // len(value)) + "0]\n"
    yaml_to_json("a: [1]\n", "line", MOST)
    tracemalloc.start()
    try:
        yaml_to_json(text, "line", MOST)
        assert tracemalloc.get_traced_memory()[1] < 6 * len(text)
    finally:
        tracemalloc.stop()


def test_what_is_larger_than_it_may_be_is_not_written() -> None:
    """Control characters are six times as long in JSON."""
    assert yaml_to_json('a: "' + r"\a" * 100 + '"', "line", 300) is None
    assert yaml_to_json('{"a": "' + "x" * 300 + '"}', "line", 300) is None
    assert yaml_to_json("", "line", 300) == b"null"
