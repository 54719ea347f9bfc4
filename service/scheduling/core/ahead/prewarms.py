"""Which pending turn's prompt is read beforehand on an idle slot, and when that ends. Pure.

A turn whose prompt may be read waits for nobody but turns that are in flight. It is read for once at most, where no
turn wants the slot, and whatever turn starts goes first. In free mode there is nothing to read: an agent waits for its
own words alone, and its engine has all before these.

Source: specification, "Reading ahead".
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from service.conversations.job import JobId, TurnKey
from service.scheduling.core import events
from service.scheduling.core.ahead.known_prompts import KnownPrompts, Talk
from service.scheduling.core.ahead.yields import Yields
from service.scheduling.core.in_flight_pool import InFlightPool
from service.scheduling.core.live import LiveConversation, LiveJob
from service.scheduling.core.queue.affinity import CacheLocation, PromptReading

LEAST_TOKENS: Final = 256  # of fewer, asking costs as much as is gained


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    worker: str
    before: CacheLocation | None  # where the agent's prompt was known before


class _Waiting:
    """The pending turns of one conversation that might be read for, and those that were."""

    __slots__ = ("asked", "wanted")

    def __init__(self) -> None:
        self.wanted: dict[TurnKey, int] = {}  # to the tokens that there are to read
        self.asked: set[TurnKey] = set()


class PreWarms:
    """Follows what the core is told and decides; it writes nothing of the pools but where prompts are known."""

    def __init__(self, jobs: Mapping[JobId, LiveJob], in_flight: InFlightPool) -> None:
        self._jobs = jobs
        self._in_flight = in_flight
        self._models: dict[str, str] = {}  # of workers that ever read beforehand
        self._open: set[str] = set()
        self._prompts = KnownPrompts()
        self._talks: dict[Talk, _Waiting] = {}
        self._running: dict[TurnKey, _Running] = {}
        self._read: dict[TurnKey, events.PreWarmEnded] = {}  # of turns that have not ended
        self.yields = Yields()

    def __repr__(self) -> str:
        return f"<PreWarms running={len(self._running)} of {len(self._talks)} conversations>"

    def follow(
        self, happened: Sequence[events.Event], actions: list[events.Action], *, is_paused: bool
    ) -> list[events.Action]:
        """Return ``actions``, which follow from what has ``happened``, with what is to be read now and no more.

        What ends comes before them, so that no slot has two owners.
        """
        for event in happened:
            if isinstance(event, events.WorkerReady | events.WorkerNotReady):
                self._take_worker(event)
        if not self._models:
            return actions
        moved: dict[Talk, None] = {}
        for event in happened:
            self._take_event(event, moved)
        ends = [key for action in actions for key in self._take_action(action, moved)]
        for talk in moved:
            self._look_at(talk)
        ends += self._end_surplus(is_paused=is_paused)
        begins = [] if is_paused else list(self._begin())
        return [*(events.EndPreWarm(key=key) for key in ends), *actions, *begins]

    # What has happened

    def _take_worker(self, event: events.WorkerReady | events.WorkerNotReady) -> None:
        if isinstance(event, events.WorkerReady) and event.reads_ahead:
            self._models[event.worker] = event.model
            self._open.add(event.worker)
            self._prompts.open(event.worker, event.slots)
        elif event.worker in self._open:
            self._open.discard(event.worker)
            self._prompts.close(event.worker)
            self.yields.forget(event.worker)

    def _take_event(self, event: events.Event, moved: dict[Talk, None]) -> None:
        match event:
            case events.TurnCompleted() | events.TurnInterrupted() | events.TurnFailed() | events.TurnCutOff():
                reading = event.reading if isinstance(event, events.TurnCompleted) else None
                if isinstance(event, events.TurnCompleted):
                    self._prompts.note_said(event.key, reading.answer_tokens if reading else 0)
                self._settle(event.key, reading)
                if event.key[:2] in self._talks:
                    self._talks[event.key[:2]].asked.discard(event.key)
                moved[event.key[:2]] = None
            case events.PreWarmEnded() if event.worker in self._models:
                self._running.pop(event.key, None)
                self._read[event.key] = event
                if not self._is_to_come(event.key):
                    self._settle(event.key, None)
            case _:
                pass

    def _take_action(self, action: events.Action, moved: dict[Talk, None]) -> Iterator[TurnKey]:
        """Follow an action; yield what ends with it."""
        match action:
            case events.StartTurn():
                running = self._running.pop(action.key, None)
                if running is not None and running.worker != action.worker:
                    yield action.key
                self._prompts.note_read(action.key, action.worker)
                moved[action.key[:2]] = None
            case events.ConversationEnded() | events.ConversationReleased():
                yield from self._forget((action.job_id, action.conversation_id))
            case _:
                pass

    def _forget(self, talk: Talk) -> Iterator[TurnKey]:
        self._prompts.forget(talk)
        waiting = self._talks.pop(talk, None)
        for key in sorted(waiting.asked) if waiting is not None else ():
            self._settle(key, None)
            if self._running.pop(key, None) is not None:
                yield key

    def _is_to_come(self, key: TurnKey) -> bool:
        conversation = self._conversation(key[:2])
        return conversation is not None and not conversation.has_ended(key)

    def _settle(self, key: TurnKey, reading: PromptReading | None) -> None:
        """Take the end of a turn that was read for: what it found in the cache, and had not been there before."""
        read = self._read.pop(key, None)
        if read is None:
            return
        found = 0
        if reading is not None:
            found = reading.context_tokens - reading.answer_tokens - reading.fresh_tokens - read.cached_tokens
        used = min(read.fresh_tokens, max(0, found))
        self.yields.add(self._models[read.worker], read.worker, read=read.fresh_tokens, used=used)

    def _look_at(self, talk: Talk) -> None:
        """Look at who of a conversation may be read for now."""
        conversation = self._conversation(talk)
        if conversation is None or conversation.ending is not None:
            return
        live = conversation.live
        speaking = {live.places[key.agent_id] for key in conversation.open if key in self._in_flight}
        waiting = self._talks.get(talk) or _Waiting()
        waiting.wanted.clear()
        for place in conversation.order.upcoming(speaking):
            key, agent = conversation.key(place), live.job.agents[place.agent]
            # Engines of llama.cpp run no two adapters in one batch: it would hold up the others.
            if key in waiting.asked or key in live.suspects or agent.adapter is not None:
                continue
            tokens = self._prompts.unread(conversation, place)
            if tokens >= LEAST_TOKENS:
                waiting.wanted[key] = tokens
        if waiting.wanted or waiting.asked:
            self._talks[talk] = waiting
        else:
            self._talks.pop(talk, None)

    # What follows

    def _end_surplus(self, *, is_paused: bool) -> Iterator[TurnKey]:
        """End the newest where slots are idle no more."""
        for worker in dict.fromkeys(running.worker for running in self._running.values()):
            keys = [key for key, running in self._running.items() if running.worker == worker]
            idle = self._in_flight.offer(worker)[0] if worker in self._open and not is_paused else 0
            for key in keys[idle:]:
                self._end(key)
                yield key

    def _end(self, key: TurnKey) -> None:
        running, conversation = self._running.pop(key), self._conversation(key[:2])
        if conversation is not None:
            conversation.note_cache(conversation.place(key).agent, running.before)

    def _begin(self) -> Iterator[events.PreWarm]:
        idle = self._idle()
        for waiting in list(self._talks.values()) if idle else ():
            for key, tokens in list(waiting.wanted.items()):
                worker = self._worker_for(key, idle)
                if worker is None:
                    continue
                del waiting.wanted[key]
                waiting.asked.add(key)
                conversation = self._jobs[key.job_id].conversations[key.conversation_id]
                agent = conversation.place(key).agent
                before = conversation.cached(agent)
                self._running[key] = _Running(worker=worker, before=before)
                known = tokens if before is None else max(tokens, before.tokens)
                conversation.note_cache(agent, CacheLocation(worker=worker, tokens=known))
                self._prompts.note_read(key, worker)
                idle[worker] -= 1
                yield events.PreWarm(key=key, worker=worker)

    def _idle(self) -> dict[str, int]:
        """Return how many slots of each worker are idle; ready turns have had their choice."""
        if not self._talks:
            return {}
        taken = [running.worker for running in self._running.values()]
        idle = {worker: self._in_flight.offer(worker)[0] - taken.count(worker) for worker in self._open}
        return {worker: slots for worker, slots in idle.items() if slots > 0 and self.yields.pays(worker)}

    def _worker_for(self, key: TurnKey, idle: Mapping[str, int]) -> str | None:
        """Return where a prompt is to be read: at the worker that knows what is before it, if that is ready."""
        live = self._jobs[key.job_id]
        if live.is_cancelled or live.is_distrusted:
            return None
        conversation = live.conversations[key.conversation_id]
        model, cached = conversation.model(key), conversation.cached(conversation.place(key).agent)
        if cached is not None and self._in_flight.has_model(cached.worker, model):
            return cached.worker if idle.get(cached.worker, 0) > 0 else None
        offers = [(slots, worker) for worker, slots in idle.items() if slots > 0 and self._models[worker] == model]
        return max(offers, default=(0, None))[1]

    def _conversation(self, talk: Talk) -> LiveConversation | None:
        live = self._jobs.get(talk[0])
        return live.conversations.get(talk[1]) if live is not None else None
