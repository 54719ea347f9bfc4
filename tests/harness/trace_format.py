"""Judges a file by the Trace Event Format, as strictly as Perfetto reads it: what it would drop is a fault here."""

import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

Event = dict[str, Any]
METADATA: Final = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
MOST_US: Final = 2**53  # beyond it a reader of JSON rounds


def trace_faults(text: str | bytes) -> list[str]:
    """Return what is wrong with a file; a key that stands twice in an object counts as well."""
    document = json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)
    events: list[Event] = document["traceEvents"]
    faults = [f"displayTimeUnit: {document['displayTimeUnit']}"] * (document["displayTimeUnit"] not in {"ms", "ns"})
    faults += [f"{fault}: {event}" for event in events for fault in _faults_of(event)]
    if faults:
        return faults
    return [*_unnamed(events), *_crossed(events), *_disordered(events)]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    assert len(made) == len(pairs), f"a key twice: {pairs}"
    return made


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def _faults_of(event: Event) -> Iterator[str]:
    if not _is_count(event.get("pid"), least=1):
        yield "no process"
    if not isinstance(event.get("name"), str) or not event["name"]:
        yield "no name"
    if not isinstance(event.get("args"), dict):
        yield "no args"
    if event["ph"] != "M" and not _is_count(event.get("ts")):
        yield "no time in whole microseconds"
    match event["ph"]:
        case "X":
            if not _is_count(event.get("dur")) or not _is_count(event.get("tid"), least=1):
                yield "no duration, or no thread"
        case "i":
            if event.get("s") not in {"g", "p", "t"} or not _is_count(event.get("tid"), least=1):
                yield "no scope, or no thread"
        case "C":
            if not event["args"] or not all(_is_count(value) for value in event["args"].values()):
                yield "a counter counts"
        case "M":
            name, kind = METADATA.get(event["name"], ("", str))
            if list(event["args"]) != [name] or not isinstance(event["args"][name], kind):
                yield "no such metadata"
            if event["name"].startswith("thread_") and not _is_count(event.get("tid"), least=1):
                yield "metadata of no thread"
        case _:
            yield "no such phase"


def _is_count(value: object, least: int = 0) -> bool:
    return type(value) is int and least <= value < MOST_US


def _unnamed(events: list[Event]) -> Iterator[str]:
    told = [(each["name"], each["pid"], each.get("tid")) for each in events if each["ph"] == "M"]
    if len(told) != len(set(told)):
        yield "something is named twice"
    for event in events:
        if ("process_name", event["pid"], None) not in told:
            yield f"the process has no name: {event}"
        if "tid" in event and ("thread_name", event["pid"], event["tid"]) not in told:
            yield f"the thread has no name: {event}"


def _crossed(events: list[Event]) -> Iterator[str]:
    """Yield what begins within another of its thread and ends after it: a reader can nest neither in the other."""
    threads: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], -event["ts"] - event["dur"]))
    for thread, spans in threads.items():
        open_ends: list[int] = []
        for begin, negative_end in sorted(spans):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            if open_ends and -negative_end > open_ends[-1]:
                yield f"{thread}: {begin} to {-negative_end} crosses what ends at {open_ends[-1]}"
            open_ends.append(-negative_end)


def _disordered(events: list[Event]) -> Iterator[str]:
    counted: dict[tuple[int, str], list[int]] = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            counted[event["pid"], event["name"]].append(event["ts"])
    for name, moments in counted.items():
        if any(later <= earlier for earlier, later in pairwise(moments)):
            yield f"{name}: a counter goes back, or has two values at a time"
