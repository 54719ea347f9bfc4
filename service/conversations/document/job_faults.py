"""The faults of a job's meaning: unknown names, endless waits, conditions that never hold.

Source: specification, "Refused jobs".
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from graphlib import CycleError, TopologicalSorter
from typing import Final

import msgspec

from service.conversations.document.condition_faults import condition_faults
from service.conversations.document.limits import Limits, too_many
from service.conversations.document.memory_faults import memory_faults
from service.conversations.document.record_faults import record_faults
from service.conversations.document.spec import (
    REFERENCES,
    AgentSpec,
    JobSpec,
    OverWeightsSpec,
    ValidationSpec,
    cast_specs,
    is_tool_reference,
    reference_of,
)
from service.conversations.document.vain_faults import vain_faults
from service.conversations.document.variable_faults import fault_of_words, variable_faults
from service.conversations.job.job import END, Conversation, Mode, OnFailure, SpokenBy
from service.conversations.job.validation import folded
from service.conversations.job.variables import added_chars, count_names, names_in
from service.errors import Fault
from service.formats.faults import Checks, broken, unknown
from service.formats.hosts import canonical_host
from workers.errors import InvalidTool
from workers.policy.params import param_faults
from workers.tools.definition import ToolDefinition

MOST_SAID: Final = 64 * 1024  # bytes of a caller's words in a turn
CALLERS_ALONE: Final = frozenset({"wait_s", "otherwise"})
MODELS_ALONE: Final = frozenset({"model", "params", "system", "tools", "exit_tools", "markup", "memory", "record"})
LEADERS_ANSWER: Final = "a leader's answer is the name of an agent, or end"


class JobRules(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of a job here: models, sizes, and the hosts of its webhook.

    ``adapters`` holds the names that agents may use as models, with their base models. ``webhook_hosts`` None means any
    host. An idempotency key is in force for ``key_s`` seconds. ``servers`` holds the MCP servers of each model of this
    node, ``untold`` the models whose BIOS has no place for ``prompts.context``. ``unable`` says why models cannot
    record tokens, ``rewards`` names the callables that give rewards.
    """

    models: Collection[str]
    adapters: Mapping[str, str] = msgspec.field(default_factory=dict)
    limits: Limits
    webhook_hosts: Collection[str] | None = ()
    webhook_secrets: Collection[str] = ()
    key_s: float = 86_400.0
    servers: Mapping[str, Collection[str]] = msgspec.field(default_factory=dict)
    untold: Collection[str] = ()
    unable: Mapping[str, str] = msgspec.field(default_factory=dict)
    rewards: Collection[str] = ()


def filled_faults(spec: JobSpec, limits: Limits) -> Iterator[Fault]:
    """Yield missing prompts, and texts that would be too long with their variables, before any is filled in."""
    systems: Counter[str] = sum(
        (count_names(text) for text in (spec.system, *(each.system for each in spec.agents))), Counter()
    )
    prompts = 0
    for index, given in enumerate(spec.conversations):
        if given.prompt is None and given.source is None:
            yield Fault(path=f"conversations[{index}].prompt", message="is required")
        if given.variables is None:
            continue
        prompts += added_chars(count_names(given.prompt or ""), given.variables)
        cast = (count_names(each.system) for each in given.agents.values())
        own = added_chars(sum(cast, systems), given.variables)
        if max(prompts, own) > limits.body_bytes:
            message = f"its texts would get longer by more than limits.body_bytes = {limits.body_bytes} characters"
            yield Fault(path=f"conversations[{index}].variables", message=message)
            return


def meaning_faults(spec: JobSpec, conversations: tuple[Conversation, ...], rules: JobRules) -> Iterator[Fault]:
    """Yield unknown names in a job, and demands that cannot be met."""
    models = (*rules.models, *rules.adapters)
    yield from _agent_faults(spec)
    for index, agent in enumerate(spec.agents):
        yield from _own_faults(f"agents[{index}]", agent, AgentSpec.model_fields, models)
    if all(agent.by is SpokenBy.CALLER for agent in spec.agents):
        yield Fault(path="agents", message="at least one agent has to be asked of a model")
    yield from vain_faults(spec, rules.adapters, rules.servers, rules.untold)
    yield from memory_faults(spec)
    yield from record_faults(spec, rules.adapters, rules.unable, rules.rewards)
    yield from _cast_faults(spec, models)
    yield from _cycle_faults(spec)
    yield from _mode_faults(spec)
    if spec.mode is Mode.LED:
        yield from _led_faults(spec)
    yield from _conversation_faults(conversations)
    for index, given in enumerate(spec.conversations):
        if given.prompt is not None and not given.prompt.strip() and given.source is None:
            yield Fault(path=f"conversations[{index}].prompt", message="is blank")
    yield from condition_faults(spec, conversations)
    yield from variable_faults(spec)
    yield from _webhook_faults(spec, rules)


