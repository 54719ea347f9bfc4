"""Recorded sessions, reduced in size: shared prefixes stay shared, and sessions that do not fit are left out."""

import json
from pathlib import Path

import pytest

from bench.parts.recorded_sessions import read_sessions


def write(folder: Path, name: str, *requests: dict[str, object]) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"requests": requests}))


def test_prefixes_lengths_and_pauses_are_those_that_were_recorded(tmp_path: Path) -> None:
    """A hash has the same block number wherever it occurs, and another number in another session."""
    first = {"in": 192, "out": 300, "hash_ids": [1, 2, 3], "think_time": 0.0}
    more = {"in": 256, "out": 5000, "hash_ids": [1, 2, 3, 9], "think_time": 400.0}
    for name in ("a", "b"):
        write(tmp_path, name, first, more)
    one, other = read_sessions(tmp_path, 2, 2, 1000)
    assert one[1].prompt == f"{one[0].prompt} 100009"
    assert one[0].prompt.split() == ["100001", "100002", "100003"]
    assert other[0].prompt.split() == ["200001", "200002", "200003"]
    assert [(each.answer, each.pause_s) for each in one] == [(30, 0.0), (96, 3.0)]


def test_sessions_that_are_too_long_or_too_short_are_skipped(tmp_path: Path) -> None:
    """A folder without enough sessions is reported."""
    write(tmp_path, "a", {"out": 1, "hash_ids": list(range(500))})
    write(tmp_path, "b", {"out": 1, "hash_ids": [1]})
    assert [len(each) for each in read_sessions(tmp_path, 1, 1, 1000)] == [1]
    with pytest.raises(SystemExit, match="has 1 sessions of 1 requests that fit 1000 tokens"):
        read_sessions(tmp_path, 2, 1, 1000)
