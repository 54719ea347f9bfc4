"""Makes the messages of one agent's request from a conversation. Pure.

In its own view an agent's words are the assistant's. All others' words are the user's, with their speakers' names, and
consecutive ones are one message, since many chat templates insist on strict alternation. In a shared view the
discussion is one text, the same for all agents that may read the same words, with the agent's own part at its end.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from string import Template
from types import MappingProxyType
from typing import Final

from msgspec.structs import replace

from service.conversations.job.job import Agent, Conversation, Former, Job, View
from service.conversations.job.validation import Validation
from service.conversations.job.variables import fill
from service.conversations.job.wording import (
    DEFAULT_ROLE,
    LONE_CONTEXT,
    SHARED_CONTEXT,
    ConversationWords,
    Wording,
    put,
)
from service.conversations.talk.discussion import Utterance
from service.conversations.talk.prompt_record import PromptRecord
from transport.request import Message
from workers.requests.bios_words import BiosFrame, Clock
from workers.requests.request import Request
from workers.tools.schemas import cut

Rejected = tuple[str, str]  # an answer that was not valid, and the reason
RESAMPLED: Final = 2  # rejected answers from which the next one is sampled differently
WARMER: Final = 0.2  # added temperature per retry
WARMEST: Final = 1.0


class PromptWriter:
    """Writes the prompts of one job's agents with the words of one model; also quotes ``formers``.

    ``cast`` holds the agents that differ in the conversation.
    """

    def __init__(
        self,
        job: Job,
        wording: Wording,
        formers: Sequence[Former] = (),
        cast: Mapping[str, Agent] = MappingProxyType({}),
    ) -> None:
        self._job = job
        speakers: Iterable[Agent | Former] = (*(cast.get(agent.id, agent) for agent in job.agents), *formers)
        self._roles = {each.id: each.role for each in speakers}
        self._wording = put(job.prompts, wording)
        self._is_shared = job.view is View.SHARED
        self._is_alone = len(job.agents) == 1

    def __repr__(self) -> str:
        return f"<PromptWriter {self._job.view} of {self._job.name}>"

    def context(self, agent: Agent) -> str:
        """Return an agent's context for its BIOS: itself and the other agents."""
        wording = self._wording
        if self._is_shared:
            template = "" if self._is_alone and wording.shared_context == SHARED_CONTEXT else wording.shared_context
        elif self._is_alone:
            has_role = agent.role != DEFAULT_ROLE
            template = wording.lone_context if has_role or wording.lone_context != LONE_CONTEXT else ""
        else:
            template = wording.context
        return _fill(template, agent.id, agent.role, agents=", ".join(each.id for each in self._job.agents))

    def system(self, conversation: Conversation, agent: Agent, *, is_told: bool) -> str:
        """Return the system prompt after the BIOS; ``is_told`` adds the demand on the answer."""
        common, own = fill(self._job.system, conversation.variables), fill(agent.system, conversation.variables)
        return _joined(common, *(() if self._is_shared else (own, self._demand(agent) if is_told else "")))

    def messages(
        self,
        conversation: Conversation,
        agent: Agent,
        round_number: int,
        heard: Iterable[Utterance],
        rejected: Sequence[Rejected],
        *,
        is_told: bool,
        addition: str | None = None,
    ) -> tuple[Message, ...]:
        """Return the prompt of ``agent`` in ``round_number``; its last message is always the user's.

        ``heard`` holds the words that it may read, in order; turns without words leave no trace. ``addition`` comes at
        the end, where it extends the earlier prompt.
        """
        audible = [utterance for utterance in heard if utterance.text is None or utterance.text.strip()]
        if self._is_shared:
            demand = self._demand(agent) if is_told else ""
            said = [self._quote(utterance) for utterance in audible]
            cue = _fill(
                self._wording.shared_cue, agent.id, agent.role, round=round_number + 1, rounds=conversation.rounds
            )
            text = _joined(conversation.prompt, *said, fill(agent.system, conversation.variables), demand, cue)
            messages: tuple[Message, ...] = (Message(role="user", content=text),)
        else:
            messages = self._alternating(conversation, agent, round_number, audible)
        if rejected:
            number = {"round": round_number + 1, "rounds": conversation.rounds}
            messages += self._rejections(rejected, _fill(self._wording.silence, agent.id, agent.role, **number))
        if addition is None:
            return messages
        last = messages[-1]
        return (*messages[:-1], Message(role=last.role, content=_joined(last.content, addition)))

    def _alternating(
        self, conversation: Conversation, agent: Agent, round_number: int, heard: Iterable[Utterance]
    ) -> tuple[Message, ...]:
        messages: list[Message] = []
        shown: list[str] = [conversation.prompt]
        for utterance in heard:
            if utterance.agent == agent.id and utterance.text is not None:
                messages.append(self._before(conversation, agent, utterance.round, shown))
                messages.append(Message(role="assistant", content=utterance.text))
                shown = []
            else:
                shown.append(self._quote(utterance))
        return (*messages, self._before(conversation, agent, round_number, shown))

    def _before(self, conversation: Conversation, agent: Agent, round_number: int, shown: Sequence[str]) -> Message:
        """Return the user's message before an agent's words: the words heard since its last turn, and the round."""
        number = {"round": round_number + 1, "rounds": conversation.rounds}
        cue = _fill(self._wording.cue, agent.id, agent.role, **number)
        if not any(shown) and not cue:  # many chat templates take no empty message
            cue = _fill(self._wording.silence, agent.id, agent.role, **number)
        return Message(role="user", content=_joined(*shown, cue))

    def _quote(self, utterance: Utterance) -> str:
        name, role = utterance.agent, self._roles[utterance.agent]
        if utterance.text is None:
            return _fill(self._wording.left, name, role)
        return _fill(self._wording.quote, name, role, round=utterance.round + 1, words=utterance.text)

    def _rejections(self, rejected: Sequence[Rejected], nothing: str) -> tuple[Message, ...]:
        """Return the messages that show the last invalid answer to its model, with the reason.

        An empty answer is shown as ``nothing``, since some servers and chat templates take no empty message.
        """
        return tuple(
            message
            for answer, fault in rejected[-1:]
            for message in (
                Message(role="assistant", content=answer if answer.strip() else nothing),
                Message(role="user", content=Template(self._wording.invalid).safe_substitute(reason=fault)),
            )
        )

    def _demand(self, agent: Agent) -> str:
        validation = agent.validation
        return "" if validation is None else demand_of(validation, self._wording)


