"""YAML written as JSON value by value means the same as the tree of its nodes."""

import json
import tracemalloc
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from roundhouse_client import load_job
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
    """Return the value of a text's nodes as JSON would carry it, or the error's type if it is refused."""
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
def test_a_document_means_the_same(document: object, flow: bool | None, style: str | None, unicode: bool) -> None:
    """However PyYAML writes it; characters that it does not escape are folded where it breaks lines (U+0085)."""
    text = yaml.safe_dump(document, default_flow_style=flow, default_style=style, allow_unicode=unicode)
    said = by_nodes(text)
    assert by_events(text) == said
    if said is not ConfigError and style is None and not unicode:
        assert said == document


@pytest.mark.parametrize(
    ("written", "value"),
    [
        *(("12:30", "12:30"), ("1:0", "1:0"), ("1_000", "1_000"), ("0b11", "0b11"), ("=", "="), ("yes", "yes")),
        *(("1e3", 1000.0), ("1e-3", 0.001), (".5", 0.5), ("1.", 1.0), ("-0", 0), ("+7", 7), ("0o10", 8), ("0x1F", 31)),
        *(("0", 0), ("0.50", 0.5), ("1.e2", 100.0), ("!!float 1", 1.0), ("!!str 010", "010"), ("'010'", "010")),
        *(("2026-01-01", "2026-01-01"), ("~", None), ("", None), ("!!null", None), ("True", True), ("tRue", "tRue")),
        *(('"\\ud83d\\ude00"', "\U0001f600"), ('"a\x85b"', "a\x85b"), ("a\u2028b", "a\u2028b"), ("'\x85'", "\x85")),
        *(("|\n  a\u2029b\n  c\n", "a\u2029b\nc\n"), ("1e", "1e"), ("0x", "0x"), ("0o8", "0o8"), (".", ".")),
    ],
)
def test_scalars_are_those_of_version_1_2(tmp_path: Path, written: str, value: object) -> None:
    """Everywhere; nothing of PyYAML's own meaning is left."""
    text = f"v: {written}\nconversations: []\n"
    (tmp_path / "job.yaml").write_text(text)
    for said in (by_nodes(text), by_events(text), load_job(tmp_path / "job.yaml")):
        assert isinstance(said, dict)
        assert (said["v"], type(said["v"])) == (value, type(value))


def test_a_line_ends_where_editors_end_it() -> None:
    """U+0085, U+2028 and U+2029 end none, in text as in comments."""
    text = "# a\u2028b\x85c\na: x\u2029y\nb: [\n"
    with pytest.raises(ConfigError, match=r"^line:4: "):
        yaml_to_json(text, "line", MOST)


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
def test_refusals_are_the_same_in_both_ways(lines: list[str]) -> None:
    """No text is accepted one way and refused the other."""
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
    """As the refusal of a file does."""
    with pytest.raises(ConfigError) as refused:
        yaml_to_json(text, "line", MOST)
    assert str(refused.value).startswith(told)


@pytest.mark.system
@pytest.mark.parametrize("value", ["0,", "a,", "{},", "[],", "{a: 1},"])
def test_many_values_take_little_memory(value: str) -> None:
    """A few times the text, whereas nodes took hundreds of times as much."""
    text = "a: [" + value * (20_000 // len(value)) + "0]\n"
    yaml_to_json("a: [1]\n", "line", MOST)
    tracemalloc.start()
    try:
        yaml_to_json(text, "line", MOST)
        assert tracemalloc.get_traced_memory()[1] < 6 * len(text)
    finally:
        tracemalloc.stop()


def test_a_document_beyond_its_bound_is_not_written() -> None:
    """Control characters are six times as long in JSON."""
    assert yaml_to_json('a: "' + r"\a" * 100 + '"', "line", 300) is None
    assert yaml_to_json('{"a": "' + "x" * 300 + '"}', "line", 300) is None
    assert yaml_to_json("", "line", 300) == b"null"
