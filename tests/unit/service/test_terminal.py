"""Output on a terminal and to a pipe (specification, "The terminal")."""

import io
from typing import Any

import pytest
from rich.console import Console

from service.cli.displays.pace import Pace, about, bar, pace_text
from service.cli.displays.status_table import changes, last_words, plain_lines, rates, table, who

Document = dict[str, Any]


def pace_of(*seen: tuple[float, int]) -> Pace:
    pace = Pace()
    for at, ended in seen:
        pace.note(at, ended)
    return pace


@pytest.mark.parametrize(
    ("seen", "rate"),
    [
        ([], None),
        ([(0, 5)], None),
        ([(0, 0), (4, 100)], None),  # too soon
        ([(0, 0), (50, 9)], None),  # too few
        ([(0, 0), (5, 10)], 2.0),
        ([(0, 50), (10, 70)], 2.0),  # turns from before a restart count for no pace
        ([(0, 0), (30, 300), (90, 420)], 2.0),  # the last minute counts, and no more
        ([(0, 0), (30, 300), (90, 300)], None),  # nothing ends any more
        ([(0, 900), (10, 1000), (11, 3), (21, 23)], 2.0),  # the service was restarted
    ],
)
def test_a_pace_is_shown_once_it_is_known(seen: list[tuple[float, int]], rate: float | None) -> None:
    """It is known after ten turns over at least five seconds, of the last minute."""
    assert pace_of(*seen).turns_per_s == rate


def test_an_end_is_estimated_only_where_the_pace_is_known() -> None:
    """Before that no estimate is shown, and none once nothing is left."""
    known = pace_of((0, 0), (10, 20))
    assert (known.left_s(100), Pace().left_s(100)) == (50.0, None)
    assert pace_text(Pace(), 100, 12.4) == "12 tokens/s"
    assert pace_text(known, 100, 12.6) == "13 tokens/s | 2.0 turns/s | about 50 s left"
    assert pace_text(known, 0, 0.0) == "0 tokens/s | 2.0 turns/s"


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.2, "less than 10 s"),
        (44, "about 40 s"),
        (61, "about 1 min"),
        (754, "about 13 min"),
        (3600, "about 1 h"),
        (7620, "about 2 h 10 min"),
    ],
)
def test_an_estimate_is_rounded_to_what_is_known(seconds: float, told: str) -> None:
    """Seconds of an hour would be a false precision."""
    assert about(seconds) == told


@pytest.mark.parametrize(
    ("done", "total", "shown"),
    [
        (0, 4, "░░░░"),
        (1, 4, "█░░░"),
        (1, 1000, "█░░░"),
        (999, 1000, "███░"),
        (4, 4, "████"),
        (0, 0, "░░░░"),
        (9, 4, "████"),
    ],
)
def test_a_bar_is_full_only_when_all_is_done(done: int, total: int, shown: str) -> None:
    """It is empty only when nothing is."""
    assert bar(done, total, 4) == shown


def worker(name: str, **fields: object) -> Document:
    return {
        "id": name, "state": "ready", "because": "the engine answers", "incarnation": 1,
        "slots": {"total": 4, "in_use": 1}, "tokens_per_s": 30.4, "verdict": None, "requests": [], "kv": None, **fields,
    }  # fmt: skip


def status(*workers: Document, **fields: object) -> Document:
    return {
        "jobs": 1, "conversations": {"total": 8, "finished": 2, "persisted": 2}, "ended_turns": 20,
        "pools": {"pending": 5, "ready": 3, "in_flight": 2, "capacity": 4}, "heads": {"pending": [], "ready": []},
        "unclaimed": {}, "store": {"node": "n", "trouble": None}, "tool_servers": [], "lanes": [],
        "workers": list(workers), **fields,
    }  # fmt: skip


SPEAKS: Document = {
    "job": "job-1", "name": "debate\x1b[2J", "conversation": "q1", "agent": "a", "round": 2, "worker": "m-0",
    "running_s": 3.0, "output_tokens": 7, "is_thinking": False, "words": "one two\n\x1b]0;three four",
}  # fmt: skip


