"""Makes a job from its document, or lists all faults of its meaning.

Source: specification, "Job documents" and "Refused jobs".
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from msgspec.structs import replace

from service.conversations.document.job_faults import JobRules, filled_faults, limit_faults, meaning_faults
from service.conversations.document.reading import read_spec, read_stored, refuse
from service.conversations.document.spec import (
    AgentSpec,
    CastSpec,
    ConditionSpec,
    ConversationSpec,
    JobSpec,
    MemorySpec,
    OverWeightsSpec,
    RecordSpec,
    ValidationSpec,
    cast_specs,
    is_tool_reference,
)
from service.conversations.job.job import Agent, Conversation, Job, JobId, SpokenBy, Webhook
from service.conversations.job.memory import SELF, Memory, Summary
from service.conversations.job.until import Condition, Until
from service.conversations.job.validation import Validation, folded
from service.conversations.job.variables import fill, written
from service.conversations.job.wording import Phrases
from transport.answer_bound import laid_over
from transport.request import TokenDetail
from workers.policy.continuation import Continuation
from workers.requests.request import parse_tools
from workers.tools.definition import ToolDefinition
from workers.tools.schemas import postponing


def parse_job(document: object, job_id: JobId, rules: JobRules) -> Job:
    """Return the job that ``document`` (decoded JSON or YAML) describes.

    Raises:
        InvalidJob: with all its faults.
    """
    return make_job(read_spec(document, rules.limits), job_id, rules)


def parse_stored(text: str, job_id: JobId, adapters: Mapping[str, str]) -> Job:
    """Return a stored job as it was accepted; of the present configuration only ``adapters`` count."""
    return accepted_job(read_stored(text), job_id, adapters)


def make_job(spec: JobSpec, job_id: JobId, rules: JobRules) -> Job:
    """Return the job that a document describes.

    Raises:
        InvalidJob: with all faults of its meaning.
    """
    refuse(filled_faults(spec, rules.limits))
    conversations = _conversations(spec)
    refuse(chain(limit_faults(spec, conversations, rules.limits), meaning_faults(spec, conversations, rules)))
    return _job(spec, conversations, job_id, rules.adapters)


def accepted_job(spec: JobSpec, job_id: JobId, adapters: Mapping[str, str]) -> Job:
    """Return the job of a document that was accepted before; ``adapters`` maps names of adapters to base models."""
    with postponing():
        return _job(spec, _conversations(spec), job_id, adapters)


def _job(spec: JobSpec, conversations: tuple[Conversation, ...], job_id: JobId, adapters: Mapping[str, str]) -> Job:
    agents = tuple(_agent(agent, adapters, spec) for agent in spec.agents)
    are_cast = any(given.agents or given.variables or given.sample for given in spec.conversations)
    return Job(
        id=job_id,
        name=spec.name,
        agents=agents,
        conversations=tuple(_cast(spec, agents, conversations, adapters)) if are_cast else conversations,
        mode=spec.mode,
        leader=spec.leader,
        prompt_at=spec.prompt_at,
        priority=spec.priority,
        system=spec.system,
        view=spec.view,
        continuation=None if spec.continuation is None else _continuation(spec.continuation),
        prompts=Phrases(**spec.prompts.model_dump()),
        metadata=spec.metadata,
        webhook=None if spec.webhook is None else Webhook(url=str(spec.webhook.url), secret=spec.webhook.secret),
    )


def _continuation(given: str | OverWeightsSpec) -> Continuation:
    return Continuation.OVER_WEIGHTS if isinstance(given, OverWeightsSpec) else Continuation(given)


def _agent(spec: AgentSpec, adapters: Mapping[str, str], job: JobSpec) -> Agent:
    return Agent(
        id=spec.id,
        role=spec.role,
        **_model(spec, adapters),
        system=spec.system,
        params=laid_over({}, spec.params),
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
        memory=_memory(spec.memory or job.memory),
        record=None if spec.by is SpokenBy.CALLER else _record(spec.record or job.record),
    )


def _record(spec: RecordSpec | None) -> TokenDetail | None:
    if spec is None or not spec.tokens:
        return None
    return TokenDetail.LOGPROBS if spec.logprobs else TokenDetail.IDS


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
    """Yield the conversations with their agents that differ."""
    own = {agent.id: agent for agent in agents}
    for conversation, given in zip(conversations, spec.conversations, strict=True):
        pairs = ((own[agent.id], given.agents[agent.id], agent) for agent in cast_specs(spec, given))
        cast = {agent.id: replace(agent, **_differences(cast, after, adapters)) for agent, cast, after in pairs}
        filled = ((agent.id, _filled(cast.get(agent.id, agent), conversation.variables)) for agent in agents)
        cast |= {name: agent for name, agent in filled if agent is not cast.get(name, own[name])}
        if given.sample is not None and given.sample.number:
            cast |= _sampled({**own, **cast}.values(), given.sample.number)
        yield replace(conversation, cast=cast) if cast else conversation


def _sampled(agents: Iterable[Agent], number: int) -> dict[str, Agent]:
    """Return the agents with a seed, each with that of a sample."""
    seeds = {agent.id: (agent, agent.params.get("seed")) for agent in agents}
    return {
        name: replace(agent, params={**agent.params, "seed": seed + number})
        for name, (agent, seed) in seeds.items()
        if isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0
    }


def _filled(agent: Agent, variables: Mapping[str, str] | None) -> Agent:
    """Return an agent with a conversation's values in its role, its choices and its ``otherwise``.

    Its system is filled in when prompts are written.
    """
    texts = (agent.role, agent.otherwise or "", *(agent.validation.choices if agent.validation is not None else ()))
    if variables is None or not any("$" in text for text in texts):
        return agent
    validation = agent.validation
    if validation is not None and validation.choices:
        validation = replace(validation, choices=tuple(fill(choice, variables) for choice in validation.choices))
    otherwise = None if agent.otherwise is None else fill(agent.otherwise, variables)
    return replace(agent, role=fill(agent.role, variables), otherwise=otherwise, validation=validation)


def _differences(given: CastSpec, agent: AgentSpec, adapters: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the fields that ``given`` sets in ``agent``, which already has them."""
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


