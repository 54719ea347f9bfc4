"""A job from its document, or the whole list of what is wrong with it.

Source: specification, "Job documents" and "Refused jobs".
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import chain, islice
from typing import Any, Final

import msgspec
from pydantic import ValidationError

from service.conversations.job import Agent, Conversation, Job, JobId, Mode, Webhook
from service.conversations.limits import Limits, metadata_faults, size_faults, too_many
from service.conversations.spec import (
    REFERENCES,
    AgentSpec,
    JobSpec,
    ValidationSpec,
    is_tool_reference,
    is_wellformed_reference,
)
from service.conversations.validation import Validation
from service.conversations.wording import Phrases
from service.errors import Fault, InvalidJob
from service.formats.faults import faults_of, unknown
from service.formats.hosts import canonical_host
from workers.errors import InvalidTool
from workers.requests.request import parse_tools
from workers.tools.definition import ToolDefinition
from workers.tools.schemas import CHECK_LIMIT_S, find_troubles, trusting

ONE_ANSWER: Final = "a turn is one answer; each further one would take a slot unseen"
FIXED_PARAMS: Final[Mapping[str, tuple[int, str]]] = {  # parameters that may say one thing alone
    "n": (1, ONE_ANSWER),
    "n_cmpl": (1, ONE_ANSWER),  # llama.cpp's own name for it
    "id_slot": (-1, "which slot of an engine takes a turn is the engine's to say"),
}
CONTROLS: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
MAX_FAULTS: Final = 100  # told of one job; a person reads the first few, a program the code


class JobRules(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of a job here: models, sizes, and hosts that may be told of its end.

    ``adapters`` are names that agents may use as models, each with the model that it stands on. ``webhook_hosts`` None
    means any host; ``key_s`` is how long its idempotency key counts, in seconds.
    """

    models: Collection[str]
    adapters: Mapping[str, str] = msgspec.field(default_factory=dict)
    limits: Limits
    webhook_hosts: Collection[str] | None = ()
    webhook_secrets: Collection[str] = ()
    key_s: float = 86_400.0


