"""Waits for events in the service, across its restarts."""

from math import inf
from typing import Final

from roundhouse_client.calls.job_calls import get_job
from roundhouse_client.calls.node_calls import get_readiness
from roundhouse_client.errors import NotNow, RoundhouseError, WaitExceeded
from roundhouse_client.flows.asking import PATIENCE_S, Patience, ask, is_passing
from roundhouse_client.flows.steps import Flow, Pause, now
from roundhouse_client.values.jobs import Job
from roundhouse_client.values.node import Readiness

POLL_S: Final = 20.0  # longest wait of one request
LEAST_PAUSE_S: Final = 0.1
MOST_PAUSE_S: Final = 1.0


def wait_job(job_id: str, *, timeout_s: float | None = None, patience_s: float = PATIENCE_S) -> Flow[Job]:
    """Return a job once it has ended, in any state.

    ``timeout_s`` bounds the whole wait; None waits as long as the job takes. A service that is away or restarts is
    waited for, at most ``patience_s`` each time, within the whole wait.

    Raises:
        WaitExceeded: it has not ended in time; ``last`` is the job.
        Unreachable: the service did not come back in time.
        NotFound: there is no such job, or it was deleted.
        RoundhouseError: any error of its tree.
    """
    began_at = yield from now()
    pause_s, at = LEAST_PAUSE_S, began_at
    while True:
        left_s = inf if timeout_s is None else max(0.0, timeout_s - (at - began_at))
        wait_s = min(POLL_S, left_s)
        job = yield from ask(get_job(job_id, wait_s=wait_s), min(patience_s, left_s))
        if job.has_ended:
            return job
        asked_at, at = at, (yield from now())
        if timeout_s is not None and at - began_at >= timeout_s:
            raise WaitExceeded(f"job {job_id} is {job.state} after {timeout_s:g} s", job)
        if at - asked_at < wait_s / 2:  # it is stopping, or too old to wait
            yield Pause(seconds=min(pause_s, left_s))
            pause_s = min(2 * pause_s, MOST_PAUSE_S)
            at = yield from now()


def wait_ready(*, timeout_s: float = PATIENCE_S) -> Flow[Readiness]:
    """Return when every model has a ready worker; it also waits for a service that does not listen yet.

    Raises:
        WaitExceeded: not within ``timeout_s``; ``last`` is the error that says what is missing.
        RoundhouseError: any error of its tree.
    """
    patience = Patience(timeout_s)
    while True:
        try:
            return (yield from ask(get_readiness(), 0.0))
        except RoundhouseError as error:
            failure = error
        if isinstance(failure, NotNow):  # loading times are not known: ask again soon
            failure.retry_after_s = None
        try:
            yield from patience.pause(failure)
        except RoundhouseError as error:
            if not is_passing(error):
                raise
            raise WaitExceeded(f"not ready within {timeout_s:g} s: {error}", error) from error