def _agent_faults(spec: JobSpec) -> Iterator[Fault]:
    ids: dict[str, int] = {}
    for index, agent in enumerate(spec.agents):
        ids.setdefault(agent.id, index)
    for index, agent in enumerate(spec.agents):
        place = f"agents[{index}]"
        if ids[agent.id] != index:
            yield Fault(path=f"{place}.id", message=f"{agent.id!r} is the id of agents[{ids[agent.id]}] already")
        named = {"visible_to": agent.visible_to or [], "speak_after_within_round": agent.speak_after_within_round}
        for key, others in named.items():
            for position, other in enumerate(others):
                if other not in ids:
                    yield Fault(path=f"{place}.{key}[{position}]", message=unknown("agent", other, ids))


def _own_faults(place: str, agent: AgentSpec, given: Collection[str], models: Collection[str]) -> Iterator[Fault]:
    """Yield the faults of one agent alone, in its ``given`` fields."""
    if agent.by is SpokenBy.CALLER:
        yield from _caller_faults(place, agent, given)
        return
    yield from _model_faults(place, agent, given, models)
    if "tools" in given:
        yield from _tool_faults(place, agent)


@broken
def _model_faults(place: str, agent: AgentSpec, given: Collection[str], models: Collection[str]) -> Checks:
    is_whole, has_model = "by" in given, "model" in agent.model_fields_set
    for key in sorted(CALLERS_ALONE & agent.model_fields_set):
        yield is_whole, f"{place}.{key}", "only an agent with by: caller is waited for"
    yield is_whole and not has_model, f"{place}.model", "is required"
    is_unknown = has_model and "model" in given and agent.model not in models
    yield is_unknown, f"{place}.model", partial(unknown, "model", agent.model, models)
    for key, message in param_faults(agent.params) if "params" in given else ():
        yield True, f"{place}.params.{key}", message


@broken
def _caller_faults(place: str, agent: AgentSpec, given: Collection[str]) -> Checks:
    """Yield fields without effect for an agent that a caller speaks for, and words that it could never say."""
    for key in sorted(MODELS_ALONE & agent.model_fields_set & set(given)):
        yield True, f"{place}.{key}", "an agent with by: caller is asked of no model"
    if agent.otherwise is not None:
        path = f"{place}.otherwise"
        yield agent.wait_s is None, path, "wants wait_s beside it: without that it is never said"
        for fault in said_faults(agent.otherwise):
            yield True, path, fault
        unfit = _fault_of_otherwise(agent.otherwise, agent.validation)
        yield unfit is not None, path, str(unfit)


def _fault_of_otherwise(words: str, given: ValidationSpec | None) -> str | None:
    """Return the fault of ``otherwise``; if it or the choices have variables, it is judged later, once filled in."""
    if given is None or any(name for text in (words, *(given.choices or ())) for name in names_in(text)):
        return None
    return fault_of_words(given, tuple(given.choices or ()), words)


def said_faults(text: str) -> Iterator[str]:
    """Yield the reasons why a caller cannot say a text."""
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MOST_SAID:
        yield f"{size} bytes are more than {MOST_SAID}"


@broken
def _tool_faults(of: str, agent: AgentSpec) -> Checks:
    seen: set[str] = set()
    for key, documents in (("exit_tools", agent.exit_tools), ("tools", agent.tools)):
        for position, document in enumerate(documents):
            place = f"{of}.{key}[{position}]"
            if is_tool_reference(document):
                yield key == "exit_tools" or reference_of(document) is None, place, REFERENCES
                continue
            try:
                tool = ToolDefinition.parse(document)
            except InvalidTool as error:
                yield True, place, str(error)
                continue
            yield tool.name in seen, place, f"this agent has a tool {tool.name!r} already"
            seen.add(tool.name)


def _cast_faults(spec: JobSpec, models: Collection[str]) -> Iterator[Fault]:
    """Yield the faults of agents that differ in single conversations."""
    names = [agent.id for agent in spec.agents]
    for index, conversation in enumerate(spec.conversations):
        if not conversation.agents:
            continue
        place = f"conversations[{index}].agents"
        for name in conversation.agents:
            if name not in names:
                yield Fault(path=f"{place}.{name}", message=unknown("agent", name, names))
        for agent in cast_specs(spec, conversation):
            given = conversation.agents[agent.id].model_fields_set
            yield from _own_faults(f"{place}.{agent.id}", agent, given, models)
            if agent.id == spec.leader and agent.validation is not None and "validation" in given:
                yield Fault(path=f"{place}.{agent.id}.validation", message=LEADERS_ANSWER)