def parse_stored(text: str, job_id: JobId, adapters: Mapping[str, str]) -> Job:
    """Return a stored job as it was accepted, whatever the configuration says by now but of ``adapters``."""
    document = _as_accepted_now(msgspec.json.decode(text))
    models = {agent["model"] for agent in document["agents"]}
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
        agent["params"] = {key: value for key, value in (agent.get("params") or {}).items() if key not in FIXED_PARAMS}
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
    patterns: list[str] = []
    agents = document.get("agents") if isinstance(document, dict) else None
    for agent in agents if isinstance(agents, list) else ():
        if not isinstance(agent, dict):
            continue
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
    # Sizes come first: what is too large is not looked at any further, since looking is what costs.
    _refuse(chain(size_faults(document, limits), metadata_faults(document, limits)))
    try:
        spec = JobSpec.model_validate(document)
    except ValidationError as error:
        raise InvalidJob(faults_of(error, JobSpec)[:MAX_FAULTS]) from error
    conversations = _conversations(spec)
    _refuse(
        chain(
            _limit_faults(spec, conversations, limits),
            _agent_faults(spec, (*rules.models, *rules.adapters)),
            _param_faults(spec),
            _tool_faults(spec),
            _cycle_faults(spec),
            _mode_faults(spec),
            _conversation_faults(conversations),
            _webhook_faults(spec, rules),
        )
    )
    return Job(
        id=job_id,
        name=spec.name,
        agents=tuple(_agent(agent, rules.adapters) for agent in spec.agents),
        conversations=conversations,
        mode=spec.mode,
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


def _agent(spec: AgentSpec, adapters: Mapping[str, str]) -> Agent:
    return Agent(
        id=spec.id,
        role=spec.role,
        model=adapters.get(spec.model, spec.model),
        adapter=spec.model if spec.model in adapters else None,
        system=spec.system,
        params=spec.params,
        visible_to=None if spec.visible_to is None else frozenset(spec.visible_to),
        waits_for=frozenset(spec.speak_after_within_round),
        validation=_validation(spec.validation),
        markup=spec.markup,
        tools=parse_tools([tool for tool in spec.tools if not is_tool_reference(tool)]),
        exit_tools=parse_tools(spec.exit_tools),
    )


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


def _conversations(spec: JobSpec) -> tuple[Conversation, ...]:
    return tuple(
        Conversation(
            id=f"c{index}" if given.id is None else given.id,
            prompt=given.prompt,
            rounds=spec.rounds if given.rounds is None else given.rounds,
            is_pinned=given.weights == "pinned",
            metadata=given.metadata,
        )
        for index, given in enumerate(spec.conversations)
    )


def _agent_faults(spec: JobSpec, models: Collection[str]) -> Iterator[Fault]:
    ids: dict[str, int] = {}
    for index, agent in enumerate(spec.agents):
        ids.setdefault(agent.id, index)
    for index, agent in enumerate(spec.agents):
        place = f"agents[{index}]"
        if ids[agent.id] != index:
            yield Fault(path=f"{place}.id", message=f"{agent.id!r} is the id of agents[{ids[agent.id]}] already")
        if agent.model not in models:
            yield Fault(path=f"{place}.model", message=unknown("model", agent.model, models))
        named = {"visible_to": agent.visible_to or [], "speak_after_within_round": agent.speak_after_within_round}
        for key, others in named.items():
            for position, other in enumerate(others):
                if other not in ids:
                    yield Fault(path=f"{place}.{key}[{position}]", message=unknown("agent", other, ids))


def _param_faults(spec: JobSpec) -> Iterator[Fault]:
    for index, agent in enumerate(spec.agents):
        for key, (harmless, message) in FIXED_PARAMS.items():
            if agent.params.get(key, harmless) not in (harmless, None):
                yield Fault(path=f"agents[{index}].params.{key}", message=message)


def _tool_faults(spec: JobSpec) -> Iterator[Fault]:
    for index, agent in enumerate(spec.agents):
        seen: set[str] = set()
        for key, documents in (("tools", agent.tools), ("exit_tools", agent.exit_tools)):
            for position, document in enumerate(documents):
                place = f"agents[{index}].{key}[{position}]"
                if is_tool_reference(document):
                    if key == "exit_tools" or not is_wellformed_reference(document):
                        yield Fault(path=place, message=REFERENCES)
                    continue
                try:
                    tool = ToolDefinition.parse(document)
                except InvalidTool as error:
                    yield Fault(path=place, message=str(error))
                    continue
                if tool.name in seen:
                    yield Fault(path=place, message=f"this agent has a tool {tool.name!r} already")
                seen.add(tool.name)


def _cycle_faults(spec: JobSpec) -> Iterator[Fault]:
    waits: dict[str, list[str]] = {}
    for agent in spec.agents:  # an id that is given twice is a fault of its own, and hides no cycle
        waits.setdefault(agent.id, []).extend(agent.speak_after_within_round)
    cycle = find_cycle(waits)
    if cycle:
        index = [agent.id for agent in spec.agents].index(cycle[0])
        yield Fault(
            path=f"agents[{index}].speak_after_within_round",
            message=f"a cycle, in which no agent could ever speak: {' waits for '.join((*cycle, cycle[0]))}",
        )


def _mode_faults(spec: JobSpec) -> Iterator[Fault]:
    if spec.mode is Mode.ROUNDS and "prompt_at" in spec.model_fields_set:
        yield Fault(path="prompt_at", message="only mode: free has it; in rounds a prompt is made when its turn starts")
    for index, agent in enumerate(spec.agents if spec.mode is Mode.FREE else ()):
        if agent.speak_after_within_round:
            message = "in mode: free there is no round to wait in; the order of the agents is the order of the queue"
            yield Fault(path=f"agents[{index}].speak_after_within_round", message=message)


def _conversation_faults(conversations: tuple[Conversation, ...]) -> Iterator[Fault]:
    seen: dict[str, int] = {}
    for index, conversation in enumerate(conversations):
        first = seen.setdefault(conversation.id, index)
        if first != index:
            yield Fault(
                path=f"conversations[{index}].id",
                message=f"{conversation.id!r} is the id of conversations[{first}] already",
            )


def _webhook_faults(spec: JobSpec, rules: JobRules) -> Iterator[Fault]:
    if spec.webhook is None:
        return
    host, secret = spec.webhook.url.host or "", spec.webhook.secret
    if rules.webhook_hosts is not None and _canonical(host) not in rules.webhook_hosts:
        known = ", ".join(rules.webhook_hosts) or "none"
        yield Fault(path="webhook.url", message=f"{host} is not one of webhooks.hosts: {known}")
    if spec.webhook.url.username or spec.webhook.url.password:
        yield Fault(path="webhook.url", message="must not hold a password; the message is signed with a secret")
    if secret is not None and secret not in rules.webhook_secrets:
        yield Fault(path="webhook.secret", message=unknown("secret", secret, rules.webhook_secrets))


def _canonical(host: str) -> str | None:
    try:
        return canonical_host(host)
    except ValueError:
        return None


def _limit_faults(spec: JobSpec, conversations: tuple[Conversation, ...], limits: Limits) -> Iterator[Fault]:
    rounds = max(conversation.rounds for conversation in conversations)
    turns = len(spec.agents) * sum(conversation.rounds for conversation in conversations)
    if rounds > limits.rounds:
        yield too_many("rounds", "rounds", rounds, limits.rounds)
    if turns > limits.turns:
        yield too_many("", "turns", turns, limits.turns)


def find_cycle(waits: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    """Return one cycle of ``waits`` (who waits for whom), or () where there is none."""
    try:
        TopologicalSorter({name: set(others) & waits.keys() for name, others in waits.items()}).prepare()
    except CycleError as error:
        awaited_first: list[str] = error.args[1]
        return tuple(reversed(awaited_first[1:]))
    return ()
