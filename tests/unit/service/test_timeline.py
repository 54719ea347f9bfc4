"""Turns become spans, spans become rows, and rows become charts (specification, "Timeline")."""

import base64
import hashlib
import json
import re
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from msgspec.structs import replace

from service.conversations.job.job import JobId, TurnKey
from service.conversations.job.states import JobState, TurnState
from service.conversations.record.transcript import Attempt, TokenUsage, Turn
from service.store.records import encode_turn
from service.timeline.chart import chart, length, page_pieces
from service.timeline.rows import lay_rows
from service.timeline.spans import GatheredSpans, Span, TurnTimes, spans_of, times_of
from service.timeline.timeline import Breakdown, StateChange, Timeline, WorkerRows, pieces, read_timeline, waiting
from service.timeline.trace_file import trace_events, trace_pieces
from workers.tools.calls import ToolRecord

ORIGIN = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)
KEY = TurnKey(JobId("j"), "q", "a", 1)


def at(seconds: float) -> datetime:
    return ORIGIN + timedelta(seconds=seconds)


def attempt(begin: float, end: float, outcome: TurnState = TurnState.COMPLETED, **fields: object) -> Attempt:
    made = Attempt(
        outcome=outcome, reason=None, detail=None, text="words " * 99, worker="w-0", incarnation=1,
        started_at=at(begin), finished_at=at(end),
    )  # fmt: skip
    return replace(made, **fields)


def span(begin: float, end: float | None, worker: str = "w-0", **fields: object) -> Span:
    outcome = TurnState.IN_FLIGHT if end is None else TurnState.COMPLETED
    made = Span(
        conversation="q", agent="a", round=0, number=1, worker=worker, incarnation=1, outcome=outcome,
        started_s=begin, finished_s=end,
    )  # fmt: skip
    return msgspec.structs.replace(made, **fields)


TURN = Turn(
    key=KEY,
    state=TurnState.COMPLETED,
    text="said",
    tool_calls=(ToolRecord(iteration=0, id="c", name="search", arguments={}),),
    attempts=(
        attempt(2, 5, TurnState.FAILED, reason="engine_died", detail="d" * 300),
        attempt(6, 9, worker="w-1", incarnation=3),
    ),
    usage=TokenUsage(prompt_tokens=10, completion_tokens=4, cached_tokens=6),
    queued_at=at(1),
    started_at=at(2),
    first_token_at=at(7.5),
)
FAILED = Span(
    conversation="q", agent="a", round=1, number=1, worker="w-0", incarnation=1, outcome=TurnState.FAILED,
    started_s=2.0, queued_s=1.0, finished_s=5.0, reason="engine_died", detail="d" * 200,
)  # fmt: skip
ANSWERED = Span(
    conversation="q", agent="a", round=1, number=2, worker="w-1", incarnation=3, outcome=TurnState.COMPLETED,
    started_s=6.0, queued_s=5.0, first_token_s=7.5, finished_s=9.0, tools=("search",),
    prompt_tokens=10, completion_tokens=4, cached_tokens=6,
)  # fmt: skip


def test_each_attempt_of_a_turn_is_a_span() -> None:
    """Only the last one has a known first token, tokens and calls; the second waited since the first."""
    assert spans_of(times_of(TURN), ORIGIN) == [FAILED, ANSWERED]


def test_stored_spans_equal_those_in_memory() -> None:
    """The words of a turn are skipped, not read."""
    assert msgspec.json.decode(encode_turn(TURN), type=TurnTimes) == times_of(TURN)


def test_a_running_attempt_has_no_end_and_not_the_first_token_of_the_one_before() -> None:
    """The turn's known first token may still be that of its last attempt."""
    running = replace(
        TURN, attempts=(TURN.attempts[0], attempt(8, 8.5, TurnState.IN_FLIGHT)), usage=TokenUsage(), tool_calls=()
    )
    (_, last) = spans_of(times_of(running), ORIGIN)
    assert last == span(8.0, None, conversation="q", round=1, number=2, queued_s=5.0)