def test_rates_are_those_of_all_workers() -> None:
    """Turns of all three pools count as left."""
    assert rates(status(worker("a"), worker("b")), pace_of((0, 0), (10, 20))) == (
        "61 tokens/s | 2.0 turns/s | less than 10 s left"
    )


def test_the_last_words_end_with_what_was_said_and_fit_one_line() -> None:
    """Control characters of others move no cursor and rename no window."""
    assert who(SPEAKS) == "debate\N{REPLACEMENT CHARACTER}[2J/q1 r2 a on m-0"
    assert last_words(SPEAKS, 100) == "one two \N{REPLACEMENT CHARACTER}]0;three four"
    assert last_words(SPEAKS, 5) == "…four"
    assert last_words({**SPEAKS, "words": ""}, 5) == "(reads)"


def test_the_table_in_a_pipe_is_lines() -> None:
    """Each worker and each turn that speaks has a line."""
    assert plain_lines(status(worker("m-0")), [SPEAKS]) == [
        "2/8 conversations (2 persisted) | in flight 2/4 | ready 3 | pending 5",
        "  worker m-0: ready, 1/4 slots, 30 tokens/s: the engine answers",
        "  debate\N{REPLACEMENT CHARACTER}[2J/q1 r2 a on m-0: one two \N{REPLACEMENT CHARACTER}]0;three four",
    ]


def drawn(**fields: Any) -> list[str]:  # noqa: ANN401 - the table's
    console = Console(file=io.StringIO(), width=90, force_terminal=False, emoji=False)
    console.print(table(status(worker("m-0")), **fields))
    file = console.file
    assert isinstance(file, io.StringIO)
    return [line.strip() for line in file.getvalue().splitlines() if line.strip() and not line.startswith("─")]


def test_the_table_on_a_terminal_has_bars_and_rates() -> None:
    """Bars show the share of ended conversations and of slots in use."""
    assert drawn(pace=pace_of((0, 0), (10, 20)), hint="q: leave") == [
        "2/8 conversations (2 persisted) | in flight 2/4 | ready 3 | pending 5",
        "██████░░░░░░░░░░░░░░░░░░ 30 tokens/s | 2.0 turns/s | less than 10 s left",
        "worker  speaking (job/conversation/agent/round)  so far",
        "READY (waits for a slot)                     PENDING (waits for others)",
        "worker  state  slots     kv  tokens/s  verdict  because",
        "m-0     ready  █░░░ 1/4  -   30        -        the engine answers",
        "q: leave",
    ]


def test_last_words_replace_progress_on_request() -> None:
    """The end of the words is visible."""
    lines = drawn(pace=Pace(), said=[SPEAKS])
    assert lines[2].split() == ["speaking", "last", "words"]
    assert lines[3].startswith("debate")
    assert lines[3].endswith("three four")


def test_each_change_between_two_looks_is_a_line() -> None:
    """Workers, engines replaced too quickly to be seen, lanes, tool servers, the store."""
    lane, server = {"lane": "lane-0", "resident": ["a"]}, {"model": "m", "name": "files", "trouble": None}
    before = status(
        worker("m-0"), worker("m-1"), worker("m-2"), lanes=[lane], tool_servers=[server],
        store={"node": "n", "trouble": None},
    )  # fmt: skip
    now = status(
        worker("m-0", state="backoff", because="killed by SIGKILL;\nagain in 1.0 s"),
        worker("m-1", incarnation=2, because="restarted"),
        worker("m-2", tokens_per_s=99.0),
        worker("m-3", state="starting", because="new"),
        lanes=[{**lane, "resident": []}],
        tool_servers=[{**server, "trouble": "it ended"}],
        store={"node": "n", "trouble": "disk full"},
    )
    assert changes(before, now) == [
        "m-0: ready -> backoff: killed by SIGKILL; again in 1.0 s",
        "m-1: engine 2 in place of 1: restarted",
        "m-3: starting: new",
        "lane-0: empty",
        "the MCP server files of m: it ended",
        "the store: disk full",
    ]
    back = changes({**now, "workers": before["workers"]}, {**before, "lanes": now["lanes"]})
    assert back == ["the MCP server files of m: is back", "the store: works again"]
    assert changes(before, before) == []
