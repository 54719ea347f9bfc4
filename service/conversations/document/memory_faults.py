"""The faults of a job's memory: unknown names, and summaries that no agent could make."""

from collections.abc import Iterator, Sequence

from service.conversations.document.spec import AgentSpec, JobSpec, MemorySpec, cast_specs
from service.conversations.job.job import SpokenBy, View
from service.conversations.job.memory import SELF
from service.errors import Fault
from service.formats.faults import unknown


def memory_faults(spec: JobSpec) -> Iterator[Fault]:
    """Yield the faults of the memory of a job and of its agents."""
    if spec.memory is None and all(agent.memory is None for agent in spec.agents):
        return
    casts = [agent for conversation in spec.conversations for agent in cast_specs(spec, conversation)]
    everybody = [agent for agent in (*spec.agents, *casts) if agent.by is SpokenBy.MODEL]
    if spec.memory is not None:
        readers = [agent for agent in everybody if agent.memory is None]
        yield from _summary_faults("memory", spec, spec.memory, readers, everybody)
    for index, agent in enumerate(spec.agents):
        if agent.memory is None:
            continue
        path = f"agents[{index}].memory"
        if spec.view is View.SHARED:
            yield Fault(path=path, message="with view: shared the memory is the job's")
        else:
            readers = [each for each in everybody if each.id == agent.id]
            yield from _summary_faults(path, spec, agent.memory, readers, everybody)


def _summary_faults(
    path: str, spec: JobSpec, memory: MemorySpec, readers: Sequence[AgentSpec], everybody: Sequence[AgentSpec]
) -> Iterator[Fault]:
    summary = memory.summary
    if summary is None:
        return
    if memory.keep == "all":
        yield Fault(path=f"{path}.summary", message="with keep: all nothing is left out, and nothing is summed up")
    if summary.by == SELF and "by" in summary.model_fields_set and SELF in {agent.id for agent in spec.agents}:
        message = f"{SELF!r} is whoever the summary is for, and an agent has that id: give it another, or leave by out"
        yield Fault(path=f"{path}.summary.by", message=message)
    if summary.by == SELF:
        if spec.view is View.SHARED:
            message = "with view: shared one agent sums up for all: name it"
            yield Fault(path=f"{path}.summary.by", message=message)
        return
    names = dict.fromkeys(agent.id for agent in everybody)
    if summary.by not in names:
        yield Fault(path=f"{path}.summary.by", message=unknown("agent", summary.by, names))
        return
    models = {agent.model for agent in everybody if agent.id == summary.by}
    for reader in readers:
        if {reader.model} != models:
            # A summary needs the reader's prompt in the cache, and only the reader's model has that.
            message = f"{summary.by!r} has another model than {reader.id!r}, whose prompt it sums up"
            yield Fault(path=f"{path}.summary.by", message=message)
            return
