"""Waiting keys get tokens by their shares; idle time gains nothing; with one key the order is as without keys."""

from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from service.conversations.job.job import Agent, Conversation, GroupBy, Job, JobId, Mode, TurnKey
from service.scheduling.core import events
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.policies import POLICIES
from service.scheduling.core.queue.affinity import PromptReading

MOST_TOKENS = 1000  # bound for one turn
SHARES = st.sampled_from((0.5, 1.0, 2.0, 3.0))
FEW = settings(max_examples=25)
GROUPS = st.sampled_from((None, GroupBy.PARAMETERS))


def flood(owner: str | None, turns: int, name: str = "") -> Job:
    """Return a job whose turns are all ready at once."""
    return Job(
        id=JobId(f"{name}{owner}"),
        name="",
        agents=(Agent(id="a", role="", model="m", system=""),),
        conversations=tuple(Conversation(id=f"c{number}", prompt="", rounds=1) for number in range(turns)),
        owner=owner,
    )


class Slots:
    """Workers of one model on which turns take random tokens and end in any order; counts what each key has taken."""

    def __init__(
        self,
        policy: str,
        slots: int,
        shares: Mapping[str | None, float],
        seed: int,
        by: GroupBy | None = None,
        most: Mapping[str, int] | None = None,
    ) -> None:
        self.most = most or {}
        self.core = SchedulingCore(POLICIES[policy], by, shares=shares)
        self.chance = Random(seed)  # noqa: S311
        self.flying: list[TurnKey] = []
        self.started: list[TurnKey] = []
        self.tokens: Counter[str] = Counter()
        self.owners: dict[JobId, str] = {}
        self.act(events.WorkerReady(worker="w", model="m", slots=slots))

    def act(self, *happened: events.Event) -> None:
        """Report an event, and apply the starts."""
        for action in self.core.handle(*happened):
            if isinstance(action, events.StartTurn):
                self.flying.append(action.key)
                self.started.append(action.key)

    def admit(self, job: Job) -> None:
        """Post a job."""
        self.owners[job.id] = str(job.owner)
        self.act(events.JobAdmitted(job=job))

    def end_one(self) -> None:
        """End any turn in flight."""
        key = self.flying.pop(self.chance.randrange(len(self.flying)))
        owner = self.owners[key.job_id]
        half = self.most.get(owner, MOST_TOKENS) // 2
        fresh, answer = self.chance.randint(0, half), self.chance.randint(0, half)
        self.tokens[owner] += fresh + answer
        spent = events.TurnSpent(key=key, fresh_tokens=fresh, answer_tokens=answer)
        self.act(spent, events.TurnCompleted(key=key, seconds=1.0))


@given(
    policy=st.sampled_from(sorted(POLICIES)),
    slots=st.integers(1, 4),
    shares=st.tuples(SHARES, SHARES),
    by=GROUPS,
    most=st.sampled_from((100, MOST_TOKENS)),
    seed=st.integers(0, 10_000),
)
@FEW
def test_keys_that_always_wait_get_tokens_by_their_shares(
    policy: str, slots: int, shares: tuple[float, float], by: GroupBy | None, most: int, seed: int
) -> None:
    """At any moment within one turn's weight for each slot and one waiting turn, however long a key's turns are."""
    alice, bob = shares
    run = Slots(policy, slots, {"alice": alice, "bob": bob}, seed, by, {"alice": most})
    run.admit(flood("alice", 250))
    run.admit(flood("bob", 250))
    bound = (slots + 2) * MOST_TOKENS * (1 / alice + 1 / bob)
    for _ in range(100):
        run.end_one()
        assert abs(run.tokens["alice"] / alice - run.tokens["bob"] / bob) <= bound


