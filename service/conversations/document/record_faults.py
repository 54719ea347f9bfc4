"""The faults of recording, rewards and groups: what a model cannot do, and fields without effect.

Source: specification, "Refused jobs".
"""

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Final

from service.conversations.document.spec import AgentSpec, JobSpec, cast_specs, is_tool_reference
from service.conversations.job.job import SpokenBy
from service.errors import Fault
from service.formats.faults import Checks, broken, unknown
from workers.errors import InvalidTool
from workers.tools.definition import ToolDefinition

UNREAD: Final = ("post_sampling_probs", "prompt_logprobs", "response_fields")  # parameters of engines


def record_faults(
    spec: JobSpec, adapters: Mapping[str, str], unable: Mapping[str, str], rewards: Collection[str]
) -> Iterator[Fault]:
    """Yield the faults; ``unable`` says why models cannot record, ``rewards`` are the configured callables."""
    if not _says_anything(spec):
        return
    asked = list(_asked_agents(spec))
    recording = [(place, agent) for place, agent in asked if _is_recorded(spec, agent)]
    yield from _model_faults(recording, adapters, unable)
    yield from _vain_faults(spec, is_recorded=bool(recording))
    if spec.reward is not None:
        yield from _reward_faults(spec, [agent for _, agent in asked], rewards)


def _says_anything(spec: JobSpec) -> bool:
    """Whether a job says anything of recording."""
    said = spec.model_fields_set & {"record", "reward", "max_staleness", "on_stale"}
    if said or any(agent.record is not None for agent in spec.agents):
        return True
    # A list, since ``any`` would make a call for each of ten thousand.
    return bool([each for each in spec.conversations if each.max_staleness is not None])


def _asked_agents(spec: JobSpec) -> Iterator[tuple[str, AgentSpec]]:
    for index, agent in enumerate(spec.agents):
        if agent.by is SpokenBy.MODEL:
            yield f"agents[{index}]", agent
    for index, conversation in enumerate(spec.conversations):
        for agent in cast_specs(spec, conversation):
            if agent.by is SpokenBy.MODEL and "model" in conversation.agents[agent.id].model_fields_set:
                yield f"conversations[{index}].agents.{agent.id}", agent


def _is_recorded(spec: JobSpec, agent: AgentSpec) -> bool:
    record = agent.record or spec.record
    return record is not None and record.tokens


@broken
def _model_faults(
    recording: list[tuple[str, AgentSpec]], adapters: Mapping[str, str], unable: Mapping[str, str]
) -> Checks:
    for place, agent in recording:
        model = adapters.get(agent.model, agent.model)
        path = f"{place}.record" if agent.record is not None else "record"
        yield model in unable, path, f"{agent.model!r} cannot be recorded: {unable.get(model)}"
        answers = agent.params.get("n")
        yield answers not in (None, 1), f"{place}.params.n", "a recorded turn has one answer"
        for name in UNREAD:
            is_given = agent.params.get(name) not in (None, False, [])
            yield is_given, f"{place}.params.{name}", "changes what the engine tells of tokens: leave it out"
        is_without = agent.params.get("include_reasoning") is False
        message = "engines withhold the tokens of thoughts that are left out"
        yield is_without, f"{place}.params.include_reasoning", message


@broken
def _vain_faults(spec: JobSpec, *, is_recorded: bool) -> Checks:
    message = "without record: {tokens: true} there are no rollouts"
    yield spec.record is not None and spec.record.tokens and not is_recorded, "record", "no model speaks in this job"
    yield spec.reward is not None and not is_recorded, "reward", message
    yield spec.max_staleness is not None and not is_recorded, "max_staleness", message
    has_own = False
    for index, conversation in enumerate(spec.conversations):
        is_given = conversation.max_staleness is not None
        has_own |= is_given
        yield is_given and not is_recorded, f"conversations[{index}].max_staleness", message
    is_vain = "on_stale" in spec.model_fields_set and spec.max_staleness is None and not has_own
    yield is_vain, "on_stale", "wants max_staleness beside it: without that nothing is stale"


@broken
def _reward_faults(spec: JobSpec, agents: list[AgentSpec], rewards: Collection[str]) -> Checks:
    reward, names = spec.reward, [agent.id for agent in spec.agents]
    assert reward is not None  # noqa: S101 - the caller has checked
    is_unknown = reward.agent is not None and reward.agent not in names
    yield is_unknown, "reward.agent", partial(unknown, "agent", str(reward.agent), names)
    is_unknown = reward.python is not None and reward.python not in rewards
    message = partial(unknown, "callable of rollouts.rewards", str(reward.python), rewards)
    yield is_unknown, "reward.python", message
    tools, are_all = _tools_of(agents)
    is_unknown = reward.tool is not None and are_all and reward.tool not in tools
    yield is_unknown, "reward.tool", partial(unknown, "tool", str(reward.tool), tools)


def _tools_of(agents: list[AgentSpec]) -> tuple[list[str], bool]:
    """Return the names of the agents' tools, and whether all are known."""
    names: dict[str, None] = {}
    are_all = True
    for document in (tool for agent in agents for tool in (*agent.tools, *agent.exit_tools)):
        try:
            names[ToolDefinition.parse(document).name] = None
        except InvalidTool:  # a fault of its own, or a reference that is not resolved yet
            are_all &= not is_tool_reference(document)
    return list(names), are_all
