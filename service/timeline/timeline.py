"""A job's timeline as it is sent and read: workers with their rows, state changes, incidents and attempts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from service.conversations.job.states import JobState
from service.timeline.spans import Span

SPANS_A_PIECE: Final = 500


class WorkerRows(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker and the number of rows of its attempts; for this node's workers also model and configured slots."""

    id: str
    rows: int
    model: str | None = None
    slots: int | None = None


class StateChange(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's change to another state, in seconds after the origin."""

    worker: str
    at_s: float
    state: str
    incarnation: int
    because: str


class Breakdown(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An incident of a worker: an engine broke or was killed, at a moment in seconds after the origin.

    ``exit`` describes the end of its process; it is left out where the engine lives on.
    """

    worker: str
    at_s: float
    incarnation: int
    reason: str
    because: str
    exit: str | None = None


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """A timeline; ``origin`` is a UTC time in RFC 3339, ``until_s`` the job's end, or now, in seconds after it.

    ``waiting`` has the times since which the answering node's ready turns wait.
    """

    id: str
    name: str
    state: JobState
    origin: str
    until_s: float
    workers: Sequence[WorkerRows]
    states: Sequence[StateChange]
    incidents: Sequence[Breakdown]
    waiting: Sequence[float] = msgspec.field(default_factory=list)
    attempts: Sequence[Span]


def with_attempts(timeline: Timeline, spans: Sequence[Span], rows: Mapping[str, int]) -> Timeline:
    """Return a timeline with attempts, and with those workers that had any; ``rows`` has each worker's number of rows.

    An unknown worker is another node's, or one of an earlier configuration.
    """
    known = {worker.id: worker for worker in timeline.workers}
    return msgspec.structs.replace(
        timeline,
        workers=[
            msgspec.structs.replace(known[name], rows=count) if name in known else WorkerRows(id=name, rows=count)
            for name, count in rows.items()
        ],
        states=[change for change in timeline.states if change.worker in rows],
        incidents=[incident for incident in timeline.incidents if incident.worker in rows],
        attempts=spans,
    )


def waiting(timeline: Timeline) -> list[tuple[float, int]]:
    """Return the number of turns that waited for a slot, from each moment on.

    Waits that began before the origin count from the origin, so that no moment has two counts.
    """
    moves = [(max(0.0, since_s), 1) for since_s in timeline.waiting]
    for span in timeline.attempts:
        if span.queued_s is not None and span.queued_s < span.started_s:
            moves += [(max(0.0, span.queued_s), 1), (max(0.0, span.started_s), -1)]
    counts: list[tuple[float, int]] = []
    count = 0
    for at_s, move in sorted(moves):
        count += move
        if counts and counts[-1][0] == at_s:
            counts.pop()
        counts.append((at_s, count))
    return counts


def pieces(timeline: Timeline) -> Iterator[bytes]:
    """Yield the JSON of a timeline in pieces, so that none takes long to make."""
    head = msgspec.json.encode(msgspec.structs.replace(timeline, attempts=()))
    yield head[: -len(b"]}")]
    for begin in range(0, len(timeline.attempts), SPANS_A_PIECE):
        piece = msgspec.json.encode(timeline.attempts[begin : begin + SPANS_A_PIECE])
        yield (b"," if begin else b"") + piece[1:-1]
    yield b"]}"


read_timeline: Final = msgspec.json.Decoder(Timeline).decode
