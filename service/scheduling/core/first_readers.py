"""Conversations that begin alike: the first reads the shared prompt, and the others wait for it. Pure.

An engine that stores equal beginnings of prompts once has the prompt for all turns at the first token of the first one.
An engine with a cache per slot reads the prompt in each slot that takes such a turn, and answers nothing meanwhile.
There n answers of A seconds on w slots take n A / w, and each further slot costs a reading of R seconds. Another slot
pays while n A is more than R w (w + 1).

Source: specification, "Begun from a record".
"""

import math
from collections.abc import Mapping
from typing import Final

from service.conversations.job.job import Agent, Conversation, JobId, TurnKey
from service.scheduling.core.events import WorkerReady
from service.scheduling.core.queue.affinity import PromptReading

Beginning = tuple[tuple[str | None, ...], *tuple[object, ...]]  # equal for turns whose prompts begin alike
Rank = tuple[int, str | None]
ALL: Final = 1 << 30


class _Alike:
    """The first turns of conversations that begin alike."""

    def __init__(self) -> None:
        self.running: dict[TurnKey, None] = {}  # ready or in flight; the first one reads first
        self.held: dict[TurnKey, None] = {}
        self.read_s: float | None = None  # seconds that the first turn took to read the prompt
        self.answer_s = math.inf  # the shortest, since a turn that waits while others read takes longer
        self.is_read = False  # for all turns

    @property
    def most(self) -> int:
        """The number of turns that may run at once."""
        if self.is_read or self.read_s == 0.0:
            return ALL
        if self.read_s is None or self.answer_s == math.inf:
            return 1
        return (
            math.ceil(math.sqrt(0.25 + (len(self.held) + len(self.running)) * self.answer_s / self.read_s) - 0.5) or 1
        )


class FirstReaders:
    """The first turns of conversations that were begun from a record; written by the core alone."""

    def __init__(self) -> None:
        self._alike: dict[Beginning, _Alike] = {}
        self._of: dict[tuple[JobId, str], dict[TurnKey, Beginning]] = {}  # by conversation
        self._sharing: set[str] = set()  # models

    def __repr__(self) -> str:
        return f"<FirstReaders of {len(self._alike)} beginnings>"

    def note_worker(self, worker: WorkerReady) -> None:
        """Record whether a model's engine stores equal beginnings of prompts once."""
        if worker.shares_prefixes:
            self._sharing.add(worker.model)

    @property
    def are_any(self) -> bool:
        """Whether any conversations begin alike here."""
        return bool(self._alike)

    def held(self, model: str) -> int:
        """Count the turns of a model that wait for a first reader."""
        return sum(len(alike.held) for (of_agent, *_), alike in self._alike.items() if of_agent[0] == model)

    @property
    def waited_for(self) -> Mapping[TurnKey, TurnKey]:
        """The turns that wait for a first reader, each with that reader."""
        return {key: next(iter(alike.running)) for alike in self._alike.values() for key in alike.held}

    @property
    def readers(self) -> tuple[TurnKey, ...]:
        """The first readers whose first token other turns wait for."""
        return tuple(next(iter(alike.running)) for alike in self._alike.values() if alike.held and alike.read_s is None)

    def hold(self, key: TurnKey, rank: Rank, agent: Agent, conversation: Conversation) -> bool:
        """Whether a conversation's first turn must wait for another to read their shared beginning.

        A turn waits only for one of the same ``rank``: its priority and key.
        """
        beginning = _beginning(rank, agent, conversation)
        if beginning is None:
            return False
        alike = self._alike.setdefault(beginning, _Alike())
        self._of.setdefault(key[:2], {})[key] = beginning
        if len(alike.running) < alike.most and not alike.held:
            alike.running[key] = None
            return False
        alike.held[key] = None
        return True

    def held_of(self, job_id: JobId, conversation_id: str) -> list[TurnKey]:
        """List the turns of a conversation that wait for a first reader."""
        of = self._of.get((job_id, conversation_id), {})
        return [key for key, beginning in of.items() if key in self._alike[beginning].held]

    def note_read(self, key: TurnKey, model: str, seconds: float) -> list[TurnKey]:
        """Record a turn's first token; return the turns whose wait is over."""
        alike = self._alike_of(key)
        if alike is None:
            return []
        alike.read_s, alike.is_read = seconds, model in self._sharing
        return self._free(alike)

    def take_answer(
        self, key: TurnKey, reading: PromptReading | None, seconds: float | None, token_s: float | None
    ) -> list[TurnKey]:
        """Record a completed turn with the engine's reading; return the turns whose wait is over.

        ``token_s`` is the model's time per prompt token in seconds, None if unknown.
        """
        alike = self._alike_of(key)
        if alike is None:
            return []
        if reading is None or seconds is None:
            alike.is_read = True  # no measure to weigh a wait by
        else:
            # The first turn may have used a slot that has its source's cache: another slot reads the whole prompt.
            prompt = reading.context_tokens - reading.answer_tokens
            alike.read_s = max(alike.read_s or 0.0, reading.seconds, prompt * (token_s or 0.0))
            alike.answer_s = min(alike.answer_s, max(0.0, seconds - reading.seconds))
        return self._forget(key)

    def forget_turn(self, key: TurnKey) -> list[TurnKey]:
        """Forget a turn without an answer; return the turns whose wait is over."""
        return [] if self._alike_of(key) is None else self._forget(key)

    def forget_conversation(self, job_id: JobId, conversation_id: str) -> list[TurnKey]:
        """Forget a conversation that is over or has left; return the turns whose wait is over."""
        if not self._of:
            return []
        return [free for key in list(self._of.get((job_id, conversation_id), ())) for free in self._forget(key)]

    def _forget(self, key: TurnKey) -> list[TurnKey]:
        of = self._of[key[:2]]
        beginning = of.pop(key)
        if not of:
            del self._of[key[:2]]
        alike = self._alike[beginning]
        alike.running.pop(key, None)
        alike.held.pop(key, None)
        free = self._free(alike)
        if not alike.running:
            del self._alike[beginning]
        return free

    def _alike_of(self, key: TurnKey) -> _Alike | None:
        beginning = self._of.get(key[:2], {}).get(key) if self._of else None
        return None if beginning is None else self._alike[beginning]

    @staticmethod
    def _free(alike: _Alike) -> list[TurnKey]:
        free: list[TurnKey] = []
        while alike.held and len(alike.running) < alike.most:
            key = next(iter(alike.held))
            del alike.held[key]
            alike.running[key] = None
            free.append(key)
        return free


def _beginning(rank: Rank, agent: Agent, conversation: Conversation) -> Beginning | None:
    heritage = conversation.heritage
    if heritage.source is None:
        return None
    variables = tuple(sorted((conversation.variables or {}).items()))
    ends = tuple(sorted(heritage.ends.items()))
    of_agent = agent.model, agent.id, agent.adapter, agent.system
    return of_agent, rank, heritage.source, ends, conversation.prompt, variables
