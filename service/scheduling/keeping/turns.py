"""The turns of unfinished jobs that are ready, on a slot, or ended and not yet durable."""

from collections.abc import Iterable
from datetime import UTC, datetime

from msgspec.structs import replace

from service.conversations.job.job import Agent, JobId, TurnKey
from service.conversations.job.states import TurnState
from service.conversations.record.transcript import Attempt, Turn, UnfinishedTurn
from service.conversations.talk.turn_failures import leaves
from service.scheduling.attempt import RunningAttempt
from service.scheduling.keeping.turn import JobTurn, TurnSurroundings
from service.scheduling.turn_record import Progress, progress_of
from service.store.records import TurnRequeued
from workers.outcome import CancelReason, FailureReason


class Turns:
    """The turns of jobs between ready and durable; written by the scheduler alone."""

    def __init__(self) -> None:
        self._runs: dict[TurnKey, JobTurn] = {}  # turns that were on a slot
        self._in_flight: set[TurnKey] = set()
        self._unstored: dict[TurnKey, Turn] = {}
        self._ready_at: dict[TurnKey, datetime] = {}  # by turn that was never on a slot
        self._resumed: dict[TurnKey, UnfinishedTurn] = {}  # turns of an earlier life that were on no slot in this one

    def __repr__(self) -> str:
        return f"<Turns in_flight={len(self._in_flight)} waiting={len(self._ready_at)} unstored={len(self._unstored)}>"

    # Looking

    @property
    def any_in_flight(self) -> bool:
        """Whether a slot is taken."""
        return bool(self._in_flight)

    def in_flight(self) -> list[JobTurn]:
        """Return the turns on slots."""
        return [self._runs[key] for key in self._in_flight]

    def of_conversation(self, job_id: JobId, conversation_id: str) -> list[Turn]:
        """Return the turns of a conversation that were or are on slots, with their words so far.

        An ended turn counts as in flight until its end is durable: callers never see a change undone.
        """

        def is_of_it(key: TurnKey) -> bool:
            return key.job_id == job_id and key.conversation_id == conversation_id

        ended = [replace(turn, state=TurnState.IN_FLIGHT) for key, turn in self._unstored.items() if is_of_it(key)]
        runs = [self._runs[key].snapshot(TurnState.IN_FLIGHT) for key in self._in_flight if is_of_it(key)]
        # Between two attempts a turn is on no slot; its earlier attempts stay visible.
        waiting = [
            run.snapshot(TurnState.READY)
            for key, run in self._runs.items()
            if is_of_it(key) and key not in self._in_flight and run.attempts
        ]
        return [*ended, *runs, *waiting]

    def of_job(self, job_id: JobId) -> list[Turn]:
        """Return the attempts and times of a job's turns that were on slots and are not yet durably over.

        The running attempt comes last, as in flight.
        """
        ended = [turn for key, turn in self._unstored.items() if key.job_id == job_id]
        runs = [run for key, run in self._runs.items() if key.job_id == job_id]
        return ended + [run.attempts_so_far(is_running=run.key in self._in_flight) for run in runs]

    def waiting_since(self, job_id: JobId) -> list[datetime]:
        """Return when each ready turn of a job began to wait for a slot, in no order."""
        waiting = [at for key, at in self._ready_at.items() if key.job_id == job_id]
        between = (run for key, run in self._runs.items() if key.job_id == job_id and key not in self._in_flight)
        return [*waiting, *(run.ready_at for run in between)]

    def running_attempt(self, key: TurnKey) -> Attempt | None:
        """Return the running attempt of a turn so far; None if it is on no slot."""
        return self._runs[key].attempt_so_far if key in self._in_flight else None

    def first_token_s(self, key: TurnKey) -> float | None:
        """Return the seconds to the first token of a turn on a slot; None without one."""
        return self._runs[key].attempt.first_token_s if key in self._in_flight else None

    def progress(self, job_id: JobId) -> list[Progress]:
        """Return the progress of each turn of a job that is on a slot."""
        return [progress_of(key, self._runs[key].attempt) for key in sorted(self._in_flight) if key.job_id == job_id]

    # Moving

    def interrupt_all(self, why: CancelReason) -> None:
        """End all running attempts."""
        for key in self._in_flight:
            self._runs[key].attempt.cancel(why)

    def forget_conversation(self, job_id: JobId, conversation_id: str) -> set[TurnKey]:
        """Forget the turns of a conversation that goes on elsewhere, and return them; none is in flight."""
        left: set[TurnKey] = set()
        for known in (self._runs, self._ready_at, self._resumed):
            left |= {key for key in known if key[:2] == (job_id, conversation_id)}
            for key in left & known.keys():
                del known[key]
        return left

    def clear(self) -> None:
        """Forget everything; no turn is in flight."""
        for known in (self._runs, self._unstored, self._ready_at, self._resumed):
            known.clear()

    def restore(self, turns: Iterable[UnfinishedTurn]) -> None:
        """Restore the unfinished turns of an earlier life of the service."""
        self._resumed |= {turn.key: turn for turn in turns}

    def note_own_end(self, at_work: Iterable[JobTurn], detail: str, now: datetime) -> list[TurnRequeued]:
        """Charge unfinished turns that were on slots with a crash of the service; return the records."""
        requeued: list[TurnRequeued] = []
        for run in at_work:
            if self._runs.get(run.key) is not run:
                continue
            run.charges = replace(run.charges, service_ends=run.charges.service_ends + 1)
            requeued.append(
                TurnRequeued(
                    key=run.key,
                    so_far=run.so_far,
                    worker=run.attempt.worker,
                    reason=FailureReason.INTERNAL,
                    detail=detail,
                    at=now,
                )
            )
        return requeued

    def note_ready(self, key: TurnKey, now: datetime) -> bool:
        """Let a turn wait for a slot; return False if it was on one, so that its record is already complete."""
        if key in self._runs:
            self._runs[key].ready_at = now
            return False
        self._ready_at[key] = now
        return True

    def begin_attempt(self, key: TurnKey, attempt: RunningAttempt, around: TurnSurroundings) -> JobTurn:
        """Begin an attempt of a turn on a slot."""
        if key in self._runs:
            self._runs[key].begin_attempt(attempt)
        else:
            queued_at = self._ready_at.pop(key)
            so_far = self._resumed.pop(key, None) or UnfinishedTurn(key=key, queued_at=queued_at)
            self._runs[key] = JobTurn(key, attempt, queued_at, so_far, around)
        self._in_flight.add(key)
        return self._runs[key]

    @property
    def oldest_ready_at(self) -> datetime | None:
        """When the turn that has waited longest became ready, among those that were on no slot yet."""
        return next(iter(self._ready_at.values()), None)

    def cut_off_attempt(self, key: TurnKey) -> None:
        """End the attempt of a turn; if it has just ended, its own end follows."""
        if key in self._runs:
            self._runs[key].attempt.cancel(CancelReason.CONVERSATION_ENDED)

    def clear_charges(self, keys: Iterable[TurnKey]) -> None:
        """Clear turns of charges for deaths that another turn explains."""
        for key in keys:
            if key in self._runs:
                self._runs[key].charges = self._runs[key].charges.cleared()
            if key in self._resumed:
                left = self._resumed[key]
                self._resumed[key] = replace(left, charges=left.charges.cleared())

    def note_off_slot(self, key: TurnKey) -> None:
        """Remove a turn from its slot."""
        self._in_flight.discard(key)

    def end_waiting(self, key: TurnKey, agent: Agent, state: TurnState, reason: str, detail: str | None = None) -> Turn:
        """End a turn that is on no slot, with its earlier attempts."""
        queued_at, now = self._ready_at.pop(key, None), datetime.now(UTC)
        run, so_far = self._runs.pop(key, None), self._resumed.pop(key, None)
        if run is not None:
            return run.snapshot(state, reason, detail)
        so_far = so_far or UnfinishedTurn(key=key, queued_at=now)
        return Turn(
            key=key,
            role=agent.role,
            state=state,
            reason=reason,
            detail=detail,
            attempts=so_far.attempts,
            queued_at=queued_at,
            finished_at=now,
            leaves=state is TurnState.FAILED and leaves(agent, reason),
            by=agent.by,
        )

    def note_end(self, turn: Turn) -> None:
        """Record the end of a turn; it is shown only once it is durable."""
        self._runs.pop(turn.key, None)
        self._unstored[turn.key] = turn

    def forget_stored(self, keys: Iterable[TurnKey]) -> None:
        """Forget turns whose ends are durable."""
        for key in keys:
            self._unstored.pop(key, None)
