"""The limits of a job's size; checked before anything else, since reading is what costs."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
from pydantic import Field

from service.errors import Fault
from service.formats.faults import StrictModel

CHOICE_CHARS: Final = 64
MOST_PATTERNS: Final = 256  # of a job's conditions


class Limits(StrictModel):
    """The limits of one job."""

    body_bytes: int = Field(default=16 * 1024 * 1024, gt=0, description="size of a posted body")
    depth: int = Field(default=64, gt=0, description="nesting of a posted body")
    agents: int = Field(default=256, gt=0, description="agents of a job")
    conversations: int = Field(default=10_000, gt=0, description="conversations of a job")
    rounds: int = Field(default=1_000, gt=0, description="rounds of a conversation")
    tools: int = Field(default=128, gt=0, description="tools of an agent, exit tools included")
    queue_bytes: int = Field(
        default=256 * 1024 * 1024, gt=0, description="size of all bodies of requests that wait for slots"
    )
    batch: int = Field(default=100_000, gt=0, description="jobs of one posted batch, a line each")
    turns: int = Field(default=1_000_000, gt=0, description="turns of a job: agents x rounds, over its conversations")
    nodes: int = Field(default=500_000, gt=0, description="values of a posted body, however deep")
    metadata: int = Field(default=64 * 1024, gt=0, description="size of a job's metadata as JSON, or a conversation's")
    choices: int = Field(default=1_000, gt=0, description="choices of a validation; together 64 characters for each")


def size_faults(document: Mapping[str, object], limits: Limits) -> Iterator[Fault]:
    """Yield what of a job is too many."""
    agents, conversations = document.get("agents"), document.get("conversations")
    if isinstance(conversations, list) and len(conversations) > limits.conversations:
        yield too_many("conversations", "conversations", len(conversations), limits.conversations)
        return
    patterns = len(until_patterns(document))
    if patterns > MOST_PATTERNS:  # each is compiled where the others wait
        yield Fault(path="until", message=f"{patterns} different patterns of conditions are more than {MOST_PATTERNS}")
    if not isinstance(agents, list):
        return
    if len(agents) > limits.agents:
        yield too_many("agents", "agents", len(agents), limits.agents)
        return
    for place, agent in posted_agents(document):
        yield from _choice_faults(f"{place}.validation.choices", agent.get("validation"), limits)
        tools = sum(len(given) for given in map(agent.get, ("tools", "exit_tools")) if isinstance(given, list))
        if tools > limits.tools:
            yield too_many(f"{place}.tools", "tools", tools, limits.tools)
        for key in ("visible_to", "speak_after_within_round"):
            names = agent.get(key)
            if isinstance(names, list) and len(names) > limits.agents:
                yield too_many(f"{place}.{key}", "agents", len(names), limits.agents)


def posted_agents(document: Mapping[str, object]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the agents of a posted job and what differs of them in conversations, each with its place."""
    agents, conversations = document.get("agents"), document.get("conversations")
    for index, agent in enumerate(agents if isinstance(agents, list) else ()):
        if isinstance(agent, dict):
            yield f"agents[{index}]", agent
    for index, conversation in enumerate(conversations if isinstance(conversations, list) else ()):
        cast = conversation.get("agents") if isinstance(conversation, dict) else None
        for name, given in cast.items() if isinstance(cast, dict) else ():
            if isinstance(given, dict):
                yield f"conversations[{index}].agents.{name}", given


def until_patterns(document: Mapping[str, object]) -> set[str]:
    """Return the patterns of a job's conditions, whatever else is wrong with it."""
    conversations, found = document.get("conversations"), set[str]()
    for holder in (document, *(conversations if isinstance(conversations, list) else ())):
        conditions = holder.get("until") if isinstance(holder, dict) else None
        for condition in conditions if isinstance(conditions, list) else ():
            if isinstance(condition, dict) and isinstance(condition.get("matches"), str):
                found.add(condition["matches"])
    return found


def _choice_faults(place: str, validation: object, limits: Limits) -> Iterator[Fault]:
    choices = validation.get("choices") if isinstance(validation, dict) else None
    if not isinstance(choices, list):
        return
    if len(choices) > limits.choices:
        yield too_many(place, "choices", len(choices), limits.choices)
    chars = sum(len(choice) for choice in choices if isinstance(choice, str))
    if chars > CHOICE_CHARS * limits.choices:
        message = f"{chars} characters of choices are more than {CHOICE_CHARS} x limits.choices = {limits.choices}"
        yield Fault(path=place, message=message)


def metadata_faults(document: Mapping[str, object], limits: Limits) -> Iterator[Fault]:
    """Yield which metadata of a job is too large."""
    conversations = document.get("conversations")
    listed = conversations if isinstance(conversations, list) else []
    places = [
        ("metadata", document),
        *((f"conversations[{n}].metadata", conversation) for n, conversation in enumerate(listed)),
    ]
    for place, holder in places:
        given = holder.get("metadata") if isinstance(holder, dict) else None
        size = len(msgspec.json.encode(given)) if given else 0
        if size > limits.metadata:
            yield Fault(path=place, message=f"{size} bytes are more than limits.metadata = {limits.metadata}")


def too_many(path: str, what: str, asked: int, limit: int) -> Fault:
    """Return the fault of what is more than a limit."""
    return Fault(path=path, message=f"{asked} {what} are more than limits.{what} = {limit}")
