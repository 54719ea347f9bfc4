"""The forms of the log, and the fields of its lines."""

import json
import logging
import sys
from functools import partial

import anyio
import pytest

from service.conversations.record.log_fields import of_turn
from service.telemetry.logs import JsonFormatter, PeopleFormatter
from tests.harness.jobs import key
from workers.log_context import about, concerns_now, line_about, of_worker

TURN = {"job": "j", "conversation": "c0", "agent": "a", "round": 2}


def record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("service.x", logging.WARNING, __file__, 1, message, arguments, None)
    vars(made).update(extra)
    return made


def fields(line: logging.LogRecord) -> dict[str, object]:
    """Return the fields of a line of JSON beside its message."""
    written = json.loads(JsonFormatter().format(line))
    assert (written.pop("level"), written.pop("logger")) == ("WARNING", "service.x")
    del written["time"], written["message"]
    return dict(written)


def test_a_line_carries_the_fields_of_its_block_and_none_afterwards() -> None:
    """Inside a turn's block that contains a worker's block, the innermost applies whole."""
    with about(partial(of_turn, key("a", 2), "m-0", 7)):
        assert fields(record("x")) == {**TURN, "worker": "m-0", "incarnation": 7}
        with about(partial(of_worker, "m-1", 1)):
            assert fields(record("x")) == {"worker": "m-1", "incarnation": 1}
        assert fields(record("x"))["job"] == "j"
    assert fields(record("x")) == {}


def test_a_line_may_carry_other_fields_than_its_block() -> None:
    """A line about another turn gives that turn's fields itself, or those kept from it."""
    with about(partial(of_turn, key("a", 2))):
        kept = concerns_now()
        assert fields(record("x", **line_about(of_worker("w", 3)))) == {"worker": "w", "incarnation": 3}
    assert fields(record("x", **line_about(kept()))) == TURN


async def test_concurrent_tasks_keep_their_fields_apart() -> None:
    """Each task's lines carry its own turn's fields, in any interleaving.

    A task started within another inherits them.
    """
    seen: list[tuple[str, object]] = []

    async def child(name: str) -> None:
        seen.append((name, fields(record("x"))["agent"]))

    async def run(name: str) -> None:
        with about(partial(of_turn, key(name))):
            await anyio.lowlevel.checkpoint()
            seen.append((name, fields(record("x"))["agent"]))
            async with anyio.create_task_group() as inner:
                inner.start_soon(child, name)

    async with anyio.create_task_group() as tasks:
        for name in ("a", "b", "c"):
            tasks.start_soon(run, name)
    assert len(seen) == 6
    assert all(name == told for name, told in seen)


def test_json_holds_any_message() -> None:
    """A line feed, half a surrogate pair and a traceback make one line of JSON."""
    why = ValueError("why")
    text = JsonFormatter().format(record("a\nb %s \ud800", "c", exc_info=(ValueError, why, None)))
    assert "\n" not in text
    assert json.loads(text)["message"] == "a\nb c ?"
    assert json.loads(text)["exception"] == "ValueError: why"


@pytest.mark.parametrize(
    ("extra", "end"), [({}, ": x 1"), (line_about(of_worker("w", 3)), ": x 1 [worker=w incarnation=3]")]
)
def test_people_read_the_fields_in_brackets(extra: dict[str, object], end: str) -> None:
    """The fields stand at the end of a line; a line without fields has no brackets."""
    assert PeopleFormatter().format(record("x %d", 1, **extra)).endswith(f" WARNING service.x{end}")


def test_quoted_words_stay_within_their_line() -> None:
    """An engine repeats what a client has sent: no part of it looks like a line of ours, and no terminal obeys it."""
    said = "refused: a\r\n2026-01-01 ERROR service.x: all is lost\x1b[2J\x9b2J\tä€"
    line = PeopleFormatter().format(record("%s", said, about={}))
    assert line.endswith("refused: a\\r\\n2026-01-01 ERROR service.x: all is lost\\x1b[2J\\x9b2J\tä€")
    assert len(line.splitlines()) == 1
    assert json.loads(JsonFormatter().format(record("%s", said)))["message"] == said


def test_the_length_of_a_message_is_bounded() -> None:
    """Clients may send megabytes, and a message may quote them."""
    for line in (
        PeopleFormatter().format(record("%s", "x" * 5_000_000, about={})),
        json.loads(JsonFormatter().format(record("%s", "x" * 5_000_000)))["message"],
    ):
        assert len(line) < 2200
        assert line.endswith("… and 4998000 characters more")


def test_a_traceback_keeps_its_lines() -> None:
    """It comes from our own code."""
    made = record("it failed", about={})
    try:
        int("none")
    except ValueError:
        made.exc_info = sys.exc_info()
    assert PeopleFormatter().format(made).count("\n") > 2
