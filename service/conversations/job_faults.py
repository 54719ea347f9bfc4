"""The faults of a job's meaning: names that there are not, waits without an end, conditions that never hold.

Source: specification, "Refused jobs".
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Final

import msgspec

from service.conversations.condition_faults import condition_faults
from service.conversations.job import END, Conversation, Mode, OnFailure, SpokenBy
from service.conversations.limits import Limits, too_many
from service.conversations.memory_faults import memory_faults
from service.conversations.spec import (
    REFERENCES,
    AgentSpec,
    JobSpec,
    cast_specs,
    is_tool_reference,
    is_wellformed_reference,
)
from service.conversations.validation import Validation, folded
from service.conversations.variables import NAME, RESERVED, added_chars, count_names, names_in
from service.errors import Fault
from service.formats.faults import unknown
from service.formats.hosts import canonical_host
from workers.errors import InvalidTool
from workers.tools.definition import ToolDefinition

MOST_SAID: Final = 64 * 1024  # bytes that a caller says in a turn
CALLERS_ALONE: Final = frozenset({"wait_s", "otherwise"})
MODELS_ALONE: Final = frozenset({"model", "params", "system", "tools", "exit_tools", "markup", "memory"})
LEADERS_ANSWER: Final = "a leader's answer is the name of an agent, or end"
ONE_ANSWER: Final = "a turn is one answer; each further one would take a slot unseen"
FIXED_PARAMS: Final[Mapping[str, tuple[int, str]]] = {  # parameters that may say one thing alone
    "n": (1, ONE_ANSWER),
    "n_cmpl": (1, ONE_ANSWER),  # llama.cpp's own name for it
    "id_slot": (-1, "which slot of an engine takes a turn is the engine's to say"),
}


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


def filled_faults(spec: JobSpec, limits: Limits) -> Iterator[Fault]:
    """Yield which texts are not there, or too long once their variables are filled in; nothing is filled before."""
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
    """Yield what a job names that is not there, or asks for that cannot be."""
    models = (*rules.models, *rules.adapters)
    yield from _agent_faults(spec)
    for index, agent in enumerate(spec.agents):
        yield from _own_faults(f"agents[{index}]", agent, AgentSpec.model_fields, models)
    if all(agent.by is SpokenBy.CALLER for agent in spec.agents):
        yield Fault(path="agents", message="at least one agent has to be asked of a model")
    yield from memory_faults(spec)
    yield from _cast_faults(spec, models)
    yield from _cycle_faults(spec)
    yield from _mode_faults(spec)
    yield from _conversation_faults(conversations)
    yield from condition_faults(spec, conversations)
    yield from _variable_faults(spec)
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
    """Yield what is wrong with an agent by itself, of what was ``given`` at a place."""
    if agent.by is SpokenBy.CALLER:
        yield from _caller_faults(place, agent, given)
        return
    for key in sorted(CALLERS_ALONE & agent.model_fields_set) if "by" in given else ():
        yield Fault(path=f"{place}.{key}", message="only an agent with by: caller is waited for")
    if "by" in given and "model" not in agent.model_fields_set:
        yield Fault(path=f"{place}.model", message="is required")
    elif "model" in given and agent.model not in models:
        yield Fault(path=f"{place}.model", message=unknown("model", agent.model, models))
    for key, (harmless, message) in FIXED_PARAMS.items() if "params" in given else ():
        if agent.params.get(key, harmless) not in (harmless, None):
            yield Fault(path=f"{place}.params.{key}", message=message)
    if "tools" in given:
        yield from _tool_faults(place, agent)


def _caller_faults(place: str, agent: AgentSpec, given: Collection[str]) -> Iterator[Fault]:
    """Yield what of an agent that a caller speaks for nothing would read, or could never be said."""
    for key in sorted(MODELS_ALONE & agent.model_fields_set & set(given)):
        yield Fault(path=f"{place}.{key}", message="an agent with by: caller is asked of no model")
    if agent.otherwise is None:
        return
    if agent.wait_s is None:
        yield Fault(path=f"{place}.otherwise", message="wants wait_s beside it: without that it is never said")
    yield from (Fault(path=f"{place}.otherwise", message=fault) for fault in said_faults(agent.otherwise))
    choices = agent.validation.choices if agent.validation is not None else None
    fault = Validation(retries=0, choices=tuple(choices)).fault_of(agent.otherwise) if choices else None
    if fault is not None:
        yield Fault(path=f"{place}.otherwise", message=fault)


def said_faults(text: str) -> Iterator[str]:
    """Yield why a text is not words that a caller could say."""
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MOST_SAID:
        yield f"{size} bytes are more than {MOST_SAID}"


def _tool_faults(of: str, agent: AgentSpec) -> Iterator[Fault]:
    seen: set[str] = set()
    for key, documents in (("exit_tools", agent.exit_tools), ("tools", agent.tools)):
        for position, document in enumerate(documents):
            place = f"{of}.{key}[{position}]"
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


def _cast_faults(spec: JobSpec, models: Collection[str]) -> Iterator[Fault]:
    """Yield what is wrong with agents as they are in single conversations."""
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
    if spec.mode is not Mode.FREE and "prompt_at" in spec.model_fields_set:
        yield Fault(path="prompt_at", message="only mode: free has it; in others a prompt is made when its turn starts")
    if spec.mode is Mode.LED:
        yield from _led_faults(spec)
    elif spec.leader is not None:
        yield Fault(path="leader", message="only mode: led has one")
    for index, agent in enumerate(spec.agents if spec.mode is Mode.FREE else ()):
        if agent.speak_after_within_round:
            message = "in mode: free there is no round to wait in; the order of the agents is the order of the queue"
            yield Fault(path=f"agents[{index}].speak_after_within_round", message=message)


def _led_faults(spec: JobSpec) -> Iterator[Fault]:
    names = [agent.id for agent in spec.agents]
    if spec.leader not in names:
        message = "mode: led wants a leader" if spec.leader is None else unknown("agent", spec.leader, names)
        yield Fault(path="leader", message=message)
    if len(names) < 2:  # noqa: PLR2004
        yield Fault(path="agents", message="the leader has nobody to name")
    seen = {END: "what a leader says that wants no more of the conversation"}
    for index, agent in enumerate(spec.agents):
        place, name = f"agents[{index}]", folded(agent.id)
        if name in seen and agent.id not in names[:index]:
            yield Fault(path=f"{place}.id", message=f"letter case aside {agent.id!r} is {seen[name]}")
        seen.setdefault(name, f"the id of agents[{index}]")
        if agent.speak_after_within_round:
            message = "in mode: led the leader names who speaks; there is nobody else to wait for"
            yield Fault(path=f"{place}.speak_after_within_round", message=message)
        if agent.id == spec.leader and agent.by is SpokenBy.CALLER:
            yield Fault(path=f"{place}.by", message="a leader is asked of a model")
        if agent.id == spec.leader and agent.validation is not None:
            yield Fault(path=f"{place}.validation", message=LEADERS_ANSWER)
        if agent.id == spec.leader and agent.on_failure is not OnFailure.END:
            yield Fault(path=f"{place}.on_failure", message="nobody goes on without the leader")


def _conversation_faults(conversations: tuple[Conversation, ...]) -> Iterator[Fault]:
    seen: dict[str, int] = {}
    for index, conversation in enumerate(conversations):
        first = seen.setdefault(conversation.id, index)
        if first != index:
            yield Fault(
                path=f"conversations[{index}].id",
                message=f"{conversation.id!r} is the id of conversations[{first}] already",
            )


def _variable_faults(spec: JobSpec) -> Iterator[Fault]:
    """Yield which names are none, or not given where a text of their conversation wants them."""
    known = {name for given in spec.conversations for name in given.variables or ()}
    common = {"system": spec.system, **{f"agents[{n}].system": agent.system for n, agent in enumerate(spec.agents)}}
    wanted = _places_of_names(common, known)
    numbers = {agent.id: n for n, agent in enumerate(spec.agents)}
    for index, given in enumerate(spec.conversations):
        if given.variables is None:
            continue
        path = f"conversations[{index}].variables"
        for name in given.variables:
            if not re.fullmatch(NAME, name):
                yield Fault(path=f"{path}.{name}", message="a name is letters, digits and _, and begins with no digit")
            elif name in RESERVED:
                yield Fault(path=f"{path}.{name}", message=f"${name} is a name of Roundhouse's own words")
        cast = {name: each.system for name, each in given.agents.items() if "system" in each.model_fields_set}
        texts = {f"conversations[{index}].agents.{name}.system": text for name, text in cast.items()}
        own = _places_of_names({f"conversations[{index}].prompt": given.prompt or "", **texts}, known)
        replaced = {f"agents[{numbers[name]}].system" for name in cast if name in numbers}
        for name in sorted((own.keys() | wanted.keys()) - given.variables.keys()):
            places = [*own.get(name, ()), *(place for place in wanted.get(name, ()) if place not in replaced)]
            if places:
                yield Fault(path=path, message=f"{name!r} is not given, which {', '.join(places)} names")


def _places_of_names(texts: Mapping[str, str], known: Collection[str]) -> dict[str, list[str]]:
    """Return, for each name of ``known``, the places of the texts that want it."""
    places: dict[str, list[str]] = {}
    for place, text in texts.items():
        for name in dict.fromkeys(names_in(text, known)):
            places.setdefault(name, []).append(place)
    return places


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


def limit_faults(spec: JobSpec, conversations: tuple[Conversation, ...], limits: Limits) -> Iterator[Fault]:
    """Yield which limits the rounds and turns of a job exceed."""
    rounds = max(conversation.rounds for conversation in conversations)
    speakers = 2 if spec.mode is Mode.LED else len(spec.agents)  # of a round
    turns = speakers * sum(conversation.rounds for conversation in conversations)
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
