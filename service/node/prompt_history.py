"""The exact prompt of each attempt, rebuilt from the job, its words and its turns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Final

import msgspec
from msgspec.structs import replace

from service.conversations.document.job_document import with_conversations
from service.conversations.document.job_parser import parse_stored
from service.conversations.job.job import NO_HERITAGE, Agent, Job, JobId, TurnKey, TurnKind
from service.conversations.job.states import TurnState
from service.conversations.job.wording import ConversationWords
from service.conversations.record.heritage import with_formers
from service.conversations.record.transcript import Attempt, Origin, Turn
from service.conversations.talk.discussion import Utterance
from service.conversations.talk.prompt_messages import agent_request
from service.conversations.talk.prompt_record import PromptRecord, restore_exchanges
from service.errors import JobNotFound, TurnNotFound
from service.scheduling.asking.prompts import JobPrompts
from service.scheduling.scheduler import Scheduler
from service.store import conversation_rows, heirs, job_rows, turn_rows
from service.store.databases.database import Connection
from service.store.records import MemoryCut
from service.store.store import Store
from transport.request import Constraint, Message
from workers.outcome import FailureReason
from workers.requests.prompts.render import ToolBudget, render_messages
from workers.requests.request import CONSTRAINTS

INVALID: Final = FailureReason.INVALID_ANSWER  # reason of an attempt whose answer was rejected
Constrain = Callable[[str, Constraint], Mapping[str, object]]


Messages = Sequence[Message]
# The turn whose past is read, the agent that is asked, and what it hears from a round on.
Asker = tuple[TurnKey, Agent, Callable[[int], Sequence[Utterance]]]


class AskedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt's prompt as last sent to its engine: after its tool calls, if any.

    ``messages`` is None if unknown: the turn was inherited from a job that was deleted since. ``earlier`` has the
    prompts of the messages before its last one, which made calls.
    """

    messages: Sequence[Message] | None
    params: Mapping[str, object] | None
    tools: Sequence[Mapping[str, object]]
    earlier: Sequence[Messages] = ()


