"""What an agent is asked in one attempt, from the job, the words in force and what was recorded. Pure.

The scheduler asks with it, and a prompt that was asked long ago is told again with it: so both are the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final

from service.conversations.job import Agent, Conversation, Job
from service.conversations.prompt_messages import PromptWriter, Rejected
from service.conversations.prompt_record import PromptRecord
from service.conversations.visibility import Utterance
from service.conversations.wording import ConversationWords
from workers.requests.prompts.bios import BiosFrame, Clock
from workers.requests.request import Request

RESAMPLED: Final = 2  # rejected answers, from which on another one is sampled otherwise
WARMER: Final = 0.2  # a retry
WARMEST: Final = 1.0


def agent_request(
    job: Job,
    place: tuple[Conversation, Agent, int],
    words: ConversationWords,
    heard: Iterable[Utterance],
    rejected: Sequence[Rejected],
    record: PromptRecord,
    asked_at: datetime,
) -> Request:
    """Return the request of an attempt of a turn; ``place`` is its conversation, agent and round."""
    conversation, agent, round_number = place
    wording = words.models[agent.model]
    writer = PromptWriter(job, wording)
    now = words.began_at if wording.clock is Clock.START else asked_at.astimezone(words.began_at.tzinfo)
    return Request(
        job_name=f"{job.name}/{conversation.id}/{agent.id}/{round_number}",
        system=writer.system(agent, is_told=record.is_told),
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
    """Return the parameters that differ in a further try: from the second on another seed, and a bit more heat.

    With the same seed a small model gives the answer again that was refused.
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