def _cycle_faults(spec: JobSpec) -> Iterator[Fault]:
    waits: dict[str, list[str]] = {}
    for agent in spec.agents:  # a repeated id is a fault of its own, and must not hide a cycle
        waits.setdefault(agent.id, []).extend(agent.speak_after_within_round)
    cycle = find_cycle(waits)
    if cycle:
        index = [agent.id for agent in spec.agents].index(cycle[0])
        yield Fault(
            path=f"agents[{index}].speak_after_within_round",
            message=f"a cycle, in which no agent could ever speak: {' waits for '.join((*cycle, cycle[0]))}",
        )


@broken
def _mode_faults(spec: JobSpec) -> Checks:
    is_free, is_stray = spec.mode is Mode.FREE, spec.mode is not Mode.LED and spec.leader is not None
    is_vain = not is_free and "prompt_at" in spec.model_fields_set
    yield is_vain, "prompt_at", "only mode: free has it; in others a prompt is made when its turn starts"
    yield is_stray, "leader", "only mode: led has one"
    is_over = isinstance(spec.continuation, OverWeightsSpec)
    for index, conversation in enumerate(spec.conversations):
        why = f"conversations[{index}].weights: pinned keeps one version of the weights"
        yield is_over and conversation.weights is not None, "continuation.over_weights", why
    message = "in mode: free there is no round to wait in; the order of the agents is the order of the queue"
    for index, agent in enumerate(spec.agents):
        yield is_free and agent.speak_after_within_round, f"agents[{index}].speak_after_within_round", message


@broken
def _led_faults(spec: JobSpec) -> Checks:
    names = [agent.id for agent in spec.agents]
    yield spec.leader is None, "leader", "mode: led wants a leader"
    is_unknown = spec.leader is not None and spec.leader not in names
    yield is_unknown, "leader", partial(unknown, "agent", str(spec.leader), names)
    yield names == names[:1], "agents", "the leader has nobody to name"
    seen = {END: "what a leader says that wants no more of the conversation"}
    for index, agent in enumerate(spec.agents):
        place, name, leads = f"agents[{index}]", folded(agent.id), agent.id == spec.leader
        first = seen.setdefault(name, f"the id of agents[{index}]")
        is_taken = first != f"the id of agents[{index}]" and agent.id not in names[:index]
        yield is_taken, f"{place}.id", f"letter case aside {agent.id!r} is {first}"
        message = "in mode: led the leader names who speaks; there is nobody else to wait for"
        yield agent.speak_after_within_round, f"{place}.speak_after_within_round", message
        yield leads and agent.by is SpokenBy.CALLER, f"{place}.by", "a leader is asked of a model"
        yield leads and agent.validation is not None, f"{place}.validation", LEADERS_ANSWER
        goes_on = agent.on_failure is not OnFailure.END
        yield leads and goes_on, f"{place}.on_failure", "nobody goes on without the leader"


def _conversation_faults(conversations: tuple[Conversation, ...]) -> Iterator[Fault]:
    seen: dict[str, int] = {}
    for index, conversation in enumerate(conversations):
        first = seen.setdefault(conversation.id, index)
        if first != index:
            yield Fault(
                path=f"conversations[{index}].id",
                message=f"{conversation.id!r} is the id of conversations[{first}] already",
            )


@broken
def _webhook_faults(spec: JobSpec, rules: JobRules) -> Checks:
    if spec.webhook is None:
        return
    url, secret, hosts = spec.webhook.url, spec.webhook.secret, rules.webhook_hosts
    is_strange = hosts is not None and _canonical(url.host or "") not in hosts
    yield is_strange, "webhook.url", f"{url.host} is not one of webhooks.hosts: {', '.join(hosts or ()) or 'none'}"
    has_password = url.username or url.password
    yield has_password, "webhook.url", "must not hold a password; the message is signed with a secret"
    is_unknown = secret is not None and secret not in rules.webhook_secrets
    yield is_unknown, "webhook.secret", partial(unknown, "secret", str(secret), rules.webhook_secrets)


def _canonical(host: str) -> str | None:
    try:
        return canonical_host(host)
    except ValueError:
        return None


def limit_faults(spec: JobSpec, conversations: tuple[Conversation, ...], limits: Limits) -> Iterator[Fault]:
    """Yield the limits that the rounds and turns of a job exceed."""
    rounds = max(conversation.rounds for conversation in conversations)
    speakers = 2 if spec.mode is Mode.LED else len(spec.agents)  # turns per round
    turns = speakers * sum(conversation.rounds for conversation in conversations)
    yield from too_many("rounds", "rounds", rounds, limits.rounds)
    yield from too_many("", "turns", turns, limits.turns)


def find_cycle(waits: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    """Return one cycle of ``waits``, which maps each name to the names it waits for; () without a cycle."""
    try:
        TopologicalSorter({name: set(others) & waits.keys() for name, others in waits.items()}).prepare()
    except CycleError as error:
        awaited_first: list[str] = error.args[1]
        return tuple(reversed(awaited_first[1:]))
    return ()
