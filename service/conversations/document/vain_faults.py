"""The faults of fields without effect, which no model would see.

Source: specification, "Refused jobs".
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Final

from service.conversations.document.spec import AgentSpec, JobSpec, cast_specs
from service.conversations.job.job import OnFailure, SpokenBy
from service.conversations.job.wording import quote_fault
from service.errors import Fault
from service.formats.faults import Checks, broken, unknown
from workers.tools.definition import OURS

OF_MODELS: Final = ("retries", "constrain")  # fields of a validation without effect on callers


def vain_faults(
    spec: JobSpec, adapters: Mapping[str, str], servers: Mapping[str, Collection[str]], untold: Collection[str]
) -> Iterator[Fault]:
    """Yield the fields of a job that have no effect; the other arguments come from ``JobRules``."""
    agents = list(_agents(spec))
    yield from _word_faults(spec, [agent for _, agent, _ in agents], adapters, untold)
    for place, agent, given in agents:
        if agent.by is SpokenBy.CALLER:
            yield from _caller_faults(place, agent, given)
            continue
        yield from _signal_faults(place, agent, given)
        known = servers.get(adapters.get(agent.model, agent.model))
        if known is not None and {"model", "tools"} & set(given):
            yield from _origin_faults(place, agent, known)


@broken
def _word_faults(
    spec: JobSpec, agents: Iterable[AgentSpec], adapters: Mapping[str, str], untold: Collection[str]
) -> Checks:
    quote = quote_fault(spec.prompts.quote)
    yield quote is not None, "prompts.quote", str(quote)
    asked = (agent.model for agent in agents if agent.by is SpokenBy.MODEL)
    model = next((name for name in asked if adapters.get(name, name) in untold), None)
    message = f"agents of {model!r} do not get it: the template of its bios has no $context"
    yield spec.prompts.context and model is not None, "prompts.context", message


def _agents(spec: JobSpec) -> Iterator[tuple[str, AgentSpec, Collection[str]]]:
    """Yield the agents of a job and of its conversations, with their places and the fields given there."""
    for index, agent in enumerate(spec.agents):
        yield f"agents[{index}]", agent, AgentSpec.model_fields.keys()
    for index, conversation in enumerate(spec.conversations):
        for agent in cast_specs(spec, conversation):
            place = f"conversations[{index}].agents.{agent.id}"
            yield place, agent, conversation.agents[agent.id].model_fields_set


@broken
def _caller_faults(place: str, agent: AgentSpec, given: Collection[str]) -> Checks:
    message = "an agent with by: caller is asked of no model: words that do not fit are refused at once"
    said = agent.validation.model_fields_set if agent.validation is not None and "validation" in given else ()
    for key in OF_MODELS:
        yield key in said, f"{place}.validation.{key}", message
    cannot_fail = agent.wait_s is None or agent.otherwise is not None
    is_vain = "on_failure" in given and agent.on_failure is not OnFailure.END and cannot_fail
    message = "its turns do not fail: it is waited for without end, or says otherwise"
    yield is_vain, f"{place}.on_failure", message


def _signal_faults(place: str, agent: AgentSpec, given: Collection[str]) -> Iterator[Fault]:
    for position, tool in enumerate(agent.exit_tools if "exit_tools" in given else ()):
        for key in sorted(OURS & tool.keys()) if isinstance(tool, dict) and "function" in tool else ():
            yield Fault(path=f"{place}.exit_tools[{position}].{key}", message="a signal is never run: leave it out")


@broken
def _origin_faults(place: str, agent: AgentSpec, servers: Collection[str]) -> Checks:
    for position, document in enumerate(agent.tools):
        origin = document.get("mcp") if isinstance(document, dict) and "function" in document else None
        server = origin.get("server") if isinstance(origin, dict) else None
        is_unknown = isinstance(server, str) and server not in servers
        message = partial(unknown, "MCP server", str(server), servers)
        yield is_unknown, f"{place}.tools[{position}].mcp.server", message