class _Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A stored conversation; ``job`` has no other."""

    job: Job
    words: ConversationWords | None
    turns: Sequence[Turn]
    cuts: Sequence[MemoryCut]


class PromptHistory:
    """Reads stored turns, and those in flight here.

    ``constrain`` returns a model's parameters for a constraint, ``sends_tools`` whether its engine gets tools.
    """

    def __init__(
        self,
        store: Store,
        scheduler: Scheduler,
        adapters: Callable[[], Mapping[str, str]],
        constrain: Constrain,
        sends_tools: Callable[[str], bool],
    ) -> None:
        self._store = store
        self._scheduler = scheduler
        self._adapters = adapters
        self._constrain = constrain
        self._sends_tools = sends_tools

    def __repr__(self) -> str:
        return f"<PromptHistory {self._store!r}>"

    async def of_turn(self, key: TurnKey, kind: TurnKind = TurnKind.TURN) -> list[AskedPrompt]:
        """Return the prompts of a turn's attempts in order; none before its first attempt.

        Raises:
            JobNotFound: there is no such job.
            ConversationNotFound: it has no such conversation.
            TurnNotFound: the conversation has no such turn.
        """
        partial_turns = self._scheduler.turns.of_conversation(key.job_id, key.conversation_id)
        running = self._scheduler.turns.running_attempt(key)
        stored = await self._store.read(partial(_read, key=key, adapters=dict(self._adapters())))
        _check(stored.job, key)
        known = [*partial_turns, *stored.turns]  # the last one counts, so stored turns take precedence
        turn = next((each for each in reversed(known) if each.key == key and each.kind is kind), None)
        if turn is not None and turn.inherited is not None:
            return await self._of_source(turn, turn.inherited)
        if turn is None and key.agent_id not in {agent.id for agent in stored.job.agents}:
            raise TurnNotFound(*key)
        attempts = list(turn.attempts) if turn is not None else []
        if running is not None and kind is TurnKind.TURN and (turn is None or turn.finished_at is None):
            attempts.append(running)
        return list(self._asked(stored, key, turn, attempts))

    async def by_message(self, job_id: JobId, conversation_id: str) -> dict[tuple[str, int], list[Messages]]:
        """Return the prompts of a conversation's completed turns by agent and round, one for each message of a turn.

        A turn whose prompt cannot be rebuilt has none.
        """
        key = TurnKey(job_id, conversation_id, "", 0)
        stored = await self._store.read(partial(_read, key=key, adapters=dict(self._adapters()), is_alone=True))
        found: dict[tuple[str, int], list[Messages]] = {}
        for turn in stored.turns:
            if turn.state is TurnState.COMPLETED and turn.kind is TurnKind.TURN and turn.inherited is None:
                last = [*self._asked(stored, turn.key, turn, turn.attempts)][-1:]
                found[turn.key.agent_id, turn.key.round] = [*last[0].earlier, last[0].messages or ()] if last else []
        return found

    async def _of_source(self, turn: Turn, origin: Origin) -> list[AskedPrompt]:
        """Return the prompts of an inherited turn from the job where it was spoken; unknown if that was deleted."""
        spoken = TurnKey(origin.job, origin.conversation, turn.key.agent_id, turn.key.round)
        try:
            return await self.of_turn(spoken, turn.kind)
        except JobNotFound:
            return [AskedPrompt(messages=None, params=None, tools=()) for _ in turn.attempts]

    async def heard(self, key: TurnKey) -> tuple[str, Sequence[Utterance]]:
        """Return a conversation's prompt, and the words that an agent may hear in an unfinished turn.

        Raises:
            JobNotFound: there is no such job.
            ConversationNotFound: it has no such conversation.
            TurnNotFound: the conversation has no such turn.
        """
        stored = await self._store.read(partial(_read, key=key, adapters=dict(self._adapters())))
        _check(stored.job, key)
        prompts = _prompts_of(stored)
        words = prompts.discussion(key.conversation_id).heard_by(prompts.agent(key), key.round)
        return prompts.conversations[key.conversation_id].prompt, words

    def _asked(
        self,
        stored: _Conversation,
        key: TurnKey,
        turn: Turn | None,
        attempts: Sequence[Attempt],
    ) -> Iterator[AskedPrompt]:
        prompts, is_summary = _prompts_of(stored), turn is not None and turn.kind is TurnKind.SUMMARY
        reader, agent, hear = (_of_summary if is_summary else _of_agent)(prompts, key)
        discussion, all_calls = prompts.discussion(key.conversation_id), turn.tool_calls if turn is not None else ()
        rejected = [(each.text, each.detail or "") for each in attempts if each.reason == INVALID]
        is_lost = prompts.conversations[key.conversation_id].heritage.is_lost  # the earlier words are unknown
        for attempt in attempts:
            record = attempt.prompt
            if record is None or stored.words is None or is_lost:
                yield AskedPrompt(messages=None, params=None, tools=())
                continue
            if record.heard is not None:
                discussion.make_prompt(key.agent_id, key.round, record.heard)
            opened = prompts.memories.opened(reader, record, stored.words.models[agent.model])
            place, heard = (opened, agent, key.round), hear(record.from_round)
            request = agent_request(stored.job, place, stored.words, heard, rejected, record, attempt.prompted_at)
            signals = frozenset(tool.name for tool in agent.exit_tools)
            exchanges = restore_exchanges(record.exchanges, attempt.tool_calls or all_calls, signals)
            assert request.frame is not None  # noqa: S101 - an agent's request has one
            budget = ToolBudget(iterations=record.iterations, has_fallback=record.has_fallback, stuck=record.stuck)
            earlier = [render_messages(request, request.frame, budget, exchanges[:n]) for n in range(len(exchanges))]
            yield AskedPrompt(
                messages=render_messages(request, request.frame, budget, exchanges),
                earlier=earlier,
                params=self._params(agent, record, attempt.constrained_by),
                tools=[tool.document for tool in chain(agent.tools, agent.exit_tools)],
            )

    def _params(self, agent: Agent, record: PromptRecord, constrained_by: str | None) -> dict[str, object]:
        params = {**record.defaults, **agent.params, **record.changes}
        if agent.is_constrained and constrained_by is None:  # tool calls were still possible
            return {name: value for name, value in params.items() if name not in CONSTRAINTS}
        if constrained_by is None:
            return params
        if (agent.tools or agent.exit_tools) and self._sends_tools(agent.model):
            params["tool_choice"] = "none"
        if constrained_by in params or agent.validation is None:
            return params
        constraint = agent.validation.constraint(record.thought)
        return params | dict(self._constrain(agent.model, constraint) if constraint is not None else {})


def _read(
    connection: Connection, key: TurnKey, adapters: Mapping[str, str], *, is_alone: bool = False
) -> _Conversation:
    """Read a conversation and its job; one that ``is_alone`` has been left out of a large document with the others."""
    conversation = conversation_rows.record(connection, key.job_id, key.conversation_id)
    text = job_rows.document(connection, key.job_id)
    if is_alone:
        text = with_conversations(text, {key.conversation_id}, are_named=True).decode()
    job = parse_stored(text, key.job_id, adapters)
    heritages = heirs.heritages(connection, key.job_id, [key.conversation_id])
    heritage = heritages.get(key.conversation_id, NO_HERITAGE)
    mine = next(each for each in job.conversations if each.id == key.conversation_id)
    cuts = turn_rows.memory_cuts(connection, key.job_id, [key.conversation_id])
    words = conversation_rows.words(connection, key.job_id, [key.conversation_id])
    job = replace(job, conversations=(replace(mine, heritage=heritage),))
    return _Conversation(job=job, words=words.get(key.conversation_id), turns=conversation.turns, cuts=cuts)


def _prompts_of(stored: _Conversation) -> JobPrompts:
    prompts = JobPrompts(stored.job)
    prompts.memories.resume(stored.cuts)
    prompts.hear_again(stored.turns)
    return prompts


def _of_agent(prompts: JobPrompts, key: TurnKey) -> Asker:
    agent, discussion = prompts.agent(key), prompts.discussion(key.conversation_id)
    return key, agent, partial(discussion.heard_by, agent, key.round)


def _of_summary(prompts: JobPrompts, key: TurnKey) -> Asker:
    """Return the asker of a summary for its reader; in a shared view any reader, since all share the cut."""
    memories, readers = prompts.memories, (each.id for each in prompts.job.agents if each.memory is not None)
    reader = key if prompts.agent(key).memory is not None else key._replace(agent_id=next(readers))
    return (
        reader,
        memories.summarizer(reader),
        lambda begin: memories.summed(reader, range(begin, memories.shown_from(reader))),
    )


def _check(job: Job, key: TurnKey) -> None:
    (conversation,) = job.conversations
    agents = with_formers(job, conversation.heritage).agents
    if key.agent_id not in {agent.id for agent in agents} or not 0 <= key.round < conversation.rounds:
        raise TurnNotFound(*key)
