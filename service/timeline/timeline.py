"""A job's timeline as it is sent and read: workers with their rows, what befell them, and the attempts on them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from service.conversations.states import JobState
from service.timeline.spans import Span

SPANS_A_PIECE: Final = 500


class WorkerRows(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker, and on how many rows its attempts lie; of this node's, its model and its slots as configured."""

    id: str
    rows: int
    model: str | None = None
    slots: int | None = None


class StateChange(msgspec.Struct, frozen=True, kw_only=True):
    """A worker is in another state from a moment on, in seconds after the origin."""

    worker: str
    at_s: float
    state: str
    incarnation: int
    because: str


class Breakdown(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An incident of a worker: an engine broke or was killed, at a moment in seconds after the origin.

    ``exit`` is how its process ended, in words; it is left out where the engine lives on.
    """

    worker: str
    at_s: float
    incarnation: int
    reason: str
    because: str
    exit: str | None = None


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """All of it; ``origin`` is a UTC time in RFC 3339, ``until_s`` the job's end, or now, in seconds after it.

    ``waiting`` tells since when each turn waits that is ready now, at the node that answers.
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
    """Return a timeline with attempts that lie on so many rows of each worker, and of the workers those that had any.

    A worker that it does not know is another node's, or one of an earlier configuration.
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
    """Return how many turns were waiting for a slot, from each moment on.

    What began before the origin is told as of then, so that no moment has two counts.
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
