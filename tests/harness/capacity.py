"""Scheduling cores with KV caches, and jobs whose turns take a given number of tokens, in short calls."""

from collections.abc import Iterable

from service.conversations.job.job import Agent, Conversation, GroupBy, Job, JobId, Mode, TurnKey
from service.scheduling.core import events
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.kv_budgets import KvNeed
from service.scheduling.core.policies import POLICIES
from service.scheduling.core.queue.affinity import PromptReading
from service.scheduling.core.turn_needs import (
    TEMPLATE_TOKENS,
)

EMPTY = Conversation(id="c0", prompt="", rounds=9)


MOST = 500  # tokens of an answer, where an agent does not say


READ_S = 0.01


def asks(
    name: str,
    *needs: int,
    conversations: int = 1,
    rounds: int = 1,
    mode: Mode = Mode.ROUNDS,
    priority: int = 0,
    model: str = "m",
    adapter: str | None = None,
) -> Job:
    """Return a job of agents a0, a1 and so on, whose first turns take this many tokens each, all of them an answer."""
    agents = tuple(
        speaker(f"a{number}", need - TEMPLATE_TOKENS, model=model, adapter=adapter) for number, need in enumerate(needs)
    )
    talks = tuple(Conversation(id=f"c{number}", prompt="", rounds=rounds) for number in range(conversations))
    return Job(id=JobId(name), name=name, agents=agents, conversations=talks, mode=mode, priority=priority)


def speaker(name: str, most: int | None = None, *, model: str = "m", adapter: str | None = None) -> Agent:
    params = {} if most is None else {"max_tokens": most}
    return Agent(id=name, role="", model=model, system="", adapter=adapter, params=params)


def turn(name: str, number: int = 0, *, agent: str = "a0", conversation: int = 0) -> TurnKey:
    return TurnKey(JobId(name), f"c{conversation}", agent, number)


def ready(worker: str = "w", kv: int | None = 1000, *, slots: int = 8, model: str = "m") -> events.WorkerReady:
    return events.WorkerReady(worker=worker, model=model, slots=slots, kv_tokens=kv, most_answer=MOST)


def admit(job: Job) -> events.JobAdmitted:
    return events.JobAdmitted(job=job)


def done(key: TurnKey, context: int | None = None, answer: int = 10, seconds: float | None = None) -> events.Event:
    reading = None
    if context is not None:
        reading = PromptReading(
            fresh_tokens=context, seconds=READ_S * context, context_tokens=context, answer_tokens=answer
        )
    return events.TurnCompleted(key=key, seconds=seconds, reading=reading)


def core_of(
    *workers: events.WorkerReady, policy: str = "fifo", group_by: GroupBy | None = None, jobs: Iterable[Job] = ()
) -> SchedulingCore:
    core = SchedulingCore(POLICIES[policy], group_by)
    core.handle(*workers)
    for job in jobs:
        core.handle(admit(job))
    return core


def seated(actions: Iterable[events.Action]) -> dict[TurnKey, str]:
    return {action.key: action.worker for action in actions if isinstance(action, events.StartTurn)}


def names(actions: Iterable[events.Action]) -> list[str]:
    """Return the jobs whose turns start."""
    return [str(key.job_id) for key in seated(actions)]


def reserved(core: SchedulingCore, worker: str = "w") -> int:
    return core.view.reserved(worker)


def kv_need(tokens: int) -> KvNeed:
    return KvNeed(prompt=tokens, answer=0)


def read(context: int, answer: int) -> PromptReading:
    """Return the reading of an engine that had none of the prompt cached."""
    return PromptReading(fresh_tokens=context - answer, seconds=1.0, context_tokens=context, answer_tokens=answer)
