"""Wakes a job's followers when more of it is durable. Followers read the store; nothing is pushed to them."""

from collections.abc import Iterable
from weakref import WeakValueDictionary

import anyio

from service.conversations.job.job import JobId


class JobFollowers:
    """One event for each followed job; a slow follower costs nothing and loses nothing."""

    def __init__(self) -> None:
        self._events: WeakValueDictionary[JobId, anyio.Event] = WeakValueDictionary()  # dropped with their last watcher
        # For followers that only wait for the end
        self._ends: WeakValueDictionary[JobId, anyio.Event] = WeakValueDictionary()
        self.is_closed = False

    def __repr__(self) -> str:
        return f"<JobFollowers {len(self._events)} jobs, ends of {len(self._ends)}>"

    def next_change(self, job_id: JobId) -> anyio.Event:
        """Return the event of the job's next change; take it before a read, and wait for it afterwards."""
        return _event_of(self._events, job_id)

    def next_change_towards_end(self, job_id: JobId) -> anyio.Event:
        """Return the same event for a follower that only waits for the end; its job's tokens need not be shown."""
        return _event_of(self._ends, job_id)

    def is_followed(self, job_id: JobId) -> bool:
        """Whether a follower is shown the job's changes as they come."""
        return job_id in self._events

    def close(self) -> None:
        """Wake all followers: no more changes come."""
        self.is_closed = True
        self.committed({*self._events, *self._ends})

    def open(self) -> None:
        """Let followers wait again."""
        self.is_closed = False

    def committed(self, job_ids: Iterable[JobId]) -> None:
        """Wake the followers of these jobs."""
        for job_id in job_ids:
            for event in (self._events.pop(job_id, None), self._ends.pop(job_id, None)):
                if event is not None:
                    event.set()


def _event_of(events: WeakValueDictionary[JobId, anyio.Event], job_id: JobId) -> anyio.Event:
    event = events.get(job_id)
    if event is None:
        event = events[job_id] = anyio.Event()
    return event
