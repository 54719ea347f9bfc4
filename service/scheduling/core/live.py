"""Jobs and conversations that have not ended, as the core stores them."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, overload

from service.conversations.job.job import Agent, Conversation, Job, Mode, TurnKey
from service.conversations.job.states import ConversationState, TurnState
from service.conversations.job.until import NOTHING, TurnDigest
from service.conversations.talk.turn_failures import digest_of_failure
from service.conversations.talk.turn_order import LedOrder, Place, speaking_order
from service.scheduling.core.backlog import Estimates, JobBacklog
from service.scheduling.core.blame import Trial
from service.scheduling.core.events import ConversationEnded, EndedBefore, JobAdmitted
from service.scheduling.core.queue.affinity import CacheLocation
from service.scheduling.core.queue.ready_queue import ReadyTurn

# Shared by all conversations: each call of frozenset() makes another object
NONE_AWAITED: Final[frozenset[TurnKey]] = frozenset()


class LiveJob:
    """One job that has not ended."""

    def __init__(self, event: JobAdmitted, estimates: Estimates) -> None:
        job = self.job = event.job
        self.suspects = dict(event.suspects)  # from an earlier life of the service
        self.backlog = JobBacklog(job, estimates)
        self.places = {agent.id: number for number, agent in enumerate(job.agents)}
        self.names = tuple(self.places)
        self.conversations: dict[str, LiveConversation] = {}
        self.is_cancelled = event.is_cancelled
        self.is_distrusted = False  # its turns were convicted one after the other: its others are tried too

    def __repr__(self) -> str:
        return f"<LiveJob {self.job.id} conversations={len(self.conversations)}>"

    def extend(self, job: Job, suspects: Mapping[TurnKey, Trial]) -> None:
        """Add further conversations of the job."""
        self.suspects |= suspects
        self.backlog.extend(job.conversations)

    def take_conversations(self, event: JobAdmitted, orders: Iterator[int]) -> list["LiveConversation"]:
        """Add the conversations of an admission; return them, each with the next number."""
        fresh = [LiveConversation(self, each, next(orders)) for each in event.job.conversations]
        self.conversations |= {conversation.definition.id: conversation for conversation in fresh}
        self.backlog.refresh()
        for key, location in event.cached.items():
            self.conversations[key.conversation_id].note_cache(self.places[key.agent_id], location)
        return fresh

    def uses_adapter(self, name: str) -> bool:
        """Whether an agent uses an adapter in any conversation that has not ended."""
        casts = (talk.definition.cast.values() for talk in self.conversations.values() if talk.definition.cast)
        return any(agent.adapter == name for agents in (self.job.agents, *casts) for agent in agents)

    def end_conversation(self, conversation: "LiveConversation") -> None:
        """Remove a conversation that has ended or left."""
        del self.conversations[conversation.definition.id]
        named = None if self.job.leader is None else conversation.named_speaker()
        self.backlog.drop_turns(conversation.definition, conversation.spoken_by_agent(), named)
        self.backlog.note_rounds(conversation.definition.id, 0)


class Unspoken(Sequence[TurnKey]):
    """The turns of a conversation that never ended, made on demand: there may be a quarter of a million.

    ``rounds`` holds the rounds in which each agent could have spoken.
    """

    def __init__(self, job: Job, conversation_id: str, rounds: Sequence[range], ended: AbstractSet[TurnKey]) -> None:
        self._job = job
        self._conversation_id = conversation_id
        self._rounds = rounds
        self._ended = ended

    def __repr__(self) -> str:
        return f"<Unspoken {len(self)} of {self._job.id}/{self._conversation_id}>"

    def __len__(self) -> int:
        """Count the turns."""
        of = {agent.id: rounds for agent, rounds in zip(self._job.agents, self._rounds, strict=True)}
        return sum(map(len, self._rounds)) - sum(key.round in of[key.agent_id] for key in self._ended)

    def __iter__(self) -> Iterator[TurnKey]:
        """Iterate in the order of rounds and agents."""
        for number in range(max(rounds.stop for rounds in self._rounds)):
            for agent, rounds in zip(self._job.agents, self._rounds, strict=True):
                key = TurnKey(self._job.id, self._conversation_id, agent.id, number)
                if number in rounds and key not in self._ended:
                    yield key

    @overload
    def __getitem__(self, place: int) -> TurnKey: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[TurnKey, ...]: ...
    def __getitem__(self, place: int | slice) -> TurnKey | tuple[TurnKey, ...]:
        """Return one or some of the turns."""
        return tuple(self)[place]

    def __eq__(self, other: object) -> bool:
        """Tell whether these are the same turns."""
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        """Hash by the conversation."""
        return hash((self._job.id, self._conversation_id))


class LiveConversation:
    """One conversation that has not ended, with its ``agents``.

    ``open`` holds its turns that are ready or in flight, ``awaited`` those that wait for callers, in no pool.
    """

    __slots__ = (
        "_cached",
        "_ended",
        "_lines",
        "agents",
        "awaited",
        "definition",
        "ending",
        "has_held_slot",
        "is_started",
        "live",
        "number",
        "open",
        "order",
    )

    def __init__(self, live: LiveJob, definition: Conversation, number: int) -> None:
        self.live = live
        self.definition = definition
        self.number = number
        agents = live.job.agents
        self.agents = tuple(map(definition.cast_agent, agents)) if definition.cast else agents
        self.order = speaking_order(live.job, live.names, live.backlog.dependencies, definition)
        self.open: set[TurnKey] = set()
        self.awaited = NONE_AWAITED
        self.is_started = False
        self.has_held_slot = False  # its program's slot was held for this request
        self.ending: tuple[ConversationState, str | None] | None = None
        # None until needed: a hundred thousand conversations may wait at once.
        self._ended: set[TurnKey] | None = None
        self._cached: dict[int, CacheLocation] | None = None  # by agent
        self._lines: dict[tuple[str, str], deque[ReadyTurn]] | None = None  # in free mode, by model and signature

    def __repr__(self) -> str:
        return f"<LiveConversation {self.live.job.id}/{self.definition.id} {self.order!r}>"

    @property
    def turns_spoken(self) -> int:
        """The number of its own turns that have ended in any way."""
        return len(self._ended or ()) - self.definition.heritage.turns

    def key(self, place: Place) -> TurnKey:
        """Return the key of a turn."""
        job = self.live.job
        return TurnKey(job.id, self.definition.id, job.agents[place.agent].id, place.round)

    def place(self, key: TurnKey) -> Place:
        """Return the place of a turn."""
        return Place(self.live.places[key.agent_id], key.round)

    def model(self, key: TurnKey) -> str:
        """Return the model of a turn."""
        return self.agent(key).model

    def agent(self, key: TurnKey) -> Agent:
        """Return the agent of a turn."""
        return self.agents[self.live.places[key.agent_id]]

    def has_ended(self, key: TurnKey) -> bool:
        """Whether a turn has ended in any way."""
        return key in (self._ended or ())

    def end_turn(self, key: TurnKey, *, is_earlier: bool = False) -> None:
        """Record the end of a turn, completed or not; ``is_earlier`` is true for an earlier life of the service."""
        if self._ended is None:
            self._ended = set()
        self._ended.add(key)
        self.live.backlog.count_end(self.definition, self.live.places[key.agent_id], is_earlier=is_earlier)

    def resume(self, ended: Mapping[TurnKey, EndedBefore], digests: Mapping[TurnKey, TurnDigest]) -> Sequence[Place]:
        """Record the turns that ended earlier, here or on another node; return those whose order has come."""
        spoken: dict[Place, TurnDigest] = {}
        failure: str | None = None
        for key, (state, reason) in ended.items():
            self.end_turn(key, is_earlier=True)
            digest = digests.get(key, NOTHING)
            self.is_started = self.is_started or not digest.is_inherited
            if digest.is_inherited or state is TurnState.COMPLETED:
                spoken[self.place(key)] = digest
            elif state is TurnState.FAILED:
                silence, failure = digest_of_failure(self.agent(key), reason), reason
                if silence is not None:
                    spoken[self.place(key)] = silence
                else:  # other turns were cut off because of it, even if they were stored first
                    self.ending = (ConversationState.FAILED, reason)
            elif self.ending is None:
                self.ending = (ConversationState.CANCELLED, reason)
        places = self.order.replay(spoken)
        if failure is not None and self.order.is_deserted:
            self.ending = (ConversationState.FAILED, failure)
        return places

    def ready_turn(self, place: Place, ready_order: int, signature: str, *, is_front: bool) -> ReadyTurn:
        """Return a turn for the ready queue; with ``is_front`` it goes ahead of turns that were on no slot."""
        job = self.live.job
        return ReadyTurn(
            key=self.key(place),
            job_priority=job.priority,
            rounds_completed=self.order.rounds_completed,
            conversation_order=self.number,
            agent_order=place.agent,
            ready_order=ready_order,
            path=self.live.backlog.path(place, self.definition.rounds),
            is_front=is_front,
            was_deferred=self.has_held_slot,
            signature=signature,
            owner=job.owner,
        )

    def ended(self) -> ConversationEnded:
        """Return the end of a conversation without turns in flight."""
        state, reason = self.ending or (ConversationState.COMPLETED, None)
        job, is_completed = self.live.job, state is ConversationState.COMPLETED
        unspoken: Sequence[TurnKey] = () if is_completed else self.unspoken()
        return ConversationEnded(
            job_id=job.id,
            conversation_id=self.definition.id,
            state=state,
            reason=reason,
            unspoken=unspoken,
            ending=self.order.ending if is_completed else None,
            absent=job.most_turns(self.definition) - self.turns_spoken - len(unspoken),
        )

    def in_order(self, keys: Iterable[TurnKey]) -> list[TurnKey]:
        """Return turns in the order of rounds and agents."""
        return sorted(keys, key=lambda key: (key.round, self.live.places[key.agent_id]))

    def unspoken(self) -> "Unspoken":
        """Return the turns that have not ended, for a conversation that is over."""
        rounds = [self.order.open_rounds(agent) for agent in range(len(self.live.names))]
        return Unspoken(self.live.job, self.definition.id, rounds, self._ended or frozenset())

    def spoken_by_agent(self) -> list[int]:
        """Count each agent's turns that have ended."""
        counts = Counter(key.agent_id for key in self._ended or ())
        return [counts[agent.id] for agent in self.live.job.agents]

    def named_speaker(self) -> int | None:
        """Return the agent that a leader has named and whose turn has not ended, or None."""
        if not isinstance(self.order, LedOrder) or self.order.chosen is None:
            return None
        return None if self.has_ended(self.key(self.order.next_place)) else self.order.chosen

    def waiting(self) -> Iterator[tuple[TurnKey, tuple[str, ...], int]]:
        """Iterate over the turns that wait for others, with those agents and their round."""
        agents = self.live.job.agents
        for place, others, number in self.order.awaited_turns():
            yield self.key(place), tuple(agents[other].id for other in others), number

    def cached(self, agent: int) -> CacheLocation | None:
        """Return the worker whose cache has an agent's prompt."""
        return self._cached.get(agent) if self._cached is not None else None

    def note_cache(self, agent: int, cached: CacheLocation | None) -> None:
        """Record the worker whose cache has an agent's prompt, None for no worker."""
        if self._cached is None:
            self._cached = {}
        if cached is None:
            self._cached.pop(agent, None)
        else:
            self._cached[agent] = cached

    def queue(self, turn: ReadyTurn, model: str) -> None:
        """Append a turn to its conversation's line for a model."""
        if self.live.job.mode is Mode.FREE:
            if self._lines is None:
                self._lines = {}
            self._lines.setdefault((model, turn.signature), deque()).append(turn)

    def back_in_line(self, turn: ReadyTurn, model: str) -> None:
        """Put a turn back at the front of its line."""
        if self._lines is not None and not turn.is_front:
            self._lines.setdefault((model, turn.signature), deque()).appendleft(turn)

    def leave_line(self, key: TurnKey) -> None:
        """Remove a turn that will not start from its line."""
        for line in (self._lines or {}).values():
            for turn in [each for each in line if each.key == key]:
                line.remove(turn)

    def in_line(self, turn: ReadyTurn, model: str, place: int) -> ReadyTurn:
        """Return the turn that would start at the n-th place of this conversation among the ready turns of a model."""
        line = self._lines.get((model, turn.signature)) if self._lines is not None else None
        return turn if turn.is_front or not line or place >= len(line) else line[place]

    def first_in_line(self, turn: ReadyTurn, model: str) -> ReadyTurn:
        """Return the turn that starts in place of ``turn``: itself, or in free mode the one that has waited longest."""
        line = self._lines.get((model, turn.signature)) if self._lines is not None else None
        if turn.is_front or not line:
            return turn
        return line.popleft()