def _condition(spec: ConditionSpec, variables: Mapping[str, str] | None = None) -> Condition:
    return Condition(
        agent=spec.agent,
        says=tuple(folded(fill(words, variables)) for words in spec.says or ()),
        matches=spec.matches,
        field=spec.field,
        equals=spec.equals,
        signal=spec.signal,
        agree=tuple(spec.agree or ()),
        unchanged=spec.unchanged,
        answer_tokens=spec.answer_tokens,
    )


def _conversations(spec: JobSpec) -> tuple[Conversation, ...]:
    common = tuple(map(_condition, spec.until))  # one value that all conversations share
    ends_stale = spec.on_stale == "end"
    most = spec.max_staleness if ends_stale else None
    return tuple(
        Conversation(
            id=f"c{index}" if given.id is None else given.id,
            prompt=fill(given.prompt or "", variables),
            rounds=spec.rounds if given.rounds is None else given.rounds,
            variables=variables,
            until=common if given.until is None and not variables else _ends(spec, given, variables),
            is_pinned=given.weights == "pinned",
            stale_after=most if given.max_staleness is None or not ends_stale else given.max_staleness,
            metadata=given.metadata,
        )
        for index, given in enumerate(spec.conversations)
        for variables in [_values(given)]
    )


def _ends(spec: JobSpec, given: ConversationSpec, variables: Mapping[str, str] | None) -> Until:
    return tuple(_condition(each, variables) for each in (spec.until if given.until is None else given.until))


def _values(spec: ConversationSpec) -> dict[str, str] | None:
    return None if spec.variables is None else {name: written(value) for name, value in spec.variables.items()}