def test_a_turn_that_is_reported_twice_counts_once() -> None:
    """An end stands, and a running turn knows more than its stored form."""
    running = replace(TURN, attempts=(*TURN.attempts[:1], attempt(6, 6.5, TurnState.IN_FLIGHT)))
    stored = times_of(replace(TURN, attempts=TURN.attempts[:1]))
    other = msgspec.structs.replace(stored, key=TurnKey(JobId("j"), "q", "b", 1))
    gathered = GatheredSpans(ORIGIN, [times_of(running)])
    gathered.add_unfinished([stored, other])
    assert gathered.drain() == [*spans_of(times_of(running), ORIGIN), *spans_of(other, ORIGIN)]
    gathered.add_ended([times_of(TURN)])
    assert gathered.drain() == [FAILED, ANSWERED, *spans_of(other, ORIGIN)]


def test_an_attempt_takes_the_lowest_free_row_of_its_worker() -> None:
    """A row is free again from the moment its attempt ends."""
    laid, rows = lay_rows(
        [span(4, 6), span(0, 4), span(1, 2), span(0.5, None), span(2, 3), span(9, 9), span(0, 1, "w-1"), span(9, 10)]
    )
    assert [(each.worker, each.started_s, each.row) for each in laid] == [
        ("w-1", 0, 0),
        ("w-0", 0, 0),
        ("w-0", 0.5, 1),
        ("w-0", 1, 2),
        ("w-0", 2, 2),
        ("w-0", 4, 0),
        ("w-0", 9, 0),
        ("w-0", 9, 0),
    ]
    assert rows == {"w-0": 3, "w-1": 1}


def timeline(*spans: Span, **fields: object) -> Timeline:
    laid, rows = lay_rows(spans)
    made = Timeline(
        id="job-1", name="debate", state=JobState.COMPLETED, origin="2026-11-23T12:00:00.000000Z", until_s=10.0,
        workers=[WorkerRows(id=name, rows=count, model="m", slots=2) for name, count in rows.items()],
        states=[], incidents=[], attempts=laid,
    )  # fmt: skip
    return msgspec.structs.replace(made, **fields)


DEATH = Breakdown(
    worker="w-0", at_s=5.0, incarnation=1, reason="engine_died", because="it <exited>", exit="killed by SIGKILL"
)
BACK = StateChange(worker="w-0", at_s=6.0, state="starting", incarnation=2, because="its pause is over")


