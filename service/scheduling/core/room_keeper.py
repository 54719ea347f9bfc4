"""The starts past a turn without room, and their limit, so that no large turn waits forever. Pure.

Source: D. Lifka, "The ANL/IBM SP scheduling system" (1995), for backfilling; specification, "Capacity in tokens".
"""

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec.structs import replace

from service.conversations.job.job import Agent, Conversation, JobId, TurnKey
from service.scheduling.core.events import WorkerReady
from service.scheduling.core.in_flight_pool import InFlightPool
from service.scheduling.core.kv_budgets import KvNeed, KvUse
from service.scheduling.core.queue.affinity import PromptReading
from service.scheduling.core.queue.ready_queue import ReadyTurn
from service.scheduling.core.turn_needs import TurnNeeds
from service.scheduling.core.working_set import WorkingSet

PASSES: Final = 8  # turns that may start ahead of a turn without room
GROWTH: Final = 32  # tokens expected to follow in an answer that is longer than expected
LOOKED_AT: Final = 16  # turns without room looked at per decision, which takes a millisecond at most


class RoomKeeper:
    """Estimates the needs of turns, and reserves room for turns that were passed often enough."""

    def __init__(self, in_flight: InFlightPool) -> None:
        self._in_flight = in_flight
        self.needs = TurnNeeds()
        self._passes: dict[TurnKey, int] = {}
        self._most_answer: dict[str, int] = {}  # by model
        self._sharing: set[str] = set()  # models
        self.working_set = WorkingSet(in_flight)
        self.is_bounded = False  # some worker has a budget; otherwise nothing is estimated

    def __repr__(self) -> str:
        return f"<RoomKeeper {self.needs!r} passed={len(self._passes)}>"

    @property
    def passed(self) -> Mapping[TurnKey, int]:
        """The turns without room, each with the number of turns that started ahead of it."""
        return dict(self._passes)

    def note_worker(self, worker: WorkerReady) -> None:
        """Record a worker's room in tokens, if known."""
        if worker.kv_tokens is None:
            return
        model = worker.model
        self.is_bounded = True
        if worker.shares_prefixes:
            self._sharing.add(model)
        self.working_set.measure(model)
        self._most_answer[model] = max(self._most_answer.get(model, 0), worker.most_answer)

    def need(self, key: TurnKey, agent: Agent, conversation: Conversation) -> KvNeed:
        """Return a turn's need; a prefix is shared only on models whose engines share."""
        need = self.needs.need(key, agent, conversation, self._most_answer.get(agent.model, 0))
        return need if agent.model in self._sharing else replace(need, shared=0, prefix=None)

    def correct(self, key: TurnKey, agent: Agent, conversation: Conversation, use: KvUse) -> None:
        """Reserve the measured use of a turn in flight: its prompt as counted, and an answer that goes on."""
        worker = self._in_flight.worker_of(key)
        before = None if worker is None else self._in_flight.kv.need_of(worker.name, key)
        if worker is None or before is None:
            return
        self.needs.tell(key, agent, conversation, use.prompt)
        answer = max(before.answer, use.answer + GROWTH)
        now = replace(before, prompt=use.prompt, answer=answer, shared=min(before.shared, use.prompt))
        if now != before:
            self._in_flight.kv.reserve(worker.name, key, now)

    def may_pass(self, key: TurnKey, without_room: int) -> bool:
        """Whether turns behind one without room may start; ``without_room`` counts such turns in this decision."""
        return self._passes.get(key, 0) < PASSES and without_room < LOOKED_AT

    def note_passed(self, turns: Iterable[ReadyTurn]) -> None:
        """Count, for each of these turns, one start ahead of it."""
        for turn in turns:
            self._passes[turn.key] = self._passes.get(turn.key, 0) + 1

    def note_start(self, key: TurnKey, agent: Agent, *, hears_all: bool) -> None:
        """Record a turn's start; with ``hears_all`` it hears all words so far, which in rounds it may not."""
        self._passes.pop(key, None)
        if self.is_bounded:
            self.needs.start(key, agent, hears_all=hears_all)
            self.working_set.start(key, agent.model)

    def learn(self, key: TurnKey, agent: Agent, conversation: Conversation, reading: PromptReading | None) -> None:
        """Learn from a turn that has ended."""
        if self.is_bounded and reading is not None:
            self.needs.learn(key, agent, conversation, reading)
            is_last = key.round + 1 >= conversation.rounds
            self.working_set.end_turn(key, agent.model, 0 if is_last else reading.context_tokens)

    def forget_turn(self, key: TurnKey) -> None:
        """Forget a turn that will not start."""
        self._passes.pop(key, None)

    def forget_conversation(self, job_id: JobId, conversation_id: str) -> None:
        """Forget a conversation that has ended or left."""
        self.needs.forget_conversation(job_id, conversation_id)
        self.working_set.forget(job_id, conversation_id)

    def forget_job(self, job_id: JobId, agents: Mapping[str, int]) -> None:
        """Forget a job that has ended."""
        self.needs.forget_job(job_id, list(agents))
