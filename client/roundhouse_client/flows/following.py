"""Live streams: the events of a job, and the lines of an engine's log."""

from typing import Any, Final

from roundhouse_client.calls.job_calls import get_job
from roundhouse_client.calls.worker_calls import MOST_LINES, get_log
from roundhouse_client.decoding import decode, parse
from roundhouse_client.errors import AnswerMalformed, RoundhouseError
from roundhouse_client.flows.asking import PATIENCE_S, Patience, ask
from roundhouse_client.flows.lines import Frame, FrameCutter
from roundhouse_client.flows.steps import Flow, Give, Gives, Pause, now, open_stream, read
from roundhouse_client.request import Request, checked, place
from roundhouse_client.values.events import END, KINDS, Event
from roundhouse_client.values.workers import LogLine

RECONNECT_S: Final = 1.0
LOOK_S: Final = 0.5  # time between two reads of a log


def follow_job(job_id: str, *, after: int = 0, patience_s: float = PATIENCE_S) -> Gives[Event]:
    """Yield the events of a job after number ``after`` to its end, each stored one exactly once.

    A broken connection resumes after the last number, and waits up to ``patience_s`` each time for a service that is
    away. Events that are not stored (progress, swap) are not repeated.

    Raises:
        NotFound: there is no such job, or it was deleted.
        RoundhouseError: any error of its tree.
    """
    return Gives(_follow_job(job_id, after, patience_s))


def _follow_job(job_id: str, last: int, patience_s: float) -> Flow[None]:
    patience = Patience(patience_s)
    is_over = False
    while True:
        failure: RoundhouseError | None = None
        try:
            cutter = FrameCutter()
            checked((yield from open_stream(_events_after(job_id, last))))
            patience.reset()
            while chunk := (yield from read()):
                for frame in cutter.feed(chunk):
                    event = event_of(frame)
                    last = event.number or last
                    yield Give(value=event)
                    if event.kind == END:
                        return
        except RoundhouseError as error:
            failure = error
        if failure is not None:
            patience.next_pause_s(failure, (yield from now()))
        elif is_over:
            return  # its end event lies before ``after``, or is no longer stored
        # A stream may end before its job, as the service stops or the store is in trouble: the job's state decides.
        is_over = (yield from ask(get_job(job_id), patience_s)).has_ended
        if not is_over:
            yield Pause(seconds=RECONNECT_S)


def event_of(frame: Frame) -> Event:
    """Return the event of a frame.

    Raises:
        AnswerMalformed: it is not Roundhouse's.
    """
    data: Any = parse(frame.data)
    if not isinstance(data, dict) or not (frame.id.isdecimal() or not frame.id):
        raise AnswerMalformed(f"an event that is not one of Roundhouse's: {frame.event}, {frame.id}")
    kind = KINDS.get(frame.event)
    return Event(
        number=int(frame.id) if frame.id else None,
        kind=frame.event,
        data=data,
        value=None if kind is None else decode(kind, data),
    )


def _events_after(job_id: str, number: int) -> Request:
    headers = {"Accept": "text/event-stream", "Last-Event-ID": str(number)}
    return Request(path=f"/v1/jobs{place(job_id)}/events", headers=headers)


def follow_log(worker_id: str, *, tail: int = 100, patience_s: float = PATIENCE_S) -> Gives[LogLine]:
    """Yield the last ``tail`` lines of a worker's engine, then new ones until the caller stops.

    It waits up to ``patience_s`` each time for a service that is away. A restarted service counts its lines from the
    start, and is read from its first line.

    Raises:
        NotFound: there is no such worker.
        RoundhouseError: any error of its tree.
    """
    return Gives(_follow_log(worker_id, tail, patience_s))


def _follow_log(worker_id: str, tail: int, patience_s: float) -> Flow[None]:
    patience = Patience(patience_s)
    after = 0
    if tail == 0:  # the first read must not return old lines
        newest = (yield from ask(get_log(worker_id, tail=1), patience_s)).lines
        after, tail = newest[-1].number if newest else 0, MOST_LINES
    while True:
        failure: RoundhouseError | None = None
        try:
            for line in (yield from ask(get_log(worker_id, tail=tail, after=after), 0.0)).lines:
                after = line.number
                yield Give(value=line)
            tail = MOST_LINES
            patience.reset()
            yield Pause(seconds=LOOK_S)
        except RoundhouseError as error:
            failure = error
        if failure is not None:
            yield from patience.pause(failure)
            newest = (yield from ask(get_log(worker_id, tail=1), patience_s)).lines
            after = after if newest and newest[-1].number >= after else 0
