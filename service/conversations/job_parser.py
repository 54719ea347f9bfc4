"""A job from its document, or the whole list of what is wrong with it.

Source: specification, "Job documents" and "Refused jobs".
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Final

import msgspec
from msgspec.structs import replace
from pydantic import ValidationError

from service.conversations.job import Agent, Conversation, Job, JobId, Webhook
from service.conversations.job_faults import FIXED_PARAMS, JobRules, filled_faults, limit_faults, meaning_faults
from service.conversations.limits import Limits, metadata_faults, posted_agents, size_faults, until_patterns
from service.conversations.memory import SELF, Memory, Summary
from service.conversations.spec import (
    AgentSpec,
    CastSpec,
    ConditionSpec,
    ConversationSpec,
    JobSpec,
    MemorySpec,
    ValidationSpec,
    cast_specs,
    is_tool_reference,
)
from service.conversations.until import Condition
from service.conversations.validation import Validation, folded
from service.conversations.variables import fill, written
from service.conversations.wording import Phrases
from service.errors import Fault, InvalidJob
from service.formats.faults import faults_of
from workers.requests.request import parse_tools
from workers.tools.definition import ToolDefinition
from workers.tools.schemas import CHECK_LIMIT_S, find_troubles, trusting

CONTROLS: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
MAX_FAULTS: Final = 100  # told of one job; a person reads the first few, a program the code


def parse_stored(text: str, job_id: JobId, adapters: Mapping[str, str]) -> Job:
    """Return a stored job as it was accepted, whatever the configuration says by now but of ``adapters``."""
    document = _as_accepted_now(msgspec.json.decode(text))
    casts = [given for conversation in document["conversations"] for given in conversation.get("agents", {}).values()]
    models = {agent["model"] for agent in chain(document["agents"], casts) if "model" in agent}
    webhook = document.get("webhook") or {}
    most = 2**62
    anything = Limits(**dict.fromkeys(Limits.model_fields, most))
    secrets = {webhook["secret"]} if webhook.get("secret") else ()
    rules = JobRules(models=models, adapters=adapters, limits=anything, webhook_hosts=None, webhook_secrets=secrets)
    with trusting():
        return parse_job(document, job_id, rules)


def _as_accepted_now(document: dict[str, Any]) -> dict[str, Any]:
    """Take out of a stored job what older versions accepted and this one refuses."""
    for agent in document["agents"]:
        if agent.get("params"):
            agent["params"] = {key: value for key, value in agent["params"].items() if key not in FIXED_PARAMS}
    if isinstance(document.get("name"), str):
        document["name"] = CONTROLS.sub(" ", document["name"])
    return document


async def check_schemas(document: object, limits: Limits, *, is_small: bool) -> None:
    """Find out what is wrong with the schemas and patterns of a job, so that ``parse_job`` knows it at once.

    Raises:
        InvalidJob: there is too much of something, or it takes too long.
        OffloadCrowded: too many wait for that already.
    """
    if isinstance(document, dict):
        _refuse(size_faults(document, limits))
    schemas: list[dict[str, object]] = []
    patterns = list(until_patterns(document)) if isinstance(document, dict) else []
    for _, agent in posted_agents(document) if isinstance(document, dict) else ():
        validation = agent.get("validation")
        if isinstance(validation, dict):
            schemas += [given for given in (validation.get("json_schema"),) if isinstance(given, dict)]
            patterns += [given for given in (validation.get("pattern"),) if isinstance(given, str)]
        tools = (each for key in ("tools", "exit_tools") if isinstance(agent.get(key), list) for each in agent[key])
        functions = (tool.get("function") for tool in tools if isinstance(tool, dict))
        parameters = (each.get("parameters") for each in functions if isinstance(each, dict))
        schemas += [given for given in parameters if isinstance(given, dict)]
    try:
        await find_troubles(schemas, patterns, is_small=is_small)
    except TimeoutError as error:
        message = f"its schemas take longer than {CHECK_LIMIT_S:g} s to check"
        raise InvalidJob([Fault(path="agents", message=message)]) from error


def parse_job(document: object, job_id: JobId, rules: JobRules) -> Job:
    """Return the job that ``document`` (decoded JSON or YAML) describes.

    Raises:
        InvalidJob: with every fault that was found.
    """
    limits = rules.limits
    if not isinstance(document, dict):
        raise InvalidJob([Fault(path="", message="a job is an object with agents and conversations")])
    if isinstance(document.get("conversations"), dict):
        message = "a list; a file of them is read by the command line and by roundhouse_client.load_job"
        raise InvalidJob([Fault(path="conversations", message=message)])
    # Sizes come first: what is too large is not looked at any further, since looking is what costs.
    _refuse(chain(size_faults(document, limits), metadata_faults(document, limits)))
    try:
        spec = JobSpec.model_validate(document)
    except ValidationError as error:
        raise InvalidJob(faults_of(error, JobSpec)[:MAX_FAULTS]) from error
    _refuse(filled_faults(spec, limits))
    conversations = _conversations(spec)
    _refuse(chain(limit_faults(spec, conversations, limits), meaning_faults(spec, conversations, rules)))
    agents = tuple(_agent(agent, rules.adapters, spec.memory) for agent in spec.agents)
    casts = [conversation for conversation in spec.conversations if conversation.agents]
    return Job(
        id=job_id,
        name=spec.name,
        agents=agents,
        conversations=tuple(_cast(spec, agents, conversations, rules.adapters)) if casts else conversations,
        mode=spec.mode,
        leader=spec.leader,
        prompt_at=spec.prompt_at,
        priority=spec.priority,
        system=spec.system,
        view=spec.view,
        prompts=Phrases(**spec.prompts.model_dump()),
        metadata=spec.metadata,
        webhook=None if spec.webhook is None else Webhook(url=str(spec.webhook.url), secret=spec.webhook.secret),
    )


def _refuse(faults: Iterator[Fault]) -> None:
    shown = list(islice(faults, MAX_FAULTS))
    if shown:
        raise InvalidJob(shown)


def _agent(spec: AgentSpec, adapters: Mapping[str, str], memory: MemorySpec | None) -> Agent:
    return Agent(
        id=spec.id,
        role=spec.role,
        **_model(spec, adapters),
        system=spec.system,
        params=spec.params,
        visible_to=None if spec.visible_to is None else frozenset(spec.visible_to),
        waits_for=frozenset(spec.speak_after_within_round),
        validation=_validation(spec.validation),
        markup=spec.markup,
        tools=_tools(spec),
        exit_tools=parse_tools(spec.exit_tools),
        on_failure=spec.on_failure,
        by=spec.by,
        wait_s=spec.wait_s,
        otherwise=spec.otherwise,
        memory=_memory(spec.memory or memory),
    )


def _memory(spec: MemorySpec | None) -> Memory | None:
    if spec is None or spec.keep == "all":
        return None
    given, summary = spec.summary, None
    if given is not None:
        by = None if given.by == SELF else given.by
        summary = Summary(by=by, max_tokens=given.max_tokens, prompt=given.prompt)
    if spec.keep == "auto":
        return Memory(summary=summary)
    return Memory(rounds=spec.keep.rounds, tokens=spec.keep.tokens, summary=summary)


def _model(spec: AgentSpec, adapters: Mapping[str, str]) -> dict[str, Any]:
    return {
        "model": adapters.get(spec.model, spec.model),
        "adapter": spec.model if spec.model in adapters else None,
    }


def _tools(spec: AgentSpec) -> tuple[ToolDefinition, ...]:
    return parse_tools([tool for tool in spec.tools if not is_tool_reference(tool)])


def _cast(
    spec: JobSpec, agents: Sequence[Agent], conversations: Sequence[Conversation], adapters: Mapping[str, str]
) -> Iterator[Conversation]:
    """Yield the conversations, each with the agents that differ in it."""
    own = {agent.id: agent for agent in agents}
    for conversation, given in zip(conversations, spec.conversations, strict=True):
        if given.agents:
            pairs = ((own[agent.id], given.agents[agent.id], agent) for agent in cast_specs(spec, given))
            cast = {agent.id: replace(agent, **_differences(cast, after, adapters)) for agent, cast, after in pairs}
            yield replace(conversation, cast=cast)
        else:
            yield conversation


def _differences(given: CastSpec, agent: AgentSpec, adapters: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the fields of an agent that ``given``, which was applied to it, sets."""
    fields: dict[str, Any] = {name: getattr(agent, name) for name in given.model_fields_set & {"system", "params"}}
    if "tools" in given.model_fields_set:
        fields["tools"] = _tools(agent)
    if "validation" in given.model_fields_set:
        fields["validation"] = _validation(agent.validation)
    return {**fields, **(_model(agent, adapters) if "model" in given.model_fields_set else {})}


