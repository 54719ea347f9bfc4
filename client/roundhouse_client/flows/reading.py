"""Reads that are too large for one answer: all transcripts of a job, and all jobs."""

from typing import Final

from roundhouse_client.calls.job_calls import list_jobs
from roundhouse_client.decoding import decode, parse
from roundhouse_client.errors import AnswerLost, RoundhouseError
from roundhouse_client.flows.asking import PATIENCE_S, Patience, ask
from roundhouse_client.flows.lines import LineCutter
from roundhouse_client.flows.steps import Flow, Give, Gives, open_stream, read
from roundhouse_client.request import Request, checked, place
from roundhouse_client.values.jobs import Job
from roundhouse_client.values.transcripts import Transcript

PAGE: Final = 100


def read_result(job_id: str, *, patience_s: float = PATIENCE_S) -> Gives[Transcript]:
    """Yield the transcripts of an ended job, in the order of its conversations, one in memory at a time.

    A broken connection is made again, and resumes with the transcript that was cut.

    Raises:
        StateConflict: the job has not ended.
        NotFound: there is no such job.
        RoundhouseError: any error of its tree.
    """
    return Gives(_read_result(job_id, patience_s))


def _read_result(job_id: str, patience_s: float) -> Flow[None]:
    path = f"/v1/jobs{place(job_id)}/result"
    request = Request(path=path, query={"format": "jsonl"})
    patience = Patience(patience_s)
    given = 0
    while True:
        try:
            cutter, seen = LineCutter(), 0
            checked((yield from open_stream(request)))
            while chunk := (yield from read()):
                for line in cutter.feed(chunk):
                    seen += 1
                    if seen <= given:
                        continue
                    yield Give(value=decode(Transcript, parse(line)))
                    given = seen
                    patience.reset()
            if cutter.is_between:
                return
            failure: RoundhouseError = AnswerLost(path, "it ended within a transcript")
        except RoundhouseError as error:
            failure = error
        yield from patience.pause(failure)


def download_result(job_id: str, form: str, *, patience_s: float = PATIENCE_S) -> Gives[bytes]:
    """Yield the bytes of a result in one of the service's formats: ``json``, ``jsonl`` or ``csv``.

    It is retried only until its first bytes are there: those are already handed out.

    Raises:
        AnswerLost: the connection broke, so the bytes are incomplete.
        StateConflict: the job has not ended.
        NotFound: there is no such job.
        RoundhouseError: any error of its tree.
    """
    return Gives(_download_result(job_id, form, patience_s))


def _download_result(job_id: str, form: str, patience_s: float) -> Flow[None]:
    request = Request(path=f"/v1/jobs{place(job_id)}/result", query={"format": form})
    patience = Patience(patience_s)
    chunk: bytes | None = None
    while chunk is None:
        try:
            checked((yield from open_stream(request)))
            chunk = yield from read()
        except RoundhouseError as error:
            yield from patience.pause(error)
    while chunk:
        yield Give(value=chunk)
        chunk = yield from read()


def read_jobs(*, state: str | None = None, patience_s: float = PATIENCE_S) -> Gives[Job]:
    """Yield all jobs, or those in a state, the newest first, page by page.

    Raises:
        RoundhouseError: any error of its tree.
    """
    return Gives(_read_jobs(state, patience_s))


def _read_jobs(state: str | None, patience_s: float) -> Flow[None]:
    cursor: str | None = None
    while True:
        page = yield from ask(list_jobs(state=state, limit=PAGE, cursor=cursor), patience_s)
        for job in page.jobs:
            yield Give(value=job)
        cursor = page.next_cursor
        if cursor is None:
            return
