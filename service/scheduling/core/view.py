"""Views of the scheduling core: its pools and free slots, and the waiting turns in order. They only read."""

from collections import Counter
from collections.abc import Collection, Mapping
from functools import partial
from itertools import islice

import msgspec
from msgspec.structs import replace

from service.conversations.job.job import GroupBy, JobId, TurnKey
from service.conversations.job.states import TurnState
from service.scheduling.core.first_readers import FirstReaders
from service.scheduling.core.in_flight_pool import InFlightPool
from service.scheduling.core.kv_budgets import KvNeed
from service.scheduling.core.live import LiveJob
from service.scheduling.core.ready_pool import ReadyPool
from service.scheduling.core.room_keeper import RoomKeeper
from workers.policy.placement import Waiting


class WorkerRoom(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache of one worker, in tokens: its size, the reserved part, and the reservations by turn.

    ``budget`` is None if its slots bound it or it is not ready.
    """

    budget: int | None
    reserved: int
    needs: Mapping[TurnKey, KvNeed]


class CapacityView(msgspec.Struct, frozen=True, kw_only=True):
    """The use of the KV caches, the turns passed for lack of room, and the estimates behind both."""

    workers: Mapping[str, WorkerRoom]  # workers that are ready, or have turns on them
    passed: Mapping[TurnKey, int]  # ready turns, and how many others started ahead of each
    pressed: frozenset[str]  # models whose begun conversations go before new ones
    idle: Mapping[str, int]  # tokens of conversations between turns, per model
    kept: frozenset[tuple[JobId, str]]  # conversations whose contexts those are
    conversations: int  # number of conversations with estimates for their next turns
    agents: int  # number of agents with estimates, over all conversations of a job


class ReadyTurns(msgspec.Struct, frozen=True, kw_only=True):
    """The ready turns of one model: those that wait for any slot, suspects, and those that wait for one worker."""

    queued: frozenset[TurnKey]
    suspects: tuple[TurnKey, ...]  # the next one first
    deferred: Mapping[TurnKey, str]


class RoomLacked(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache of a model that has a free slot but no room for the next turn, in tokens."""

    reserved: int
    budget: int
    is_put_behind: bool  # the conversation is new and waits for begun ones


class QueuesView:
    """A view of the waiting turns: their order, and what each waits for."""

    def __init__(
        self,
        jobs: Mapping[JobId, LiveJob],
        ready: ReadyPool,
        in_flight: InFlightPool,
        group_by: GroupBy | None,
        room: RoomKeeper,
        readers: FirstReaders,
    ) -> None:
        self._jobs = jobs
        self._ready = ready
        self._in_flight = in_flight
        self.group_by = group_by
        self._room = room
        self._readers = readers

    def __repr__(self) -> str:
        return f"<QueuesView ready={len(self._ready)}>"

    def is_put_behind(self, key: TurnKey) -> bool:
        """Whether a ready turn of a new conversation waits for begun ones."""
        conversation = self._jobs[key.job_id].conversations[key.conversation_id]
        return not conversation.is_started and self._room.working_set.is_pressed(conversation.model(key))

    def room_lacked(self, key: TurnKey) -> RoomLacked | None:
        """Return the KV cache in which a ready turn lacks room while a slot is free; None if it lacks none."""
        slots = self._in_flight.models[_model_of(self._jobs, key)]
        budget = slots.kv_budget
        if budget is None or not slots.has_free:
            return None
        return RoomLacked(reserved=slots.kv_reserved, budget=budget, is_put_behind=self.is_put_behind(key))

    def deferred_for(self, key: TurnKey) -> str | None:
        """Return the worker that a deferred turn waits for, None for any other turn."""
        return self._ready.deferred.worker_of(key)

    def ready_turns(self, model: str) -> ReadyTurns:
        """Return where the ready turns of a model wait; walks all of them."""
        deferred = ((turn.key, worker) for turn, worker in self._ready.deferred)
        return ReadyTurns(
            queued=frozenset(self._ready.queues.get(model, ())),
            suspects=tuple(self._ready.suspects.get(model, ())),
            deferred={key: worker for key, worker in deferred if _model_of(self._jobs, key) == model},
        )

    def places_kept(self, model: str) -> int:
        """Count the entries in the order of a model's ready turns, outdated ones included (tests bound them)."""
        return self._ready.queues[model].entries if model in self._ready.queues else 0

    def ready_heads(self, count: int) -> list[tuple[TurnKey, bool]]:
        """Return the next ready turns of all models in turn, and whether each is a suspect."""
        seen: Counter[tuple[JobId, str, str, str]] = Counter()
        heads: list[tuple[TurnKey, bool]] = []
        for turn, suspect in self._ready.next_turns(count):
            conversation = self._jobs[turn.key.job_id].conversations[turn.key.conversation_id]
            model = conversation.model(turn.key)
            line = (*turn.key[:2], model, turn.signature)
            heads.append((conversation.in_line(turn, model, seen[line]).key, suspect))
            seen[line] += not turn.is_front
        return heads

    def pending_heads(self, count: int) -> list[tuple[TurnKey, tuple[str, ...], int]]:
        """Return the first turns that wait for others, with the agents they wait for and their round."""
        found: list[tuple[TurnKey, tuple[str, ...], int]] = [
            (key, (f"{reader.conversation_id}/{reader.agent_id}",), reader.round)
            for key, reader in islice(self._readers.waited_for.items(), count)
        ]
        for live in self._jobs.values():
            for conversation in live.conversations.values():
                if len(found) >= count:
                    return found
                if conversation.ending is None:
                    found += conversation.waiting()
        return found[:count]


class PoolsView:
    """A view of a core that handles nothing meanwhile: both belong to one thread."""

    def __init__(
        self,
        jobs: Mapping[JobId, LiveJob],
        ready: ReadyPool,
        in_flight: InFlightPool,
        lost: Mapping[str, bool],
        group_by: GroupBy | None,
        room: RoomKeeper,
        readers: FirstReaders,
    ) -> None:
        self._jobs = jobs
        self._ready = ready
        self._in_flight = in_flight
        self._lost = lost  # lost models, and whether another node has each
        self._room = room
        self._readers = readers
        self.queues = QueuesView(jobs, ready, in_flight, group_by, room, readers)

    def __repr__(self) -> str:
        return f"<PoolsView jobs={len(self._jobs)} ready={len(self._ready)} in_flight={len(self._in_flight)}>"

    def of_job(self, job_id: JobId) -> dict[TurnState, int]:
        """Count the turns of one job that are ready and in flight."""
        return {TurnState.READY: self._ready.by_job[job_id], TurnState.IN_FLIGHT: self._in_flight.by_job[job_id]}

    def of_all(self) -> Mapping[TurnState, int]:
        """Count the turns that models speak in each pool, over all jobs; an awaited turn is in none."""
        ready, in_flight = len(self._ready), len(self._in_flight)
        left = sum(live.backlog.left_for_models for live in self._jobs.values())
        return {TurnState.PENDING: left - ready - in_flight, TurnState.READY: ready, TurnState.IN_FLIGHT: in_flight}

    def by_model(self) -> Mapping[str, Mapping[TurnState, int]]:
        """Count the turns of all jobs in each pool, by model; walks all jobs."""
        left: Counter[str] = Counter()
        for live in self._jobs.values():
            left.update(live.backlog.left_by_model)
        ready = Counter({model: self._ready.waiting(model) for model in self._ready.models()})
        ready.update(_model_of(self._jobs, turn.key) for turn, _ in self._ready.deferred)
        in_flight = Counter(map(partial(_model_of, self._jobs), self._in_flight.keys()))
        return {
            model: {
                TurnState.PENDING: max(0, left[model] - ready[model] - in_flight[model]),
                TurnState.READY: ready[model],
                TurnState.IN_FLIGHT: in_flight[model],
            }
            for model in {*left, *ready, *in_flight}
        }

    def in_flight_by_job(self) -> Mapping[JobId, int]:
        """Count the turns in flight of each job that has any."""
        return {job_id: count for job_id, count in self._in_flight.by_job.items() if count}

    def users(self, adapter: str) -> int:
        """Count the unfinished jobs whose agents use an adapter."""
        return sum(live.uses_adapter(adapter) for live in self._jobs.values())

    def models(self) -> frozenset[str]:
        """Return every model that an unfinished job uses."""
        return frozenset(model for live in self._jobs.values() for model in live.backlog.models)

    def models_of(self, job_id: JobId) -> frozenset[str]:
        """Return the models of a job's agents; none if the job has no unfinished turn here."""
        live = self._jobs.get(job_id)
        return frozenset(live.backlog.models) if live is not None else frozenset()

    @property
    def conversations(self) -> int:
        """The number of conversations that have not ended."""
        return sum(len(live.conversations) for live in self._jobs.values())

    def conversations_of(self, job_id: JobId) -> Collection[str]:
        """Return the conversations of a job that are here and have not ended."""
        live = self._jobs.get(job_id)
        return () if live is None else live.conversations.keys()

    def waits_for_caller(self, key: TurnKey) -> bool:
        """Whether a turn waits here for its caller."""
        live = self._jobs.get(key.job_id)
        conversation = live.conversations.get(key.conversation_id) if live is not None else None
        return conversation is not None and key in conversation.awaited

    @property
    def readers(self) -> tuple[TurnKey, ...]:
        """The first readers whose first token other turns wait for."""
        return self._readers.readers

    def jobs(self) -> tuple[JobId, ...]:
        """List the jobs that have unfinished turns here."""
        return tuple(self._jobs)

    def free(self, model: str) -> int:
        """Count the free slots of a model less its waiting turns; negative if turns queue."""
        free = self._in_flight.models[model].free - self._ready.waiting(model)
        return free - self._readers.held(model) if self._readers.are_any else free

    def is_hopeless(self, model: str) -> bool:
        """Whether no worker of a model will be ready without an operator, here or elsewhere."""
        return self._lost.get(model) is False

    def waiting_on_demand(self) -> Mapping[str, Waiting]:
        """Return the waiting turns of each model that is loaded onto lanes."""
        waiting = self._ready.arrivals.waiting()
        return {model: replace(of, is_full=self._is_full(model)) for model, of in waiting.items()}

    def _is_full(self, model: str) -> bool:
        """Whether turns wait although a slot is free, because no KV cache has room for the next."""
        return (
            self._ready.has_others(model)
            and self._in_flight.models[model].kv_budget is not None
            and self._in_flight.models[model].has_free
        )

    def slots(self, model: str) -> int:
        """Count the slots of a model's ready workers."""
        return self._in_flight.models[model].total

    def reserved(self, worker: str) -> int:
        """Return how many tokens of a worker's KV cache the turns on it have reserved."""
        return self._in_flight.kv.reserved(worker)

    def held(self, worker: str) -> int:
        """Count the slots of a worker that are held for programs."""
        return self._in_flight.worker(worker).held

    def capacity(self) -> CapacityView:
        """Return how far KV caches limit starts at this moment; walks all workers."""
        kv, needs, working_set = self._in_flight.kv, self._room.needs, self._room.working_set
        ready = self._in_flight.ready
        return CapacityView(
            workers={
                worker: WorkerRoom(
                    budget=kv.budget(worker) if worker in ready else None,
                    reserved=kv.reserved(worker),
                    needs=dict(kv.needs(worker)),
                )
                for worker in dict.fromkeys((*ready, *kv.workers))
            },
            passed=self._room.passed,
            pressed=working_set.pressed,
            idle=working_set.idle,
            kept=frozenset(working_set.conversations),
            conversations=needs.conversations,
            agents=needs.agents,
        )

    def is_on_trial(self, key: TurnKey) -> bool:
        """Whether a turn in flight is tried as a suspect."""
        return self._in_flight.is_on_trial(key)

    def trial_worker(self, model: str) -> str | None:
        """Return the worker of a model that is reserved for trials."""
        worker = self._in_flight.models[model].trial_worker
        return None if worker is None else worker.name


def _model_of(jobs: Mapping[JobId, LiveJob], key: TurnKey) -> str:
    return jobs[key.job_id].conversations[key.conversation_id].model(key)