def _validation(spec: ValidationSpec | None) -> Validation | None:
    if spec is None:
        return None
    return Validation(
        retries=spec.retries,
        is_constrained=spec.constrain == "auto",
        choices=tuple(spec.choices or ()),
        pattern=spec.pattern,
        json_schema=spec.json_schema,
        schema_chars=len(json.dumps(spec.json_schema)) if spec.json_schema is not None else 0,
    )


def _condition(spec: ConditionSpec) -> Condition:
    return Condition(
        agent=spec.agent,
        says=tuple(map(folded, spec.says or ())),
        matches=spec.matches,
        field=spec.field,
        equals=spec.equals,
        signal=spec.signal,
        agree=tuple(spec.agree or ()),
        unchanged=spec.unchanged,
        answer_tokens=spec.answer_tokens,
    )


def _conversations(spec: JobSpec) -> tuple[Conversation, ...]:
    common = tuple(map(_condition, spec.until))  # one value for all of them
    return tuple(
        Conversation(
            id=f"c{index}" if given.id is None else given.id,
            prompt=fill(given.prompt or "", variables),
            rounds=spec.rounds if given.rounds is None else given.rounds,
            variables=variables,
            until=common if given.until is None else tuple(map(_condition, given.until)),
            is_pinned=given.weights == "pinned",
            metadata=given.metadata,
        )
        for index, given in enumerate(spec.conversations)
        for variables in [_values(given)]
    )


def _values(spec: ConversationSpec) -> dict[str, str] | None:
    return None if spec.variables is None else {name: written(value) for name, value in spec.variables.items()}
