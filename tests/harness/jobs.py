"""Jobs for tests, in short calls."""

from collections.abc import Mapping, Sequence

from service.conversations.job.job import Agent, Conversation, Job, JobId, TurnKey


def agent(
    name: str,
    *,
    waits: Sequence[str] = (),
    visible_to: Sequence[str] | None = None,
    model: str = "m",
    params: Mapping[str, object] | None = None,
) -> Agent:
    return Agent(
        id=name,
        role="participant",
        model=model,
        system=f"You are {name}.",
        params=params or {},
        visible_to=None if visible_to is None else frozenset(visible_to),
        waits_for=frozenset(waits),
    )


def job(*agents: Agent, name: str = "j", rounds: int = 1, conversations: int = 1, priority: int = 0) -> Job:
    return Job(
        id=JobId(name),
        name=name,
        agents=agents,
        conversations=tuple(
            Conversation(id=f"c{n}", prompt=f"Topic {n}.", rounds=rounds) for n in range(conversations)
        ),
        priority=priority,
    )


def key(agent_id: str, round_number: int = 0, conversation: int = 0, name: str = "j") -> TurnKey:
    return TurnKey(JobId(name), f"c{conversation}", agent_id, round_number)


DEBATE = (agent("a"), agent("b"), agent("m", waits=("a", "b")))
