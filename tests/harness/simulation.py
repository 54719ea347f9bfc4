"""The scheduling core on engines with a virtual clock: the length of a schedule, in milliseconds of real time.

Used by the property that no schedule is longer than list scheduling allows, and by ``bench/studies/orders.py``.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random

from service.conversations.job.job import Agent, Conversation, Job, JobId, Mode, TurnKey
from service.conversations.talk.dependencies import dependencies_of
from service.scheduling.core import events
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.policies import POLICIES
from service.scheduling.core.queue.affinity import PromptReading

SIGMA = 0.8  # standard deviation of the logarithm of an answer's length
SCALES = (0.5, 1.0, 2.0)  # one scale for each agent of a conversation
Durations = Callable[[TurnKey], float]
Due = tuple[float, int, events.Event]


class Cache:
    """The caches of workers' engines: for each agent of a conversation the newest prompt, at one worker.

    ``tokens`` is the length of a prompt, ``answer`` of an answer, ``token_s`` the time to read a token; ``is_told``
    says whether the core learns of it.
    """

    def __init__(self, tokens: Callable[[TurnKey], int], token_s: float, *, is_told: bool, answer: int = 0) -> None:
        self._tokens = tokens
        self._answer = answer
        self.token_s = token_s
        self.is_told = is_told
        self._known: dict[tuple[JobId, str, str], tuple[str, int]] = {}

    def read(self, key: TurnKey, worker: str) -> PromptReading:
        """Return what a turn has to read there, and cache it there."""
        total = self._tokens(key)
        fresh = total - self._cached(key, worker)
        self._known[key[:3]] = worker, total + self._answer
        return PromptReading(
            fresh_tokens=fresh,
            seconds=fresh * self.token_s,
            context_tokens=total + self._answer,
            answer_tokens=self._answer,
        )

    def _cached(self, key: TurnKey, worker: str) -> int:
        where, known = self._known.get(key[:3], (worker, 0))
        return known if where == worker else 0


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The measurements of a workload, in seconds except for the ratio."""

    makespan: float
    bound: float
    mean_completion: float
    starts: tuple[tuple[float, TurnKey], ...]

    @property
    def ratio(self) -> float:
        """The makespan, relative to the lower bound of all schedules."""
        return self.makespan / self.bound


def simulate(
    jobs: Sequence[Job],
    slots: int,
    policy: str,
    seconds: Durations,
    *,
    workers: int = 1,
    cache: Cache | None = None,
) -> Schedule:
    """Run jobs that are all there at the start on workers of model ``m``; ``cache`` gives the cost of reading."""
    core = SchedulingCore(POLICIES[policy])
    now, numbers = 0.0, count()
    due: list[Due] = []
    starts: list[tuple[float, TurnKey]] = []
    ended: dict[JobId, float] = {}

    def act(actions: Sequence[events.Action]) -> None:
        for action in actions:
            match action:
                case events.StartTurn():
                    starts.append((now, action.key))
                    reading = cache.read(action.key, action.worker) if cache else None
                    takes = seconds(action.key) + (reading.seconds if reading else 0.0)
                    told = reading if cache and cache.is_told else None
                    heapq.heappush(due, (now + takes, next(numbers), _completed(action.key, takes, told)))
                case events.DeferTurn():
                    heapq.heappush(due, (now + action.seconds, next(numbers), events.DeferralOver(key=action.key)))
                case events.JobEnded():
                    ended[action.job_id] = now
                case _:
                    pass

    for job in jobs:
        act(core.handle(events.JobAdmitted(job=job)))
    for number in range(workers):
        act(core.handle(events.WorkerReady(worker=f"w{number}", model="m", slots=slots)))
    while due:
        now, happened = _next_moment(due)
        act(core.handle(*happened))
    assert set(ended) == {job.id for job in jobs}
    return Schedule(
        makespan=max(ended.values()),
        bound=lower_bound(jobs, slots, seconds),
        mean_completion=sum(ended.values()) / len(ended),
        starts=tuple(starts),
    )


def _next_moment(due: list[Due]) -> tuple[float, list[events.Event]]:
    """Handle everything of the next moment."""
    now, _, event = heapq.heappop(due)
    happened = [event]
    while due and due[0][0] == now:
        happened.append(heapq.heappop(due)[2])
    return now, happened


def _completed(key: TurnKey, seconds: float, reading: PromptReading | None) -> events.TurnCompleted:
    return events.TurnCompleted(key=key, seconds=seconds, reading=reading)


def lower_bound(jobs: Sequence[Job], slots: int, seconds: Durations) -> float:
    """Return a lower bound of all schedules: the longest chain of turns, or all work spread over all slots."""
    work = sum(
        seconds(TurnKey(job.id, conversation.id, agent.id, number))
        for job in jobs
        for conversation in job.conversations
        for agent in job.agents
        for number in range(conversation.rounds)
    )
    longest = max(chain(job, conversation, seconds) for job in jobs for conversation in job.conversations)
    return max(work / slots, longest)


def chain(job: Job, conversation: Conversation, seconds: Durations) -> float:
    """Return the longest chain of turns of one conversation."""
    rows = [
        [seconds(TurnKey(job.id, conversation.id, agent.id, number)) for agent in job.agents]
        for number in range(conversation.rounds)
    ]
    if job.mode is Mode.FREE:
        return max(map(sum, zip(*rows, strict=True)))
    return sum(max(dependencies_of(job).tails(row)) for row in rows)


def drawn(seed: int) -> Durations:
    """Return lognormal durations around each agent's scale, the same for the same seed and turn."""
    known: dict[TurnKey, float] = {}

    def seconds(key: TurnKey) -> float:
        if key not in known:
            chance = Random(f"{seed}/{key}")  # noqa: S311
            scale = SCALES[int(key.agent_id[1:]) % len(SCALES)]
            known[key] = scale * math.exp(SIGMA * chance.gauss(0, 1))
        return known[key]

    return seconds


WAITS: Mapping[str, Sequence[Sequence[int]]] = {
    "moderator": ((), (), (0, 1)),
    "chain": ((), (0,), (1,)),
    "free": ((), (), ()),
}


def job_of(name: str, kind: str, rounds: Sequence[int], **fields: object) -> Job:
    """Return a job of three agents, with one conversation for each entry of ``rounds``."""
    return Job(
        id=JobId(name),
        name=name,
        agents=tuple(
            Agent(id=f"a{n}", role="", model="m", system="", waits_for=frozenset(f"a{other}" for other in waited))
            for n, waited in enumerate(WAITS[kind])
        ),
        conversations=tuple(Conversation(id=f"c{n}", prompt="", rounds=many) for n, many in enumerate(rounds)),
        mode=Mode.FREE if kind == "free" else Mode.ROUNDS,
        **fields,  # type: ignore[arg-type]
    )


def mixes(conversations: int = 24, rounds: int = 8) -> dict[str, list[Job]]:
    """Return the workloads that orders are compared on."""
    made: dict[str, list[Job]] = {}
    for kind in WAITS:
        for jobs in (1, 6, 24):
            each = conversations // jobs
            made[f"{kind}, {jobs} jobs"] = [job_of(f"j{n}", kind, [rounds] * each) for n in range(jobs)]
    made["skewed, 1 job"] = [job_of("j0", "moderator", [2] * 40 + [12] * 2)]
    kinds = list(WAITS)
    made["mixed, 24 jobs"] = [
        job_of(f"j{n}", kinds[n % 3], [(2, 4, 8)[n // 3 % 3]] * (1, 1, 2, 4)[n % 4]) for n in range(24)
    ]
    return made