def demand_of(validation: Validation, wording: Wording) -> str:
    """Return the required form of an answer in words."""
    if validation.choices:
        return Template(wording.choices_demand).safe_substitute(choices=", ".join(validation.choices))
    if validation.pattern is not None:
        return Template(wording.pattern_demand).safe_substitute(pattern=cut(validation.pattern))
    return Template(wording.schema_demand).safe_substitute(schema=validation.schema_text)


def _fill(template: str, name: str, role: str, **names: object) -> str:
    if "$" not in template:  # most words are the same for all agents
        return template
    who = name if role == DEFAULT_ROLE else f"{name} ({role})"
    return Template(template).safe_substitute(agent=name, role=role, who=who, **names)


def _joined(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


def opened(conversation: Conversation, wording: Wording, from_round: int, summary: str | None) -> Conversation:
    """Return a conversation whose prompt says which rounds are hidden, with their summary if there is one."""
    if not from_round:
        return conversation
    line = wording.omitted if summary is None else wording.summed
    note = Template(line).safe_substitute(first=1, last=from_round, summary=summary)
    return replace(conversation, prompt=_joined(conversation.prompt, note))


def agent_request(
    job: Job,
    place: tuple[Conversation, Agent, int],
    words: ConversationWords,
    heard: Iterable[Utterance],
    rejected: Sequence[Rejected],
    record: PromptRecord,
    asked_at: datetime,
) -> Request:
    """Return the request of a turn's attempt; ``place`` is its conversation (``opened``), agent and round."""
    conversation, agent, round_number = place
    wording = words.models[agent.model]
    writer = PromptWriter(job, wording, conversation.heritage.formers, conversation.cast)
    now = words.began_at if wording.clock is Clock.START else asked_at.astimezone(words.began_at.tzinfo)
    return Request(
        job_name=f"{job.name}/{conversation.id}/{agent.id}/{round_number}",
        system=writer.system(conversation, agent, is_told=record.is_told),
        conversation=writer.messages(
            conversation,
            agent,
            round_number,
            heard,
            rejected[: record.rejected],
            is_told=record.is_told,
            addition=record.addition,
        ),
        params={**agent.params, **record.changes},
        tools=agent.tools,
        exit_tools=agent.exit_tools,
        markup=agent.markup,
        adapter=agent.adapter,
        frame=BiosFrame(words=wording.bios, context=writer.context(agent), now=now),
    )


def changes_of_retry(params: Mapping[str, object], rejections: int) -> dict[str, object]:
    """Return the parameters that a retry changes: from the second on, another seed and a higher temperature.

    With the same seed a small model repeats the refused answer.
    """
    retry = rejections - RESAMPLED + 1
    if retry < 1:
        return {}
    changes: dict[str, object] = {}
    seed, temperature = params.get("seed"), params.get("temperature")
    if isinstance(seed, int) and seed >= 0:
        changes["seed"] = seed + retry
    if isinstance(temperature, int | float):
        changes["temperature"] = max(temperature, min(WARMEST, round(temperature + WARMER * retry, 3)))
    return changes
