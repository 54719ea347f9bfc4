"""Rollouts of a job as they become readable, over breaks of connections and restarts of the service."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

from roundhouse_client.calls.job_calls import get_job
from roundhouse_client.decoding import decode, parse
from roundhouse_client.errors import AnswerMalformed, RoundhouseError
from roundhouse_client.flows.asking import PATIENCE_S, Patience, ask
from roundhouse_client.flows.lines import LineCutter
from roundhouse_client.flows.steps import Flow, Give, Gives, open_stream, read
from roundhouse_client.request import Request, checked, place
from roundhouse_client.values.rollout_rows import RolloutRow

T = TypeVar("T")
WAIT_S: Final = 20.0  # the service ends an answer after it, so a longer silence is a break


def read_rollouts(
    job_id: str, *, after: int = 0, partial: bool = False, patience_s: float = PATIENCE_S
) -> Gives[RolloutRow]:
    """Yield the rows of a job with a number above ``after`` until it has ended, each exactly once.

    Rows whose record is not whole are left out, unless ``partial`` is true.

    Raises:
        StateConflict: the job records no tokens.
        NotFound: there is no such job.
        RoundhouseError: any error of its tree.
    """
    return Gives(_read(job_id, "rows", after, partial, lambda line: decode(RolloutRow, line), patience_s))


def read_episodes(
    job_id: str, *, after: int = 0, partial: bool = False, patience_s: float = PATIENCE_S
) -> Gives[dict[str, Any]]:
    """Yield the episodes of a job, one for each conversation, in the form of verifiers: ``WireEpisode`` reads them.

    Raises:
        StateConflict: the job records no tokens.
        NotFound: there is no such job.
        RoundhouseError: any error of its tree.
    """
    return Gives(_read(job_id, "episode", after, partial, dict, patience_s))


def _read(
    job_id: str, form: str, after: int, partial: bool, read_line: Callable[[Any], T], patience_s: float
) -> Flow[None]:
    patience = Patience(patience_s)
    is_over = False
    while True:
        failure: RoundhouseError | None = None
        try:
            cutter = LineCutter()
            query: dict[str, str | float | bool] = {
                "form": form,
                "after": after,
                "partial": partial,
                "wait_s": 0.0 if is_over else WAIT_S,
            }
            checked((yield from open_stream(Request(path=f"/v1/jobs{place(job_id)}/rollouts", query=query))))
            patience.reset()
            while chunk := (yield from read()):
                for line in cutter.feed(chunk):
                    document = parse(line)
                    if not isinstance(document, dict) or not isinstance(document.get("number"), int):
                        raise AnswerMalformed(f"a line that is no rollout: {line[:100]!r}")
                    after = document["number"]
                    yield Give(value=read_line(document))
            if not cutter.is_between:
                raise AnswerMalformed("the rollouts ended within a line")
        except RoundhouseError as error:
            failure = error
        if failure is not None:
            yield from patience.pause(failure)
        elif is_over:
            return
        else:
            is_over = (yield from ask(get_job(job_id), patience_s)).has_ended
