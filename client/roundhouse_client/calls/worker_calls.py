"""Calls that show, drain, resume and restart workers, and read their logs and incidents."""

from typing import Final

from roundhouse_client.request import Call, Nodes, get, into, on_nodes, place, post
from roundhouse_client.values.workers import Incidents, Worker, WorkerLog, Workers

WORKERS: Final = "/v1/workers"
MOST_LINES: Final = 10_000  # most lines of a log in one answer


def list_workers() -> Call[Workers]:
    """Return all workers."""
    return get(WORKERS, into(Workers))


def get_worker(worker_id: str) -> Call[Worker]:
    """Return a worker.

    Raises:
        NotFound: there is no such worker.
    """
    return get(WORKERS + place(worker_id), into(Worker))


def get_log(worker_id: str, *, tail: int = 100, after: int = 0) -> Call[WorkerLog]:
    """Return the last ``tail`` lines of a worker's engine, at most 10,000, with numbers above ``after``.

    Raises:
        NotFound: there is no such worker.
    """
    return get(f"{WORKERS}{place(worker_id)}/logs", into(WorkerLog), tail=tail, after=after)


def get_incidents(worker_id: str) -> Call[Incidents]:
    """Return a worker's incidents, the newest first.

    Raises:
        NotFound: there is no such worker.
    """
    return get(f"{WORKERS}{place(worker_id)}/incidents", into(Incidents))


def drain_worker(worker_id: str, *, nodes: Nodes | None = None) -> Call[Worker]:
    """Drain a worker: it takes no new turns, and those in flight end.

    Raises:
        NotFound: there is no such worker.
    """
    return on_nodes(post(f"{WORKERS}{place(worker_id)}/drain", into(Worker)), nodes)


def resume_worker(worker_id: str, *, nodes: Nodes | None = None) -> Call[Worker]:
    """Take a drain back, or start a worker that gave up.

    Raises:
        NotFound: there is no such worker.
    """
    return on_nodes(post(f"{WORKERS}{place(worker_id)}/resume", into(Worker)), nodes)


def restart_worker(worker_id: str, *, nodes: Nodes | None = None) -> Call[Worker]:
    """Replace a worker's engine now; its turns run again.

    Raises:
        NotFound: there is no such worker.
    """
    return on_nodes(post(f"{WORKERS}{place(worker_id)}/restart", into(Worker)), nodes)
