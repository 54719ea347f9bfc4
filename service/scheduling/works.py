"""The scheduler's works side by side: turns of jobs, and requests at the door. Each key belongs to one of them."""

from collections.abc import Iterator, Sequence

from service.conversations.job.job import JobId, TurnKey
from service.scheduling.attempt import usage_key
from service.scheduling.keeping.job_turns import JobTurns
from service.scheduling.keeping.requests import RelayedRequests
from service.scheduling.work import OnSlot, Work
from service.store.records import UsageKey
from workers.outcome import CancelReason


class Works:
    """Finds the work of a job; calls that concern all turns go to both works."""

    def __init__(self, jobs: JobTurns, requests: RelayedRequests) -> None:
        self._jobs = jobs
        self._requests = requests

    def __repr__(self) -> str:
        return f"<Works {self._jobs!r} {self._requests!r}>"

    def __iter__(self) -> Iterator[Work]:
        """Iterate over both works."""
        return iter((self._jobs, self._requests))

    def of(self, job_id: JobId) -> Work:
        """Return the work that a job belongs to."""
        return self._requests if job_id in self._requests else self._jobs

    @property
    def any_on_slot(self) -> bool:
        """Whether a turn is on a slot."""
        return self._jobs.any_on_slot or self._requests.any_on_slot

    def on_slots(self) -> Iterator[OnSlot]:
        """Iterate over the turns on slots."""
        yield from self._jobs.on_slots()
        yield from self._requests.on_slots()

    def job_name(self, job_id: JobId) -> str:
        """Return the caller's name of a job that has not ended."""
        return self.of(job_id).name_of(job_id)

    def owner(self, job_id: JobId) -> str | None:
        """Return the name of the key that posted an unfinished job."""
        return self.of(job_id).owner_of(job_id)

    def model_of(self, key: TurnKey) -> str:
        """Return the model of a turn."""
        return self.of(key.job_id).agent_of(key).model

    def place(self, key: TurnKey) -> tuple[JobId, str, int]:
        """Return a turn's place among others that end at the same moment."""
        return key.job_id, key.conversation_id, self.of(key.job_id).place_of(key)

    def usage_key(self, key: TurnKey) -> UsageKey:
        """Return the row of usage in which a turn counts; a request belongs to no job there."""
        work = self.of(key.job_id)
        return usage_key(work.agent_of(key), work.owner_of(key.job_id), "" if work is self._requests else key.job_id)

    def interrupt_all(self, why: CancelReason) -> None:
        """End all running attempts; their turns are ready again, without charges."""
        for work in self:
            work.interrupt_all(why)

    def clear_charges(self, keys: Sequence[TurnKey]) -> None:
        """Clear turns of charges for deaths that another turn explains."""
        for work in self:
            work.clear_charges(keys)

    def clear(self) -> None:
        """Forget everything; no turn is on a slot."""
        for work in self:
            work.clear()