@pytest.mark.parametrize("count", [0, 1, 499, 500, 501, 1000])
def test_a_timeline_is_read_as_it_was_sent(count: int) -> None:
    """However many pieces it was sent in."""
    sent = timeline(*(span(number, number + 1.0) for number in range(count)), incidents=[DEATH], states=[BACK])
    made = list(pieces(sent))
    assert len(made) == 2 + -(-count // 500)
    assert read_timeline(b"".join(made)) == sent
    assert b"".join(made).count(b'},{"conversation":') == max(0, count - 1)  # where the dashboard cuts it (pieces.js)
    assert json.loads(b"".join(made)).popitem()[0] == "attempts"


def test_a_chart_shows_the_agent_on_each_slot() -> None:
    """Each agent has a letter, a capital where a turn begins.

    A column shows its worst incident; incidents are listed.
    """
    shown = timeline(
        span(0, 5, outcome=TurnState.FAILED), span(0, 2.5), span(5, 7.2, agent="b"), span(7.2, 10, queued_s=5.0),
        span(7.5, None), span(0, 1, "w-1", agent="b"),
        incidents=[DEATH],
    )  # fmt: skip
    assert list(map(str, chart(shown, 37))) == [
        "debate: completed, 6 attempts in 10.0 s, 0.50 s a column",
        "a b  b a  > running  x failed",
        "- cancelled  ! an engine broke",
        "w-0               !",
        "w-0 0   Bbbbb.....AaaaBbbbbb  75 %",
        "w-0 1   xxxxxxxxxx.....>>>>>  75 %",
        "w-1 0   Aa..................  10 %",
        "waiting ..........11111..... most 1",
        "        0             10.0 s",
        "  5.0 s: w-0, engine 1: engine_died: it <exited>",
    ]


def test_each_turn_of_a_full_row_begins_with_a_capital() -> None:
    """A row that is never idle thus shows its turns; agents beyond the letters share a sign."""
    full = timeline(*(span(n, n + 1.0, agent=f"a{n}" if n < 8 else f"b{n}") for n in range(40)), until_s=40.0)
    rows = [line.cells for line in chart(full, 97) if line.words.startswith("w-0 0")]
    assert rows == ["AaBbCcDdEeFfGgHhIiJjKkLlMmNnOoPpQqRrSsTtUuVvWwYyZz" + "#" * 30]
    assert "# the other 15" in "".join(map(str, chart(full, 97)))
    uneven = timeline(span(0, 1.4), span(1.4, 3.0), span(3.0, 20.0), until_s=20.0)
    assert [line.cells for line in chart(uneven, 37) if line.words.startswith("w-0 0")] == ["AA" + "aA" + "a" * 16]


def test_a_chart_of_a_job_that_stands_still_goes_on_until_now() -> None:
    """Turns that wait now are counted, even if none has started since."""
    still = timeline(span(0, 2), span(2, 5, queued_s=1.0), state=JobState.RUNNING, waiting=[4.0, 6.0, 6.0])
    assert list(map(str, chart(still, 37)))[-3:] == [
        "w-0 0   AaaaAaaaaa..........  50 %",
        "waiting ..11....111133333333 most 3",
        "        0             10.0 s",
    ]
    none_yet = timeline(state=JobState.RUNNING, waiting=[4.0, 6.0])
    assert list(map(str, chart(none_yet, 80))) == ["debate: running; no turn has been on a slot yet; 2 wait for one"]


def test_the_time_before_the_first_attempt_is_not_on_the_axis() -> None:
    """It is reported as earlier time: its turns waited then, not when the axis begins."""
    early = msgspec.structs.replace(DEATH, at_s=1.0)
    late = msgspec.structs.replace(DEATH, at_s=9.0)
    shown = timeline(span(5, 6, queued_s=2.0), span(6, 8, queued_s=6.0), incidents=[early, late])
    assert list(map(str, chart(shown, 37)))[-4:] == [
        "w-0 0   AaaaaaaAaaaaaaaaaaaa 100 %",
        "        0              3.0 s",
        "  4.0 s before: w-0, engine 1: engine_died: it <exited>",
        "  4.0 s: w-0, engine 1: engine_died: it <exited>",
    ]


def test_an_empty_chart_says_so() -> None:
    """No turn has been on a slot."""
    assert list(map(str, chart(timeline(), 80))) == ["debate: completed; no turn has been on a slot yet"]


def test_lengths_of_time_are_rounded_as_people_do() -> None:
    """Rounding never shows sixty seconds in a minute, or sixty minutes in an hour."""
    told = [length(seconds) for seconds in (0.0, 0.354, 1.0, 59.4, 59.96, 119.7, 3599.6, 7620)]
    assert told == ["0.00 s", "0.35 s", "1.0 s", "59.4 s", "1m00s", "2m00s", "1h00m", "2h07m"]


def test_waiting_turns_are_counted_over_time() -> None:
    """A turn that starts and one that is queued at the same moment make one step."""
    shown = timeline(span(2, 3, queued_s=0.0), span(3, 4, queued_s=2.0), span(1, 2, queued_s=1.0), span(5, 6))
    assert waiting(shown) == [(0.0, 1), (2.0, 1), (3.0, 0)]


def test_a_trace_has_a_process_for_each_worker_and_a_thread_for_each_row() -> None:
    """Chrome's trace event format: names, instants, a counter, complete events; times in microseconds."""
    shown = timeline(FAILED, ANSWERED, span(9, None), incidents=[DEATH], states=[BACK])
    events = list(trace_events(shown))
    assert [event for event in events if event["ph"] == "M" and event["name"].endswith("_name")] == [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "waiting for a slot"}},
        {"ph": "M", "pid": 2, "name": "process_name", "args": {"name": "w-0 (m)"}},
        {"ph": "M", "pid": 2, "tid": 1, "name": "thread_name", "args": {"name": "slot 0"}},
        {"ph": "M", "pid": 3, "name": "process_name", "args": {"name": "w-1 (m)"}},
        {"ph": "M", "pid": 3, "tid": 1, "name": "thread_name", "args": {"name": "slot 0"}},
    ]
    assert [event for event in events if event["ph"] in "iC"] == [
        {
            "ph": "i", "s": "p", "pid": 2, "tid": 1, "name": "incident: engine_died", "ts": 5_000_000,
            "args": {"incarnation": 1, "because": "it <exited>", "exit": "killed by SIGKILL"},
        },
        {
            "ph": "i", "s": "p", "pid": 2, "tid": 1, "name": "starting", "ts": 6_000_000,
            "args": {"incarnation": 2, "because": "its pause is over"},
        },
        {"ph": "C", "pid": 1, "name": "turns", "ts": 1_000_000, "args": {"waiting": 1}},
        {"ph": "C", "pid": 1, "name": "turns", "ts": 2_000_000, "args": {"waiting": 0}},
        {"ph": "C", "pid": 1, "name": "turns", "ts": 5_000_000, "args": {"waiting": 1}},
        {"ph": "C", "pid": 1, "name": "turns", "ts": 6_000_000, "args": {"waiting": 0}},
    ]  # fmt: skip
    complete = [event for event in events if event["ph"] == "X"]
    assert complete[1] == {
        "ph": "X", "pid": 3, "tid": 1, "name": "a r1", "cat": "completed", "ts": 6_000_000, "dur": 3_000_000,
        "args": {
            "conversation": "q", "agent": "a", "round": 1, "attempt": 2, "incarnation": 3, "outcome": "completed",
            "waited_s": 1.0, "first_token_s": 1.5, "tools": ("search",),
            "prompt_tokens": 10, "completion_tokens": 4, "cached_tokens": 6,
        },
    }  # fmt: skip
    assert (complete[2]["ts"], complete[2]["dur"]) == (9_000_000, 1_000_000)  # it runs until now


@pytest.mark.parametrize("count", [0, 1, 990, 1000, 2500])
def test_a_trace_keeps_every_event_over_its_pieces(count: int) -> None:
    """The pieces together are JSON."""
    shown = timeline(*(span(number, number + 1.0) for number in range(count)))
    document = json.loads(b"".join(trace_pieces(shown)))
    assert document["traceEvents"] == msgspec.to_builtins(list(trace_events(shown)))
    assert document["otherData"]["job"] == "job-1"


def test_a_page_runs_no_script_but_its_own() -> None:
    """The policy has the hashes of the file's scripts; a name that would close an element does not."""
    hostile = "</script><script>alert(1)</script><!--"
    shown = timeline(span(0, 1, agent=hostile, detail=hostile), name=hostile)
    page = b"".join(page_pieces(shown, "function drawTimeline() {}", "p { color: red }")).decode()
    policy = re.findall(r'Content-Security-Policy" content="(.*?)"', page)[0]
    (data, code), (style,) = (
        re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL),
        re.findall(r"<style>(.*?)</style>", page, re.DOTALL),
    )
    assert page.count("<script") == 2
    for content, directive in ((code, "script-src"), (style, "style-src")):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert read_timeline(data) == shown
