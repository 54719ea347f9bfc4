"""The faults of a job's memory: unknown names, and summaries that no agent could make."""

from collections.abc import Iterator, Sequence

from service.conversations.document.spec import AgentSpec, JobSpec, MemorySpec, cast_specs
from service.conversations.job.job import SpokenBy, View
from service.conversations.job.memory import SELF
from service.errors import Fault
from service.formats.faults import unknown


def memory_faults(spec: JobSpec) -> Iterator[Fault]:
    """Yield the faults of the memory of a job and of its agents."""
    own = [(index, agent) for index, agent in enumerate(spec.agents) if agent.memory is not None]
    if spec.memory is None and not own:
        return
    everybody = _asked_agents(spec)
    readers = [agent for agent in everybody if agent.memory is None]
    yield from _summary_faults("memory", spec, spec.memory, readers, everybody)
    for index, agent in own:
        path = f"agents[{index}].memory"
        if spec.view is View.SHARED:
            yield Fault(path=path, message="with view: shared the memory is the job's")
        else:
            readers = [each for each in everybody if each.id == agent.id]
            yield from _summary_faults(path, spec, agent.memory, readers, everybody)


def _asked_agents(spec: JobSpec) -> list[AgentSpec]:
    """Return the agents that models speak for, as the job and its conversations define them."""
    casts = [agent for conversation in spec.conversations for agent in cast_specs(spec, conversation)]
    return [agent for agent in (*spec.agents, *casts) if agent.by is SpokenBy.MODEL]


def _summary_faults(
    path: str, spec: JobSpec, memory: MemorySpec | None, readers: Sequence[AgentSpec], everybody: Sequence[AgentSpec]
) -> Iterator[Fault]:
    if memory is None or memory.summary is None:
        return
    summary = memory.summary
    if memory.keep == "all":
        yield Fault(path=f"{path}.summary", message="with keep: all nothing is left out, and nothing is summed up")
    by = f"{path}.summary.by"
    if summary.by != SELF:
        yield from _summarizer_faults(by, summary.by, readers, everybody)
        return
    if "by" in summary.model_fields_set and SELF in {agent.id for agent in spec.agents}:
        message = f"{SELF!r} is whoever the summary is for, and an agent has that id: give it another, or leave by out"
        yield Fault(path=by, message=message)
    if spec.view is View.SHARED:
        yield Fault(path=by, message="with view: shared one agent sums up for all: name it")


def _summarizer_faults(
    path: str, name: str, readers: Sequence[AgentSpec], everybody: Sequence[AgentSpec]
) -> Iterator[Fault]:
    names = dict.fromkeys(agent.id for agent in everybody)
    if name not in names:
        yield Fault(path=path, message=unknown("agent", name, names))
        return
    # A summary needs the reader's prompt in the cache, which only the reader's model has.
    models = {agent.model for agent in everybody if agent.id == name}
    other = next((reader.id for reader in readers if {reader.model} != models), None)
    if other is not None:
        yield Fault(path=path, message=f"{name!r} has another model than {other!r}, whose prompt it sums up")
