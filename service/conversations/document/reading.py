"""Reads a posted document once: its sizes, then its form, with all schemas and patterns checked.

Source: specification, "Job documents" and "Refused jobs".
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, Final, Protocol, TypeVar

import msgspec
from pydantic import ValidationError

from service.conversations.document.limits import Limits, size_faults, tool_faults
from service.conversations.document.spec import AgentSpec, CastSpec, ConversationSpec, JobSpec, agents_of
from service.errors import Fault, InvalidJob
from service.formats.faults import StrictModel, faults_of
from workers.errors import InvalidTool
from workers.tools.definition import ToolDefinition
from workers.tools.schemas import CHECK_LIMIT_S, Asked, find_troubles, postponing

MAX_FAULTS: Final = 100  # faults reported for one job; a person reads the first few, a program the code
T = TypeVar("T")


class Handle(Protocol):
    """Calls a function that may take long for a large document, without blocking the event loop."""

    async def __call__(self, function: Callable[..., T], *arguments: object) -> T:
        """Return the function's value for its arguments."""


async def read_document(document: object, limits: Limits, handle: Handle) -> JobSpec:
    """Return the form of a posted document; another process checks its schemas and patterns.

    Raises:
        InvalidJob: it is too large, its form is wrong, or its schemas take too long to check.
        OffloadCrowded: too many checks are waiting.
    """
    spec, asked = await handle(_read, document, limits)
    if await _has_troubles(asked) or spec is None:
        return await handle(read_spec, document, limits)  # each trouble is known now, and is refused with its place
    return spec


def read_spec(document: object, limits: Limits) -> JobSpec:
    """Return the form of a document (decoded JSON or YAML).

    Raises:
        InvalidJob: it is too large, or its form is wrong.
    """
    if not isinstance(document, dict):
        raise InvalidJob([Fault(path="", message="a job is an object with agents and conversations")])
    if isinstance(document.get("conversations"), dict):
        message = "a list; a file of them is read by the command line and by roundhouse_client.load_job"
        raise InvalidJob([Fault(path="conversations", message=message)])
    refuse(size_faults(document, limits))
    return spec_of(document)


def spec_of(document: object) -> JobSpec:
    """Return the form of a document of any size.

    Raises:
        InvalidJob: its form is wrong.
    """
    try:
        return JobSpec.model_validate(document)
    except ValidationError as error:
        raise InvalidJob(faults_of(error, JobSpec)[:MAX_FAULTS]) from error


def read_stored(text: str) -> JobSpec:
    """Return the form of a stored document; its schemas were checked when it was posted.

    Raises:
        InvalidJob: another version stored it that accepts more.
    """
    with postponing():
        return spec_of(msgspec.json.decode(text))


def refuse(faults: Iterable[Fault]) -> None:
    """Refuse a job with any faults.

    Raises:
        InvalidJob: with the first of them.
    """
    shown = list(islice(faults, MAX_FAULTS))
    if shown:
        raise InvalidJob(shown)


async def check_tools(spec: JobSpec, limits: Limits, handle: Handle) -> None:
    """Check the number of each agent's tools, and their schemas in another process.

    Raises:
        InvalidJob: an agent has too many tools, or the schemas take too long to check.
        OffloadCrowded: too many checks are waiting.
    """
    for place, agent in agents_of(spec):
        refuse(tool_faults(place, len(_tools(agent)), limits))
    await _has_troubles(await handle(_asked_of_tools, spec))


def rewritten(document: Mapping[str, Any], before: JobSpec, after: JobSpec) -> dict[str, object]:
    """Return a document with the differences of its form ``before`` and ``after`` in agents and conversations.

    Everything else stays as its author wrote it, in the author's order.
    """
    agents = zip(document["agents"], before.agents, after.agents, strict=True)
    conversations = zip(document["conversations"], before.conversations, after.conversations, strict=True)
    return {
        **document,
        "agents": [_changed(*agent) for agent in agents],
        "conversations": [_changed_conversation(*conversation) for conversation in conversations],
    }


def _changed_conversation(
    given: Mapping[str, Any], before: ConversationSpec, after: ConversationSpec
) -> Mapping[str, object]:
    changed = _changed(given, before, after)
    if after.agents is before.agents:
        return changed
    casts = {name: _changed(given["agents"][name], cast, after.agents[name]) for name, cast in before.agents.items()}
    return {**changed, "agents": casts}


def _changed(given: Mapping[str, Any], before: StrictModel, after: StrictModel) -> Mapping[str, object]:
    fields = ((name, getattr(after, name)) for name in type(after).model_fields)
    changes = {name: value for name, value in fields if value is not getattr(before, name)}
    return {**given, **changes} if changes else given


def _read(document: object, limits: Limits) -> tuple[JobSpec | None, Asked]:
    """Return a document's form, None if it is wrong, and the schemas and patterns to check before a refusal."""
    with postponing() as asked:
        try:
            spec = read_spec(document, limits)
        except InvalidJob:
            if not asked:
                raise
            return None, asked
    return spec, asked | _asked_of_tools(spec)


def _asked_of_tools(spec: JobSpec) -> Asked:
    with postponing() as asked:
        for _, agent in agents_of(spec):
            for tool in _tools(agent):
                with suppress(InvalidTool):  # a fault that is reported with the others
                    ToolDefinition.parse(tool)
    return asked


def _tools(agent: AgentSpec | CastSpec) -> list[object]:
    return [*agent.tools, *(agent.exit_tools if isinstance(agent, AgentSpec) else ())]


async def _has_troubles(asked: Asked) -> bool:
    try:
        return await find_troubles(asked)
    except TimeoutError as error:
        message = f"its schemas take longer than {CHECK_LIMIT_S:g} s to check"
        raise InvalidJob([Fault(path="agents", message=message)]) from error
