"""Checks a file against the Trace Event Format, as strictly as Perfetto: everything that it would drop is a fault."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
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
    """Return the faults of a file; a key that stands twice in an object counts as well."""
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
    for told, is_there in {**OF_ALL, **OF_PHASE.get(event["ph"], {"phase": lambda _: False})}.items():
        if not is_there(event):
            yield f"no {told}"


def _has_thread(event: Event) -> bool:
    return _is_count(event.get("tid"), least=1)


def _is_known_metadata(event: Event) -> bool:
    name, kind = METADATA.get(event["name"], ("", str))
    return list(event["args"]) == [name] and isinstance(event["args"][name], kind)


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
    """Yield events that begin within another of their thread and end after it: readers cannot nest them."""
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


OF_ALL: Final[dict[str, Callable[[Event], bool]]] = {
    "process": lambda event: _is_count(event.get("pid"), least=1),
    "name": lambda event: isinstance(event.get("name"), str) and event["name"] != "",
    "args": lambda event: isinstance(event.get("args"), dict),
    "time in whole microseconds": lambda event: event["ph"] == "M" or _is_count(event.get("ts")),
}
OF_PHASE: Final[dict[str, dict[str, Callable[[Event], bool]]]] = {
    "X": {"duration": lambda event: _is_count(event.get("dur")), "thread": _has_thread},
    "i": {"scope": lambda event: event.get("s") in {"g", "p", "t"}, "thread": _has_thread},
    "C": {"count": lambda event: bool(event["args"]) and all(map(_is_count, event["args"].values()))},
    "M": {
        "such metadata": _is_known_metadata,
        "thread": lambda event: not event["name"].startswith("thread_") or _has_thread(event),
    },
}
