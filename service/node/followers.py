"""Wakes a job's followers when more of it is durable. Followers read the store; nothing is pushed to them."""

from collections.abc import Iterable
from weakref import WeakValueDictionary

import anyio

from service.conversations.job import JobId


class JobFollowers:
    """One event for each job that has followers; a slow follower costs nothing and loses nothing."""

    def __init__(self) -> None:
        self._events: WeakValueDictionary[JobId, anyio.Event] = WeakValueDictionary()  # gone with their last watcher
        self.is_closed = False

    def __repr__(self) -> str:
        return f"<JobFollowers {len(self._events)} jobs>"

    def next_change(self, job_id: JobId) -> anyio.Event:
        """Return the event of the job's next change; take it before you read, and wait for it after."""
        event = self._events.get(job_id)
        if event is None:
            event = self._events[job_id] = anyio.Event()
        return event

    def is_followed(self, job_id: JobId) -> bool:
        """Whether anybody waits for the job's next change."""
        return job_id in self._events

    def close(self) -> None:
        """Wake everybody: nothing more is to be waited for."""
        self.is_closed = True
        self.committed(list(self._events))

    def committed(self, job_ids: Iterable[JobId]) -> None:
        """Wake the watchers of these jobs."""
        for job_id in job_ids:
            event = self._events.pop(job_id, None)
            if event is not None:
                event.set()
