"""The limits of a job's size, checked before anything else, since reading is expensive.

Only this module reads a document whose form is not known yet.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Final, TypeVar

import msgspec
from pydantic import Field

from service.errors import Fault
from service.formats.faults import StrictModel

CHOICE_CHARS: Final = 64
MOST_PATTERNS: Final = 256  # different patterns in a job's conditions

P = TypeVar("P", list[Any], dict[Any, Any])


class Limits(StrictModel):
    """The limits of one job."""

    body_bytes: int = Field(default=16 * 1024 * 1024, gt=0, description="size of a posted body")
    depth: int = Field(default=64, gt=0, description="nesting of a posted body")
    agents: int = Field(default=256, gt=0, description="agents of a job")
    conversations: int = Field(default=10_000, gt=0, description="conversations of a job")
    rounds: int = Field(default=1_000, gt=0, description="rounds of a conversation")
    tools: int = Field(default=128, gt=0, description="tools of an agent, including exit tools")
    queue_bytes: int = Field(
        default=256 * 1024 * 1024, gt=0, description="total size of bodies of requests that wait for slots"
    )
    batch: int = Field(default=100_000, gt=0, description="jobs of one posted batch, one per line")
    turns: int = Field(default=1_000_000, gt=0, description="turns of a job: agents x rounds, over its conversations")
    nodes: int = Field(default=500_000, gt=0, description="values of a posted body, at any depth")
    metadata: int = Field(default=64 * 1024, gt=0, description="size of a job's metadata as JSON, or a conversation's")
    choices: int = Field(default=1_000, gt=0, description="choices of a validation, with 64 times as many characters")


def size_faults(document: Mapping[str, object], limits: Limits) -> Iterator[Fault]:
    """Yield the sizes of a posted job that exceed its limits."""
    conversations = _part(document, "conversations", list)
    yield from too_many("conversations", "conversations", len(conversations), limits.conversations)
    if len(conversations) <= limits.conversations:
        yield from _pattern_faults((document, *conversations))
        yield from _agents_faults(document, limits)
    yield from _metadata_faults("metadata", document, limits)
    for index, conversation in enumerate(conversations):
        yield from _metadata_faults(f"conversations[{index}].metadata", conversation, limits)


def tool_faults(place: str, tools: int, limits: Limits) -> Iterator[Fault]:
    """Yield the fault of an agent with too many tools."""
    yield from too_many(f"{place}.tools", "tools", tools, limits.tools)


def _pattern_faults(holders: Iterable[object]) -> Iterator[Fault]:
    conditions = chain.from_iterable(_part(holder, "until", list) for holder in holders)
    given = (condition.get("matches") for condition in conditions if isinstance(condition, dict))
    patterns = len({pattern for pattern in given if isinstance(pattern, str)})
    if patterns > MOST_PATTERNS:  # the event loop waits while each is compiled
        yield Fault(path="until", message=f"{patterns} different patterns of conditions are more than {MOST_PATTERNS}")


def _agents_faults(document: Mapping[str, object], limits: Limits) -> Iterator[Fault]:
    if not isinstance(document.get("agents"), list):
        return
    agents = _part(document, "agents", list)
    yield from too_many("agents", "agents", len(agents), limits.agents)
    if len(agents) > limits.agents:
        return
    for index, agent in enumerate(agents):
        yield from _agent_faults(f"agents[{index}]", agent, limits)
    for index, conversation in enumerate(_part(document, "conversations", list)):
        for name, cast in _part(conversation, "agents", dict).items():
            yield from _agent_faults(f"conversations[{index}].agents.{name}", cast, limits)


def _agent_faults(place: str, agent: object, limits: Limits) -> Iterator[Fault]:
    choices = _part(_part(agent, "validation", dict), "choices", list)
    yield from too_many(f"{place}.validation.choices", "choices", len(choices), limits.choices)
    chars = sum(len(choice) for choice in choices if isinstance(choice, str))
    if chars > CHOICE_CHARS * limits.choices:
        message = f"{chars} characters of choices are more than {CHOICE_CHARS} x limits.choices = {limits.choices}"
        yield Fault(path=f"{place}.validation.choices", message=message)
    yield from tool_faults(place, sum(len(_part(agent, key, list)) for key in ("tools", "exit_tools")), limits)
    for key in ("visible_to", "speak_after_within_round"):
        yield from too_many(f"{place}.{key}", "agents", len(_part(agent, key, list)), limits.agents)


def _metadata_faults(place: str, holder: object, limits: Limits) -> Iterator[Fault]:
    given = holder.get("metadata") if isinstance(holder, dict) else None
    size = len(msgspec.json.encode(given)) if given else 0
    if size > limits.metadata:
        yield Fault(path=place, message=f"{size} bytes are more than limits.metadata = {limits.metadata}")


def _part(holder: object, key: str, kind: type[P]) -> P:
    """Return a part of a document; an empty one if it is missing or of another kind."""
    given = holder.get(key) if isinstance(holder, dict) else None
    return given if isinstance(given, kind) else kind()


def too_many(path: str, what: str, asked: int, limit: int) -> Iterator[Fault]:
    """Yield the fault of a number above its limit."""
    if asked > limit:
        yield Fault(path=path, message=f"{asked} {what} are more than limits.{what} = {limit}")
