"""The suspects of one model that wait to be tried. Pure."""

from collections.abc import Iterator, Mapping
from itertools import chain

from service.conversations.job import JobId, TurnKey
from service.scheduling.core.blame import Trial
from service.scheduling.core.queue.ready_queue import ReadyTurn


class SuspectQueue:
    """Those that died alone, then the others, then those of distrusted jobs, each in the order in which they came."""

    def __init__(self) -> None:
        self._lines: Mapping[Trial, dict[TurnKey, ReadyTurn]] = {trial: {} for trial in Trial}

    def __repr__(self) -> str:
        return f"<SuspectQueue {len(self)}>"

    def __len__(self) -> int:
        """Count the suspects."""
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[TurnKey]:
        """Iterate in the order in which they would be tried."""
        return chain.from_iterable(self._lines.values())

    @property
    def next_trial(self) -> Trial | None:
        """Of which kind the next trial is; None where no suspect waits."""
        return next((trial for trial, line in self._lines.items() if line), None)

    def push(self, turn: ReadyTurn, trial: Trial) -> None:
        """Add a suspect."""
        self._lines[trial][turn.key] = turn

    def postpone(self, job_id: JobId, owner: str | None) -> None:
        """Try a job's or key's suspects last, except those known to have died alone."""
        line = self._lines[Trial.NEXT]
        for key in [
            key for key, turn in line.items() if key.job_id == job_id or (owner is not None and turn.owner == owner)
        ]:
            self._lines[Trial.LAST][key] = line.pop(key)

    def pop(self) -> ReadyTurn:
        """Take the suspect that is tried next; IndexError where none waits."""
        for line in self._lines.values():
            if line:
                return line.pop(next(iter(line)))
        raise IndexError("no suspect waits")

    def discard(self, key: TurnKey) -> ReadyTurn | None:
        """Take a suspect out, if it is there."""
        return next((line.pop(key) for line in self._lines.values() if key in line), None)

    def heads(self, count: int) -> list[ReadyTurn]:
        """Return those that would be tried next."""
        return [turn for line in self._lines.values() for turn in line.values()][:count]
