"""The ready pool: the turns of all models that wait only for a slot. Pure."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from typing import Final

from service.conversations.job.job import JobId, TurnKey
from service.scheduling.core.backlog import JobBacklog
from service.scheduling.core.blame import Trial
from service.scheduling.core.queue.affinity import Deferrals
from service.scheduling.core.queue.begun_first import BegunFirst
from service.scheduling.core.queue.fair_queue import FairQueue
from service.scheduling.core.queue.fair_shares import FairShares, Owner, Shares
from service.scheduling.core.queue.groups import GroupedQueue
from service.scheduling.core.queue.ready_queue import PolicyFactory, ReadyQueue, ReadyTurn
from workers.policy.placement import AHEAD, Waiting

FRONT: Final = 0  # the place of a turn that was on a slot before


class Arrivals:
    """The arrival order of ready turns, whatever the policy; models that are always loaded are left out."""

    def __init__(self, models: Iterable[str]) -> None:
        self._orders: dict[str, OrderedDict[TurnKey, int]] = {model: OrderedDict() for model in models}
        self._models: dict[TurnKey, str] = {}

    def __repr__(self) -> str:
        return f"<Arrivals {[(model, len(orders)) for model, orders in self._orders.items()]}>"

    def add(self, turn: ReadyTurn, model: str) -> None:
        """Add a turn that has become ready."""
        orders = self._orders.get(model)
        if orders is None:
            return
        self._models[turn.key] = model
        orders[turn.key] = FRONT if turn.is_front else turn.ready_order
        if turn.is_front:
            orders.move_to_end(turn.key, last=False)

    def remove(self, key: TurnKey) -> None:
        """Remove a turn that no longer waits."""
        model = self._models.pop(key, None)
        if model is not None:
            del self._orders[model][key]

    def keys(self) -> frozenset[TurnKey]:
        """Return the turns that wait."""
        return frozenset(self._models)

    def waiting(self) -> dict[str, Waiting]:
        """Return the waiting turns of each model: their number, and the first of them."""
        return {
            model: Waiting(count=len(orders), first=tuple(islice(orders.values(), AHEAD)))
            for model, orders in self._orders.items()
        }


class SuspectQueue:
    """The suspects: those that died alone, then others, then those of distrusted sources, in order of arrival."""

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
        """The kind of the next trial; None without suspects."""
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
        """Take the next suspect; IndexError if none waits."""
        for line in self._lines.values():
            if line:
                return line.pop(next(iter(line)))
        raise IndexError("no suspect waits")

    def discard(self, key: TurnKey) -> ReadyTurn | None:
        """Remove a suspect if it is there."""
        return next((line.pop(key) for line in self._lines.values() if key in line), None)

    def heads(self, count: int) -> list[ReadyTurn]:
        """Return the suspects that would be tried next."""
        return [turn for line in self._lines.values() for turn in line.values()][:count]


class ReadyPool:
    """All ready turns, each in one place; written by the core alone. With ``shares`` keys share each model.

    A turn is in the queue of its model, so that turns of a full model are never scanned. A turn that may have killed an
    engine is in the suspects' queue instead, and a deferred turn waits for one worker. ``is_begun`` says whether a
    turn's conversation has begun, ``is_pressed`` whether a model's conversations fill its KV caches.
    """

    def __init__(
        self,
        policy: PolicyFactory,
        *,
        is_grouped: bool = False,
        on_demand: Iterable[str] = (),
        is_begun: Callable[[TurnKey], bool] = lambda _: True,
        is_pressed: Callable[[str], bool] = lambda _: False,
        shares: Shares = None,
    ) -> None:
        self._policy = policy
        self._is_begun = is_begun
        self._is_pressed = is_pressed
        self.fair = None if shares is None else FairShares(shares)
        self.arrivals = Arrivals(on_demand)
        self._is_grouped = is_grouped
        self.queues: dict[str, ReadyQueue] = {}
        self.suspects: dict[str, SuspectQueue] = {}
        self.deferred = Deferrals()
        self.by_job: Counter[JobId] = Counter()

    def __repr__(self) -> str:
        return f"<ReadyPool {len(self)}>"

    def __len__(self) -> int:
        """Count the turns."""
        return self.by_job.total()

    def __iter__(self) -> Iterator[TurnKey]:
        """Iterate over the turns of all places, in no order."""
        yield from (key for pool in (self.queues, self.suspects) for queue in pool.values() for key in queue)
        yield from (turn.key for turn, _ in self.deferred)

    def add(self, turn: ReadyTurn, model: str, trial: Trial | None = None) -> None:
        """Add a turn that has become ready; with a ``trial`` it is a suspect."""
        if trial is None:
            self._queue(model).push(turn)
        else:
            self.suspect(turn, model, trial)
        self.by_job[turn.key.job_id] += 1
        self.arrivals.add(turn, model)

    def suspect(self, turn: ReadyTurn, model: str, trial: Trial) -> None:
        """Queue a turn for a trial; it was taken from its queue and stays counted."""
        self.suspects.setdefault(model, SuspectQueue()).push(turn, trial)

    def clear_suspect(self, key: TurnKey, model: str) -> None:
        """Move a suspect, if it waits as one, ahead like any turn that was on a slot before."""
        turn = self.suspects[model].discard(key) if model in self.suspects else None
        if turn is not None:
            self._queue(model).push(turn)

    def has_others(self, model: str) -> bool:
        """Whether turns that are no suspects wait for a model."""
        return bool(self.queues.get(model))

    def note_start(self, turn: ReadyTurn, model: str) -> None:
        """Charge the key of a turn that starts."""
        if self.fair is not None:
            self.fair.start(turn.key, model, turn.owner)

    def note_end(self, key: TurnKey) -> None:
        """Close the charge of a turn that is no longer in flight."""
        if self.fair is not None:
            self.fair.end_turn(key)

    def count_out(self, key: TurnKey) -> None:
        """Stop counting a turn that was taken from its queue."""
        self.arrivals.remove(key)
        self.by_job[key.job_id] -= 1
        if not self.by_job[key.job_id]:
            del self.by_job[key.job_id]

    def drop_turn(self, key: TurnKey, model: str) -> None:
        """Drop a turn, wherever it waits."""
        found = self.queues[model].discard(key) if model in self.queues else None
        if found is None and model in self.suspects:
            found = self.suspects[model].discard(key)
        if found is not None or self.deferred.discard(key) is not None:
            self.count_out(key)

    def take_all(self, model: str) -> Iterator[TurnKey]:
        """Take every turn that waits for a model, one at a time."""
        for queue in self._of(model):
            while queue:
                key = queue.pop().key
                self.count_out(key)
                yield key

    def keys(self, model: str) -> list[TurnKey]:
        """List the turns that wait for any worker of a model, in no order."""
        return [key for queue in self._of(model) for key in queue]

    def end_deferral(self, key: TurnKey, model: str) -> None:
        """Let a turn wait for any worker again, ahead of turns that were on no slot: it had its place in the order."""
        turn = self.deferred.discard(key)
        if turn is not None:
            self._queue(model).push(turn.after_deferral())

    def note_begun(self, key: TurnKey, model: str) -> None:
        """Record, in a model's queue, that the conversation of a turn has begun."""
        if model in self.queues:
            self.queues[model].note_begun(key)

    def waiting(self, model: str) -> int:
        """Count the turns that any free slot of a model could take."""
        return sum(map(len, self._of(model)))

    def models(self) -> list[str]:
        """List the models that turns wait for or have waited for."""
        return list({**self.suspects, **self.queues})

    def note_slots(self, model: str, slots: int) -> None:
        """Set a model's number of slots."""
        self._queue(model).note_slots(slots)

    def note_load(self, job_id: JobId, backlog: JobBacklog, *, has_ended: bool = False) -> None:
        """Set the remaining load of a job, in each of its models' queues."""
        for model in backlog.models:
            self._queue(model).note_load(job_id, None if has_ended else backlog.load(model))

    def check(self, owner_of: Callable[[TurnKey], Owner]) -> Iterator[str | None]:
        """Report counts, places and keys that do not match; ``owner_of`` returns the key of a turn's job."""
        turns: Counter[TurnKey] = Counter()
        by_job: Counter[JobId] = Counter()
        for key in self:
            turns[key] += 1
            by_job[key.job_id] += 1
            yield f"{key} waits in {turns[key]} places" if turns[key] > 1 else None
        if by_job != self.by_job:
            yield f"{dict(by_job)} wait, {dict(self.by_job)} are counted"
        arrived = self.arrivals.keys()
        yield from (f"{key} has arrived, and does not wait" if key not in turns else None for key in arrived)
        if self.fair is not None:
            for model, queue in self.queues.items():
                yield from self._check_keys(model, queue, self.fair, owner_of)

    @staticmethod
    def _check_keys(
        model: str, queue: ReadyQueue, fair: FairShares, owner_of: Callable[[TurnKey], Owner]
    ) -> Iterator[str | None]:
        groups = queue.groups if isinstance(queue, GroupedQueue) else (queue,)
        waiting: Counter[Owner] = Counter()
        for group in groups:
            left: Counter[TurnKey] = Counter()
            for turn in group:
                left[turn] += 1
                yield None
            keys = group.waiting if isinstance(group, FairQueue) else {}
            waiting.update(keys.keys())
            for owner, turns in keys.items():
                for turn in turns:
                    left[turn] -= 1
                    yield f"{turn} waits in the queue of {owner}" if owner_of(turn) != owner else None
            yield from (
                f"{model}: {turn} waits, and not with its key, or there alone" if count else None
                for turn, count in left.items()
            )
        if waiting != fair.times(model).waiting:
            yield f"{model}: keys {dict(waiting)} wait, {fair.times(model).waiting} are counted"

    def next_turns(self, count: int) -> list[tuple[ReadyTurn, bool]]:
        """Return the next turns, one model after the other, and whether each is a suspect; deferred turns come last."""
        suspects = [(queue.heads(count), True) for queue in self.suspects.values() if queue]
        heads = [*suspects, *((queue.heads(count), False) for queue in self.queues.values() if queue)]
        merged = [
            (turn, suspect) for place in range(count) for turns, suspect in heads for turn in turns[place : place + 1]
        ]
        return [*merged, *((turn, False) for turn, _ in self.deferred)][:count]

    def _queue(self, model: str) -> ReadyQueue:
        if model not in self.queues:
            policy: PolicyFactory = partial(BegunFirst, self._policy, self._is_begun, partial(self._is_pressed, model))
            if self.fair is not None:
                policy = partial(FairQueue, policy, self.fair.times(model))
            self.queues[model] = GroupedQueue(policy) if self._is_grouped else policy()
        return self.queues[model]

    def _of(self, model: str) -> list[SuspectQueue | ReadyQueue]:
        return [pool[model] for pool in (self.suspects, self.queues) if model in pool]