@given(policy=st.sampled_from(sorted(POLICIES)), slots=st.integers(1, 4), seed=st.integers(0, 10_000))
@FEW
def test_a_key_that_comes_back_neither_gains_nor_pays(policy: str, slots: int, seed: int) -> None:
    """From then on both get the same, however much the other has used meanwhile."""
    run = Slots(policy, slots, {"alice": 1.0, "bob": 1.0}, seed)
    run.admit(flood("bob", 3))
    run.admit(flood("alice", 300))
    for _ in range(60):
        run.end_one()
    before = run.tokens.copy()
    run.admit(flood("bob", 200, "again-"))
    bound = 2 * (slots + 2) * MOST_TOKENS
    for _ in range(100):
        run.end_one()
        taken = {name: run.tokens[name] - before[name] for name in ("alice", "bob")}
        assert abs(taken["alice"] - taken["bob"]) <= bound


@given(
    policy=st.sampled_from(sorted(POLICIES)),
    slots=st.integers(1, 3),
    share=SHARES,
    others=st.lists(SHARES, min_size=1, max_size=4),
    seed=st.integers(0, 10_000),
)
@FEW
def test_no_key_starves(policy: str, slots: int, share: float, others: Sequence[float], seed: int) -> None:
    """A turn of any key starts after no more turns of others than their shares allow, however many wait."""
    shares: dict[str | None, float] = {f"other{number}": each for number, each in enumerate(others)}
    run = Slots(policy, slots, {**shares, "late": share}, seed)
    for name in shares:
        run.admit(flood(name, 100))
    for _ in range(20):
        run.end_one()
    run.admit(replace(flood("late", 1), priority=-5))
    before = len(run.started)
    while not any(run.owners[key.job_id] == "late" for key in run.started):
        run.end_one()
        assert len(run.started) - before <= (slots + 2) * len(others)


@given(
    policy=st.sampled_from(sorted(POLICIES)),
    by=GROUPS,
    mode=st.sampled_from(Mode),
    owner=st.sampled_from((None, "alice")),
    seed=st.integers(0, 10_000),
)
@FEW
def test_with_one_key_the_order_is_as_without_keys(
    policy: str, by: GroupBy | None, mode: Mode, owner: str | None, seed: int
) -> None:
    """The same actions in the same order, for all kinds of ends."""
    chance = Random(seed)  # noqa: S311
    keys: dict[str | None, float] = {"alice": 2.0, "bob": 1.0}
    cores = [SchedulingCore(POLICIES[policy], by, shares=shares) for shares in (None, keys)]
    for worker, slots in (("w0", 2), ("w1", 1)):
        for core in cores:
            core.handle(events.WorkerReady(worker=worker, model="m", slots=slots))
    flying: list[TurnKey] = []
    for step in range(60):
        happened: list[events.Event] = []
        if step % 10 == 0:
            agents = tuple(
                Agent(id=f"a{n}", role="", model="m", system="", params={"seed": chance.randint(0, 1)})
                for n in range(2)
            )
            talks = tuple(Conversation(id=f"c{n}", prompt="", rounds=chance.randint(1, 3)) for n in range(3))
            name = JobId(f"j{step}")
            priority = chance.randint(0, 1)
            job = Job(id=name, name=name, agents=agents, conversations=talks, mode=mode, owner=owner, priority=priority)
            happened.append(events.JobAdmitted(job=job))
        elif flying:
            happened += _end(flying.pop(chance.randrange(len(flying))), chance)
        first, second = (core.handle(*happened) for core in cores)
        assert first == second
        assert cores[0].view.queues.ready_heads(5) == cores[1].view.queues.ready_heads(5)
        flying += [action.key for action in first if isinstance(action, events.StartTurn)]


def _end(key: TurnKey, chance: Random) -> list[events.Event]:
    tokens = chance.randint(0, 2000)
    spent = events.TurnSpent(key=key, fresh_tokens=tokens, answer_tokens=10)
    if chance.random() < 0.2:
        return [spent, events.TurnRejected(key=key)]
    if chance.random() < 0.1:
        return [spent, events.TurnInterrupted(key=key)]
    reading = PromptReading(fresh_tokens=tokens, seconds=1.0, context_tokens=tokens, answer_tokens=10, answer_s=1.0)
    return [spent, events.TurnCompleted(key=key, seconds=chance.expovariate(1), reading=reading)]
