"""A timeline in Chrome's trace event format, for Perfetto: a process per worker, a thread per row.

An attempt is a complete event (``X``), an incident or a change of state an instant of its process (``i``), the number
of turns that wait for a slot a counter (``C``); names and orders are metadata (``M``). Times are in microseconds.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

import msgspec

from service.timeline.rows import end_of
from service.timeline.spans import Span
from service.timeline.timeline import Timeline, waiting

QUEUE: Final = 1  # process id of waiting turns; workers follow
FIRST: Final = 1  # thread id of a worker's first row
US: Final = 1_000_000
EVENTS_A_PIECE: Final = 1000
Event = dict[str, Any]


def trace_pieces(timeline: Timeline) -> Iterator[bytes]:
    """Yield the JSON of the trace in pieces."""
    about = {"job": timeline.id, "name": timeline.name, "state": timeline.state, "origin": timeline.origin}
    yield msgspec.json.encode({"displayTimeUnit": "ms", "otherData": about})[:-1] + b',"traceEvents":['
    events = trace_events(timeline)
    is_first = True
    while piece := list(islice(events, EVENTS_A_PIECE)):
        yield (b"" if is_first else b",\n") + msgspec.json.encode(piece)[1:-1]
        is_first = False
    yield b"]}\n"


def trace_events(timeline: Timeline) -> Iterator[Event]:
    """Yield all events: names first, then the rest unordered, as the format allows."""
    pids = {worker.id: pid for pid, worker in enumerate(timeline.workers, start=QUEUE + 1)}
    yield from _named(QUEUE, "waiting for a slot", {})
    for worker in timeline.workers:
        rows = {row: f"slot {row}" for row in range(worker.rows)}
        yield from _named(pids[worker.id], f"{worker.id} ({worker.model})" if worker.model else worker.id, rows)
    for incident in timeline.incidents:
        args = {"incarnation": incident.incarnation, "because": incident.because, "exit": incident.exit}
        yield _instant(pids[incident.worker], incident.at_s, f"incident: {incident.reason}", args)
    for change in timeline.states:
        args = {"incarnation": change.incarnation, "because": change.because}
        yield _instant(pids[change.worker], change.at_s, change.state, args)
    for at_s, count in waiting(timeline):
        yield {"ph": "C", "pid": QUEUE, "name": "turns", "ts": _us(at_s), "args": {"waiting": count}}
    for span in timeline.attempts:
        yield _attempt(pids[span.worker], span, timeline.until_s)


def _attempt(pid: int, span: Span, until_s: float) -> Event:
    named = {"conversation": span.conversation, "agent": span.agent, "round": span.round, "attempt": span.number}
    details = {
        "incarnation": span.incarnation,
        "outcome": span.outcome,
        "reason": span.reason,
        "detail": span.detail,
        "waited_s": None if span.queued_s is None else round(span.started_s - span.queued_s, 6),
        "first_token_s": None if span.first_token_s is None else round(span.first_token_s - span.started_s, 6),
        "tools": span.tools or None,
        "prompt_tokens": span.prompt_tokens,
        "completion_tokens": span.completion_tokens,
        "cached_tokens": span.cached_tokens,
    }
    return {
        "ph": "X",
        "pid": pid,
        "tid": FIRST + span.row,
        "name": f"{span.agent} r{span.round}",
        "cat": span.outcome.value,
        "ts": _us(span.started_s),
        "dur": max(0, _us(end_of(span, until_s)) - _us(span.started_s)),
        "args": named | {name: value for name, value in details.items() if value is not None},
    }


def _named(pid: int, name: str, rows: Mapping[int, str]) -> Iterator[Event]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    for row, called in rows.items():
        yield {"ph": "M", "pid": pid, "tid": FIRST + row, "name": "thread_name", "args": {"name": called}}
        yield {"ph": "M", "pid": pid, "tid": FIRST + row, "name": "thread_sort_index", "args": {"sort_index": row}}


def _instant(pid: int, at_s: float, name: str, args: Mapping[str, object]) -> Event:
    known = {key: value for key, value in args.items() if value is not None}
    return {"ph": "i", "s": "p", "pid": pid, "tid": FIRST, "name": name, "ts": _us(at_s), "args": known}


def _us(at_s: float) -> int:
    return max(0, round(at_s * US))  # earlier starts and other nodes' clocks may lie before the origin
