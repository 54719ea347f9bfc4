"""In any order of ends, prompts are those of one round after the other, and no turn waits for more than it shows."""

from collections.abc import Mapping
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from service.conversations.job.job import Agent, Conversation, Job, JobId, Mode, View
from service.conversations.job.until import Condition, Ends, TurnDigest
from service.conversations.job.wording import Wording
from service.conversations.talk.dependencies import dependencies_of
from service.conversations.talk.discussion import Discussion
from service.conversations.talk.prompt_messages import PromptWriter
from service.conversations.talk.turn_order import Place, RoundsOrder
from transport.request import Message

NAMES = ("a", "b", "c", "d", "e")
ROUNDS = 4
Prompts = dict[Place, list[tuple[Message, ...]]]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Return a job of agents that wait for some of those before them, and are heard by some or by all."""
    agents = [
        Agent(
            id=name,
            role="participant",
            model="m",
            system="",
            waits_for=frozenset(draw(st.sets(st.sampled_from(NAMES[:number])))) if number else frozenset(),
            visible_to=draw(st.none() | st.frozensets(st.sampled_from(NAMES), max_size=2)),
        )
        for number, name in enumerate(NAMES)
    ]
    view = draw(st.sampled_from([*View]))
    return Job(id=JobId("j"), name="j", agents=tuple(draw(st.permutations(agents))), conversations=(), view=view)


class Stage:
    """One run of a conversation: its prompts, and their answers, which depend on nothing else."""

    def __init__(self, job: Job, seed: int) -> None:
        self.job = job
        self.prompts: Prompts = {}
        self._seed = seed
        self._writer = PromptWriter(job, Wording())
        self._discussion = Discussion(job)
        self._talk = Conversation(id="c", prompt="p", rounds=ROUNDS)

    def __repr__(self) -> str:
        return f"<Stage {len(self.prompts)} turns>"

    def ask(self, place: Place, tries: int) -> None:
        """Make the prompt of an attempt of a turn."""
        agent, rejected = self.job.agents[place.agent], [("no", "why")] * tries
        heard = self._discussion.heard_by(agent, place.round)
        asked = self._writer.messages(self._talk, agent, place.round, heard, rejected, is_told=False)
        self.prompts.setdefault(place, []).append(asked)

    def tries(self, place: Place) -> int:
        """Return how often a turn is asked."""
        return 1 + (Random(f"{self._seed} {place} tries").random() < 0.3)  # noqa: S311

    def end(self, place: Place) -> TurnDigest:
        """End a turn: its agent has spoken, was silent, or has left."""
        dice = Random(f"{self._seed} {place}").random()  # noqa: S311
        name, said = self.job.agents[place.agent].id, f"{hash(self.prompts[place][0])}"
        if dice < 0.1:
            self._discussion.add(name, place.round, None)
            return TurnDigest(leaves=True)
        if dice > 0.1 + 0.1:
            self._discussion.add(name, place.round, said)
        return TurnDigest()


def one_after_the_other(job: Job, seed: int) -> Prompts:
    """Return the prompts if every round waits for the whole round before it."""
    stage, gone = Stage(job, seed), set[int]()
    names = {agent.id: number for number, agent in enumerate(job.agents)}
    for number in range(ROUNDS):
        left = [place for place in range(len(job.agents)) if place not in gone]
        while left:
            agent = next(each for each in left if not {names[who] for who in job.agents[each].waits_for} & {*left})
            place = Place(agent, number)
            for tries in range(stage.tries(place)):
                stage.ask(place, tries)
            gone |= {agent} if stage.end(place).leaves else set()
            left.remove(agent)
    return stage.prompts


def may_speak(job: Job, ended: Mapping[Place, TurnDigest], read_by_until: set[int]) -> set[Place]:
    """Return the next turns that wait for no other, by the specification."""
    gone = {place.agent: place.round for place, digest in ended.items() if digest.leaves}
    free: set[Place] = set()
    for listener, agent in enumerate(job.agents):
        number = sum(place.agent == listener for place in ended)
        shown = {
            Place(speaker, number - 1)
            for speaker, each in enumerate(job.agents)
            if each is agent or each.visible_to is None or agent.id in each.visible_to or speaker in read_by_until
        }
        shown |= {Place(speaker, number) for speaker, each in enumerate(job.agents) if each.id in agent.waits_for}
        missing = [each for each in shown if each.round >= 0 and each not in ended and each.agent not in gone]
        if number < ROUNDS and listener not in gone and not missing:
            free.add(Place(listener, number))
    return free


@settings(max_examples=300)
@given(jobs(), st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from([None, *NAMES]))
def test_prompts_and_waits_follow_from_visibility(job: Job, seed: int, luck: int, judge: str | None) -> None:
    """Specification, "Rounds mode": any order of ends, retries between them, and kills."""
    dice, stage = Random(luck), Stage(job, seed)  # noqa: S311
    names = tuple(agent.id for agent in job.agents)
    read = set() if judge is None else {names.index(judge)}

    def fresh() -> RoundsOrder:
        ends = None if judge is None else Ends((Condition(agent=judge, says=("never",)),), names)
        return RoundsOrder(dependencies_of(job), ROUNDS, ends)

    order, ended = fresh(), dict[Place, TurnDigest]()
    at_work = order.replay({})
    while not order.is_over and not order.is_deserted:
        assert set(at_work) == may_speak(job, ended, read)
        assert len(at_work) == len(set(at_work))
        waiting = {each.place: each for each in order.awaited_turns()}
        assert not waiting.keys() & {*at_work, *ended}
        for each in waiting.values():
            assert each.waits_for
            assert not {Place(other, each.in_round) for other in each.waits_for} & ended.keys()
        if dice.random() < 0.1:
            order = fresh()
            at_work = order.replay(dict(dice.sample(sorted(ended.items(), key=repr), len(ended))))
            continue
        place = dice.choice(at_work)
        stage.ask(place, len(stage.prompts.get(place, ())))
        if len(stage.prompts[place]) == stage.tries(place):
            at_work.remove(place)
            ended[place] = stage.end(place)
            at_work += order.end_turn(place, ended[place])
    assert stage.prompts == one_after_the_other(job, seed)


@given(jobs(), st.sampled_from([*Mode]), st.randoms(use_true_random=False), st.integers(0, ROUNDS))
def test_a_memory_shows_the_later_rounds_and_the_agents_that_left(
    job: Job, mode: Mode, luck: Random, first: int
) -> None:
    """Specification, "Memory": hidden rounds are not read, and the shown ones stay the same."""
    job = replace(job, mode=mode, leader=job.agents[0].id if mode is Mode.LED else None)
    discussion, gone = Discussion(job), set[str]()
    turns = [(agent, number) for number in range(ROUNDS) for agent in luck.sample(job.agents, len(job.agents))]
    for agent, number in turns:
        if agent.id in gone:
            continue
        said = luck.choice(["words", "words", "words", "nothing", None])
        gone |= {agent.id} if said is None else set()
        if said != "nothing":
            discussion.make_prompt(agent.id, number)
            discussion.add(agent.id, number, said)
    for agent in job.agents:
        for number in range(first, ROUNDS):
            heard = discussion.heard_by(agent, number)
            shown = [each for each in heard if each.round >= first or each.text is None]
            assert [*discussion.heard_by(agent, number, first)] == shown
