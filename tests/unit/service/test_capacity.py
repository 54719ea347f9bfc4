"""Capacity in tokens: what turns need of a KV cache, and that a worker's slots are lent only as far as it has room."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.conversations.discussion import Discussion
from service.conversations.job import Agent, Conversation, GroupBy, Job, JobId, Mode, TurnKey
from service.scheduling.core import events
from service.scheduling.core.blame.blame import Trial
from service.scheduling.core.capacity.kv_budgets import KvBudgets, KvNeed, KvUse
from service.scheduling.core.capacity.turn_needs import (
    LEAST,
    MOST_A_CHAR,
    NEWEST,
    QUANTILE,
    TEMPLATE_TOKENS,
    TOKENS_A_CHAR,
    AnswerLengths,
    PromptLengths,
    TurnNeeds,
)
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.policies import POLICIES
from service.scheduling.core.policies.critical_path import AGEING_TURNS
from service.scheduling.core.queue.affinity import PromptReading
from service.scheduling.core.room_keeper import LOOKED_AT, PASSES, RoomKeeper

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
    """Return a job of agents a0, a1 and so on, whose first turns take so many tokens each: of nothing but an answer."""
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
    """Return what an engine has read that had nothing of it in its cache."""
    return PromptReading(fresh_tokens=context - answer, seconds=1.0, context_tokens=context, answer_tokens=answer)


# What turns need


def learned(needs: TurnNeeds, answers: Sequence[int], agent: str = "a0", context: int = 0) -> None:
    for number, answer in enumerate(answers):
        needs.learn(turn("j", number, agent=agent), speaker(agent), EMPTY, read(context or answer, answer))


def test_a_first_prompt_is_known_by_its_characters() -> None:
    """The system prompt's and the topic's, half a token each until prompts have told, and the template's tokens."""
    agent, talk = replace(speaker("a0"), system="s" * 300), replace(EMPTY, prompt="p" * 101)
    assert TurnNeeds().prompt_tokens(turn("j"), agent, talk) == round(401 * TOKENS_A_CHAR) + TEMPLATE_TOKENS
    assert TurnNeeds().prompt_tokens(turn("j"), speaker("a0"), EMPTY) == TEMPLATE_TOKENS


def test_a_first_prompt_holds_what_others_have_said() -> None:
    """Whoever joins late reads all of it."""
    needs = TurnNeeds()
    learned(needs, [30, 40])
    assert needs.prompt_tokens(turn("j", agent="a1"), speaker("a1"), EMPTY) == 70 + TEMPLATE_TOKENS
    assert needs.prompt_tokens(turn("j", agent="a1", conversation=1), speaker("a1"), EMPTY) == TEMPLATE_TOKENS
    assert needs.prompt_tokens(turn("k", agent="a1"), speaker("a1"), EMPTY) == TEMPLATE_TOKENS


def test_a_later_prompt_is_the_last_context_and_what_was_said_since() -> None:
    """However its characters count: its engine has counted it."""
    needs, agent = TurnNeeds(), replace(speaker("a0"), system="s" * 9000)
    needs.start(turn("j"), agent, is_free=True)
    needs.learn(turn("j"), agent, EMPTY, read(700, 50))
    assert needs.prompt_tokens(turn("j", 1), agent, EMPTY) == 700 + TEMPLATE_TOKENS
    for other, answer in (("a1", 20), ("a2", 5)):
        needs.start(turn("j", agent=other), speaker(other), is_free=True)
        needs.learn(turn("j", agent=other), speaker(other), EMPTY, read(900, answer))
    assert needs.prompt_tokens(turn("j", 1), agent, EMPTY) == 725 + TEMPLATE_TOKENS
    assert needs.prompt_tokens(turn("j", 1, agent="a1"), speaker("a1"), EMPTY) == 905 + TEMPLATE_TOKENS
    assert needs.prompt_tokens(turn("j", 1, agent="a2"), speaker("a2"), EMPTY) == 900 + TEMPLATE_TOKENS


@pytest.mark.parametrize("bound", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_an_answer_takes_all_that_it_may_until_answers_have_told(bound: str) -> None:
    """Its agent's own bound goes before its worker's; one that is no bound does not."""
    bounded = replace(speaker("a0"), params={bound: 70})
    assert TurnNeeds().answer_tokens(turn("j"), bounded, MOST) == 70
    for nothing in (-1, 0, None, "many"):
        unbounded = replace(speaker("a0"), params={bound: nothing})
        assert TurnNeeds().answer_tokens(turn("j"), unbounded, MOST) == MOST
    assert TurnNeeds().need(turn("j"), bounded, EMPTY, MOST).tokens == TEMPLATE_TOKENS + 70


def test_an_answer_is_expected_to_be_like_those_before() -> None:
    """As long as nearly all of that agent's, once there are enough; never longer than it may be."""
    needs = TurnNeeds()
    learned(needs, [10, 90, 20, 30])
    assert needs.answer_tokens(turn("j"), speaker("a0"), MOST) == MOST
    learned(needs, [40])
    assert needs.answer_tokens(turn("j"), speaker("a0"), MOST) == 90
    assert needs.answer_tokens(turn("j", conversation=7), speaker("a0"), MOST) == 90
    assert needs.answer_tokens(turn("j"), speaker("a0", 35), MOST) == 35
    assert needs.answer_tokens(turn("j"), speaker("a0"), 60) == 60
    for other in (turn("j", agent="a1"), turn("k")):
        assert needs.answer_tokens(other, speaker("a1"), MOST) == MOST


def test_one_answer_in_twenty_may_be_longer() -> None:
    """A single long one does not decide for fifty turns."""
    needs = TurnNeeds()
    learned(needs, [10] * 19 + [400])
    assert needs.answer_tokens(turn("j"), speaker("a0"), MOST) == 400  # one of twenty is no less than the quantile
    learned(needs, [10])
    assert needs.answer_tokens(turn("j"), speaker("a0"), MOST) == 10


@settings(max_examples=30)
@given(st.integers(0, 3 * NEWEST), st.randoms(use_true_random=False))
def test_the_newest_answers_count(count: int, rng: Random) -> None:
    """Compared with a list that is sorted anew."""
    lengths, answers = AnswerLengths(), [rng.randint(0, 50) for _ in range(count)]
    for place, answer in enumerate(answers):
        lengths.add(answer)
        newest = sorted(answers[: place + 1][-NEWEST:])
        expected = newest[min(len(newest) - 1, int(QUANTILE * len(newest)))] if len(newest) >= LEAST else None
        assert lengths.expected == expected


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000)), min_size=1, max_size=12), st.integers(0, 9000))
def test_first_prompts_tell_a_line(prompts: list[tuple[int, int]], chars: int) -> None:
    """Compared with the sums of a textbook; a character takes no less than nothing, and four tokens at most."""
    lengths = PromptLengths()
    for known in prompts:
        lengths.add(*known)
    mean_chars, mean_tokens = (sum(each) / len(prompts) for each in zip(*prompts, strict=True))
    spread = sum((each - mean_chars) ** 2 for each, _ in prompts)
    together = sum((each - mean_chars) * (tokens - mean_tokens) for each, tokens in prompts)
    rate = min(MOST_A_CHAR, max(0.0, together / spread)) if spread else TOKENS_A_CHAR
    assert lengths.expected(chars) == pytest.approx(max(1, mean_tokens + (chars - mean_chars) * rate), abs=0.51)


def test_first_prompts_of_an_agent_are_learned() -> None:
    """What its tools and its template take is in them; what others had said is not, and later prompts tell nothing."""
    needs, agent = TurnNeeds(), replace(speaker("a0"), system="s" * 1000)

    def first(name: str, chars: int = 0) -> int:
        return needs.prompt_tokens(turn(name), agent, replace(EMPTY, prompt="p" * chars))

    needs.learn(turn("j"), agent, EMPTY, read(2050, 50))
    assert first("j", 0) == 2050 + TEMPLATE_TOKENS
    assert needs.prompt_tokens(turn("j", conversation=1), agent, EMPTY) == 2000
    needs.learn(turn("j", 1), agent, EMPTY, read(9000, 50))
    assert needs.prompt_tokens(turn("j", conversation=1), agent, EMPTY) == 2000
    needs.learn(turn("j", conversation=1), agent, replace(EMPTY, prompt="p" * 100), read(2080, 50))
    longer = replace(EMPTY, prompt="p" * 200)
    assert needs.prompt_tokens(turn("j", conversation=2), agent, longer) == 2060
    assert first("k") == 500 + TEMPLATE_TOKENS


def test_what_is_over_is_forgotten() -> None:
    """A conversation's words with its end, an agent's answers with its job; nobody else's."""
    needs = TurnNeeds()
    for agent in ("a0", "a1"):
        learned(needs, [30] * LEAST, agent, context=200)
    needs.learn(turn("j", conversation=1), speaker("a0"), EMPTY, read(400, 230))
    needs.learn(turn("k"), speaker("a0"), EMPTY, read(300, 10))

    def prompt(name: str, conversation: int = 0) -> int:
        return needs.prompt_tokens(turn(name, 9, conversation=conversation), speaker("a0"), EMPTY)

    needs.forget_conversation(JobId("j"), "c0")
    assert (prompt("j"), prompt("j", 1), prompt("k")) == (170, 400 + TEMPLATE_TOKENS, 300 + TEMPLATE_TOKENS)
    assert needs.answer_tokens(turn("j", 9), speaker("a0"), MOST) == 230
    needs.forget_job(JobId("j"), ["a0"])
    assert (prompt("j"), prompt("k", 1)) == (TEMPLATE_TOKENS, 290)
    assert needs.answer_tokens(turn("j", 9), speaker("a0"), MOST) == MOST
    assert needs.answer_tokens(turn("j", 9, agent="a1"), speaker("a1"), MOST) == 30


@pytest.mark.parametrize("mode", Mode)
@settings(max_examples=50)
@given(
    waits=st.lists(st.sets(st.integers(0, 3), max_size=2), min_size=4, max_size=4),
    slots=st.integers(1, 6),
    rng=st.randoms(use_true_random=False),
)
def test_what_is_reserved_is_what_a_prompt_takes(mode: Mode, waits: list[set[int]], slots: int, rng: Random) -> None:
    """Compared with what its agent is shown, whoever spoke at the same time, and is heard a round later or at once.

    Besides the template, only words of its own round are too much: of those that it does not wait for.
    """
    own = 300  # tokens of a system prompt, that no estimate knows before a first prompt has told
    agents = tuple(
        replace(
            speaker(f"a{number}", 1),
            waits_for=frozenset(f"a{other}" for other in waits[number] if other < number and mode is Mode.ROUNDS),
        )
        for number in range(4)
    )
    job = replace(asks("j", 65, 65, 65, 65, conversations=2, rounds=4, mode=mode), agents=agents)
    core = core_of(ready(kv=10**9, slots=slots))
    discussions = {conversation.id: Discussion(job) for conversation in job.conversations}
    flying, told, said = list[TurnKey](), set[str](), dict[TurnKey, int]()

    def prompt(key: TurnKey) -> int:
        heard = discussions[key.conversation_id].heard_by(job.agents[int(key.agent_id[1:])], key.round)
        return own + sum(len(each.text) for each in heard)

    def unheard(key: TurnKey) -> int:
        waits_for = job.agents[int(key.agent_id[1:])].waits_for
        same = (other for other in said if other[1] == key[1] and other[3] == key[3] and other[2] not in waits_for)
        return sum(said[other] for other in same) if mode is Mode.ROUNDS else 0

    def watch(actions: list[events.Action]) -> None:
        for key in seated(actions):
            flying.append(key)
            discussions[key.conversation_id].make_prompt(key.agent_id, key.round)
            if key.round or key.agent_id in told:
                spare = core.view.capacity().workers["w"].needs[key].tokens - 1 - prompt(key)
                assert spare == unheard(key) + (TEMPLATE_TOKENS if key.round else 0)

    watch(core.handle(admit(job)))
    while flying:
        key = flying.pop(rng.randrange(len(flying)))
        before, answer = prompt(key), rng.randint(1, 50)
        discussions[key.conversation_id].add(key.agent_id, key.round, "x" * answer)
        said[key] = answer
        told.add(key.agent_id)
        watch(core.handle(done(key, before + answer, answer)))


# What workers have room for


def test_a_budget_is_kept() -> None:
    """What is reserved and what comes stay within it; to the token."""
    kv = KvBudgets()
    kv.open("w", 100)
    kv.reserve("w", turn("a"), kv_need(60))
    assert (kv.budget("w"), kv.reserved("w")) == (100, 60)
    assert kv.fits("w", kv_need(40))
    assert not kv.fits("w", kv_need(41))
    kv.reserve("w", turn("b"), kv_need(40))
    assert not kv.fits("w", kv_need(0 + 1))
    kv.free_room("w", turn("a"))
    assert kv.reserved("w") == 40
    kv.free_room("w", turn("a"))
    kv.free_room("v", turn("a"))
    assert kv.fits("w", kv_need(60))


def test_one_alone_always_has_room() -> None:
    """Only the engine knows that a turn does not fit."""
    kv = KvBudgets()
    kv.open("w", 100)
    assert kv.fits("w", kv_need(10**6))
    kv.reserve("w", turn("a"), kv_need(10**6))
    assert not kv.fits("w", kv_need(1))
    kv.free_room("w", turn("a"))
    assert kv.fits("w", kv_need(10**6))


def test_a_worker_without_a_budget_has_room_for_anything() -> None:
    """Its slots bound it; and each worker is counted by itself."""
    kv = KvBudgets()
    kv.open("w", 100)
    kv.open("v", None)
    for worker in ("w", "v"):
        kv.reserve(worker, turn("a"), kv_need(90))
    assert kv.fits("v", kv_need(10**6))
    assert not kv.fits("w", kv_need(20))
    kv.open("w", 200)
    assert kv.reserved("w") == 90
    assert kv.fits("w", kv_need(110))
    kv.open("w", None)
    assert kv.budget("w") is None
    assert kv.fits("w", kv_need(10**6))


# What starts


def test_turns_start_as_far_as_there_is_room() -> None:
    """Eight slots, and room for three."""
    core = core_of(ready(kv=1000))
    assert len(seated(core.handle(admit(asks("j", 300, conversations=5))))) == 3
    assert reserved(core) == 900
    assert list(seated(core.handle(done(turn("j"))))) == [turn("j", conversation=3)]
    assert reserved(core) == 900


def test_turns_that_fit_to_the_token_fit() -> None:
    """The last token is room as well."""
    core = core_of(ready(kv=1000))
    assert len(seated(core.handle(admit(asks("j", 250, conversations=9))))) == 4


def test_a_turn_that_is_larger_than_any_budget_runs_alone() -> None:
    """Nothing starts beside it, and it starts beside nothing."""
    core = core_of(ready(kv=1000), jobs=[asks("small", 100)])
    assert names(core.handle(admit(asks("huge", 5000)))) == []
    assert names(core.handle(done(turn("small")))) == ["huge"]
    assert names(core.handle(admit(asks("next", 70)))) == []
    assert names(core.handle(done(turn("huge")))) == ["next"]


@pytest.mark.parametrize("end", ["completed", "failed", "interrupted", "tried", "rejected", "cut off", "closed"])
def test_room_is_given_up_however_a_turn_ends(end: str) -> None:
    """Its own and nobody else's, once."""
    core = core_of(ready(), jobs=[asks("j", 400), asks("k", 500), asks("l", 300)])
    assert reserved(core) == 900
    key = turn("j")
    match end:
        case "completed":
            assert names(core.handle(done(key))) == ["l"]
        case "failed":
            assert names(core.handle(events.TurnFailed(key=key, reason="engine_rejected"))) == ["l"]
        case "interrupted":
            assert names(core.handle(events.TurnInterrupted(key=key))) == ["j"]
        case "tried":
            core.handle(events.TurnInterrupted(key=key, trial=Trial.NEXT))
            assert reserved(core) == 500
            assert names(core.handle(done(turn("k")))) == ["j"]
            assert reserved(core) == 400
            return
        case "rejected":
            assert names(core.handle(events.TurnRejected(key=key))) == ["j"]
        case "cut off":
            assert names(core.handle(events.JobCancelled(job_id=key.job_id))) == []
            assert reserved(core) == 900
            assert names(core.handle(events.TurnCutOff(key=key))) == ["l"]
        case _:
            core.handle(events.WorkerNotReady(worker="w", returns=True))
            assert reserved(core) == 900  # the turns on it tell their own end
            core.handle(events.TurnInterrupted(key=key))
            assert reserved(core) == 500
            assert names(core.handle(ready(kv=850))) == ["l"]
    assert reserved(core) == 500 + (400 if end in ("interrupted", "rejected") else 300)


def test_a_worker_that_comes_back_with_less_has_less() -> None:
    """What is still on it counts; nothing starts until that is within what it has now."""
    core = core_of(ready(kv=1000), jobs=[asks("j", 300, conversations=3), asks("next", 200, conversations=2)])
    core.handle(events.WorkerNotReady(worker="w", returns=True))
    assert seated(core.handle(ready(kv=500))) == {}
    assert reserved(core) == 900
    assert names(core.handle(done(turn("j")))) == []
    assert names(core.handle(done(turn("j", conversation=1)))) == ["next"]
    assert reserved(core) == 500


def test_a_worker_that_comes_back_with_a_budget_is_not_taken_for_empty() -> None:
    """What started there while its slots bound it is there, whatever it takes."""
    core = core_of(ready(kv=None), jobs=[asks("j", 300)])
    core.handle(ready(kv=1000))
    assert names(core.handle(admit(asks("huge", 5000)))) == []
    assert names(core.handle(done(turn("j")))) == ["huge"]


def test_a_turn_goes_to_the_worker_with_room() -> None:
    """Though another has more slots."""
    core = core_of(ready("w", kv=1000, slots=8), ready("v", kv=1000, slots=2), jobs=[asks("j", 700)])
    assert seated(core.handle(admit(asks("k", 400)))) == {turn("k"): "v"}
    assert seated(core.handle(admit(asks("l", 300)))) == {turn("l"): "w"}
    assert seated(core.handle(admit(asks("huge", 700)))) == {}
    assert seated(core.handle(done(turn("k")))) == {turn("huge"): "v"}


@pytest.mark.parametrize(("other", "worker"), [(300, "w"), (700, "v")])
def test_a_worker_that_knows_the_prompt_is_taken_if_it_has_room(other: int, worker: str) -> None:
    """To read again elsewhere is better than not to start."""
    core = core_of(ready("w", slots=2), jobs=[asks("j", 300, rounds=2), asks("other", other)])
    core.handle(ready("v", slots=8))
    core.handle(events.Paused(), done(turn("j"), 300, 10))
    assert seated(core.handle(events.Unpaused())) == {turn("j", 1): worker}


def test_each_model_bounds_its_own_answers() -> None:
    """A model with long answers reserves nothing at another one."""
    long = events.WorkerReady(worker="n0", model="n", slots=2, kv_tokens=10**6, most_answer=10**5)
    core = core_of(ready(kv=2 * (TEMPLATE_TOKENS + MOST)), long)
    job = replace(asks("j", 0, conversations=3), agents=(speaker("a0"),))
    assert len(seated(core.handle(admit(job)))) == 2


# Who may start ahead of one that has no room


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_turn_without_room_is_passed_a_few_times(policy: str) -> None:
    """Others use the room that is left; then nothing starts before it, whatever would go first by the order."""
    core = core_of(ready(), policy=policy, jobs=[asks("base", 200), asks("large", 900), asks("next", 900)])
    for number in range(PASSES):
        assert names(core.handle(admit(asks(f"s{number}", 100)))) == [f"s{number}"]
        core.handle(done(turn(f"s{number}")))
    assert names(core.handle(admit(asks("late", 100, priority=9)))) == []
    for _ in range(2 * AGEING_TURNS):
        assert core.handle() == []
    assert names(core.handle(done(turn("base")))) == ["large"]
    assert names(core.handle(done(turn("large")))) == ["next", "late"]
    assert not core.view.capacity().passed


def test_ageing_outlasts_a_want_of_room() -> None:
    """Turns of a higher priority, one at a time, always have room: the oldest is passed by every sixteenth alone."""
    core = core_of(ready(), policy="critical_path", jobs=[asks(f"s{number}", 100) for number in range(2)])
    core.handle(admit(asks("large", 950)))
    flying, started = deque([turn("s0"), turn("s1")]), list[TurnKey]()
    while turn("large") not in started:
        fresh = seated(
            core.handle(admit(asks(f"r{len(started)}-{len(flying)}", 100, priority=1)), done(flying.popleft()))
        )
        started += fresh
        flying.extend(fresh)
        assert len(started) <= AGEING_TURNS * (PASSES + 1)


def test_turns_that_were_held_pass_as_well() -> None:
    """Two conversations take turns on their worker, each held for it; the large one gets in between."""
    core = core_of(ready("w", kv=100_000, slots=1), jobs=[asks("t", 200, conversations=2, rounds=60)])
    flying = turn("t")
    for _ in range(2):
        (flying,) = seated(core.handle(done(flying, 2000, 10, 5.0)))
    core.handle(ready("v", kv=100_000, slots=2))
    assert seated(core.handle(admit(asks("long", 95_000)))) == {turn("long"): "v"}
    assert seated(core.handle(admit(asks("large", 50_000)))) == {}
    started = 0
    while flying.job_id != "large":
        ((flying, worker),) = seated(core.handle(done(flying, 2000, 10, 5.0))).items()
        assert worker == "w"
        started += 1
        assert started <= PASSES + 4


def test_a_held_turn_waits_for_room_too() -> None:
    """A slot of its worker gets free, and there is no room; others, that fit, do not wait for it."""
    core = core_of(ready("w", kv=5000, slots=2), jobs=[asks("t", 200, rounds=3), asks("y", 1000), asks("x", 3000)])
    assert seated(core.handle(done(turn("t"), 4000, 10, 5.0))) == {turn("x"): "w"}
    held = [each for each in core.handle(ready("v", kv=50_000, slots=2)) if isinstance(each, events.DeferTurn)]
    assert [action.key for action in held] == [turn("t", 1)]
    assert seated(core.handle(done(turn("y")))) == {}
    assert seated(core.handle(admit(asks("z", 100)))) == {turn("z"): "v"}
    assert seated(core.handle(admit(asks("s", 1500)))) == {turn("s"): "w"}
    assert core.view.held_for(turn("t", 1)) == "w"
    assert seated(core.handle(done(turn("x")))) == {}
    assert seated(core.handle(events.DeferralOver(key=turn("t", 1)))) == {turn("t", 1): "v"}


def test_a_held_turn_starts_when_there_is_room() -> None:
    """On the worker that it has waited for."""
    core = core_of(ready("w", kv=5000, slots=2), jobs=[asks("t", 200, rounds=3), asks("x", 1500), asks("y", 1500)])
    core.handle(done(turn("t"), 4000, 10, 5.0))
    core.handle(ready("v", kv=50_000, slots=2))
    assert core.view.held_for(turn("t", 1)) == "w"
    for name, expected in (("x", {}), ("y", {turn("t", 1): "w"})):
        assert seated(core.handle(done(turn(name)))) == expected


@pytest.mark.parametrize("group_by", [None, GroupBy.ADAPTER])
def test_a_retry_waits_for_room_and_for_no_more_than_a_few_others(group_by: GroupBy | None) -> None:
    """Its worker is gone, and the other one has room for it when no more may pass."""
    core = core_of(ready("w"), group_by=group_by, jobs=[asks("large", 950)])
    core.handle(ready("v"))
    core.handle(admit(asks("base", 100)))
    core.handle(events.WorkerNotReady(worker="w"))
    assert seated(core.handle(events.TurnInterrupted(key=turn("large")))) == {}
    for number in range(PASSES):
        assert names(core.handle(admit(asks(f"s{number}", 100)))) == [f"s{number}"]
        core.handle(done(turn(f"s{number}")))
    for number in range(3):
        assert names(core.handle(admit(asks(f"late{number}", 100)))) == []
        core.view.ready_heads(5)
    assert names(core.handle(done(turn("base")))) == ["large"]
    assert not core.view.capacity().passed
    assert names(core.handle(done(turn("large")))) == ["late0", "late1", "late2"]
    assert core.view.places_kept("m") == 0


@pytest.mark.parametrize("looks", range(3))
def test_retries_keep_their_order_while_they_wait(looks: int) -> None:
    """The first to be asked again starts first, and ahead of whatever else waits."""
    core = core_of(ready("w", kv=3000), jobs=[asks(name, 900) for name in ("x", "y", "z")])
    core.handle(ready("v", kv=1000), admit(asks("s", 200)), admit(asks("other", 900)))
    core.handle(events.WorkerNotReady(worker="w"))
    for name in ("x", "y", "z"):
        assert seated(core.handle(events.TurnInterrupted(key=turn(name)))) == {}
    for _ in range(looks):
        assert core.handle() == []
    order, flying = list[str](), "s"
    while len(order) < 4:
        (flying,) = names(core.handle(done(turn(flying))))
        order.append(flying)
    assert order == ["x", "y", "z", "other"]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_order_outlasts_a_wait_for_room(policy: str) -> None:
    """Turns that were looked at in vain, however often, start in the order in which they would have."""
    orders: list[list[TurnKey]] = []
    for looks in (0, 50):
        core = core_of(ready(kv=1000), policy=policy, jobs=[asks("base", 100)])
        for number in range(6):
            core.handle(admit(asks(f"j{number}", 950, conversations=2, rounds=1 + number % 3)))
        for _ in range(looks):
            assert core.handle() == []
        order = [turn("base")]
        while fresh := seated(core.handle(done(order[-1]))):
            order += fresh
        orders.append(order)
    assert orders[0] == orders[1]
    assert len(orders[0]) == 25


@pytest.mark.parametrize("group_by", [None, GroupBy.ADAPTER])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_in_free_mode_nobody_overtakes_one_without_room(policy: str, group_by: GroupBy | None) -> None:
    """Who speaks when is what the others hear; another conversation's turns use the room meanwhile."""
    core = core_of(ready(), policy=policy, group_by=group_by, jobs=[asks("base", 300)])
    assert seated(core.handle(admit(asks("f", 950, 100, 100, rounds=2, mode=Mode.FREE)))) == {}
    if group_by is None:
        assert names(core.handle(admit(asks("s", 100)))) == ["s"]
        core.handle(done(turn("s")))
    order, flying = "", deque([turn("base")])
    while flying:
        fresh = seated(core.handle(done(flying.popleft())))
        flying.extend(fresh)
        order += "".join(key.agent_id[1:] for key in fresh if key.job_id == "f")
    assert order == "012" * 2


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_grouped_turns_start_as_far_as_there_is_room(policy: str) -> None:
    """One signature at a time, within the budget; the next one when the worker is empty."""
    core = core_of(ready(), policy=policy, group_by=GroupBy.ADAPTER)
    first = seated(core.handle(admit(asks("x", 300, conversations=4, adapter="x"))))
    assert len(first) == 3
    assert seated(core.handle(admit(asks("y", 300, conversations=4, adapter="y")))) == {}
    flying, most = deque(first), 0
    while flying:
        flying.extend(seated(core.handle(done(flying.popleft()))))
        assert len({key.job_id for key in flying}) <= 1
        assert reserved(core) <= 1000
        most = max(most, sum(key.job_id == "y" for key in flying))
    assert most == 3
    assert set(core.view.of_all().values()) == {0}


def test_a_grouped_turn_without_room_takes_nothing_of_its_signatures_time() -> None:
    """Only what starts counts for how long others have to wait."""
    core = core_of(ready(slots=3), group_by=GroupBy.ADAPTER)
    core.handle(admit(asks("x", 300, conversations=2, adapter="x")))
    core.handle(admit(asks("large", 600, adapter="x")), admit(asks("y", 300, adapter="y")))
    for _ in range(50):
        assert core.handle() == []
    assert names(core.handle(done(turn("x")))) == ["large"]


def test_a_turn_that_is_dropped_leaves_nothing_behind() -> None:
    """Cancelled, or of a model that is lost: how often it was passed is forgotten."""
    for end in (events.JobCancelled(job_id=JobId("large")), events.ModelLost(model="m")):
        core = core_of(ready(), jobs=[asks("base", 200), asks("large", 900), asks("s", 100)])
        assert core.view.capacity().passed == {turn("large"): 1}
        core.handle(end)
        assert not core.view.capacity().passed


# What a decision costs


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("group_by", [None, GroupBy.ADAPTER])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_few_turns_are_looked_at(
    policy: str, group_by: GroupBy | None, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many wait without room; a decision takes a millisecond at most."""
    looked: list[TurnKey] = []
    need = RoomKeeper.need

    def counting(self: RoomKeeper, key: TurnKey, agent: Agent, conversation: Conversation) -> KvNeed:
        looked.append(key)
        return need(self, key, agent, conversation)

    monkeypatch.setattr(RoomKeeper, "need", counting)
    core = core_of(ready(slots=200), policy=policy, group_by=group_by, jobs=[asks("base", 100)])
    waiting = {
        5: asks("large", *[950] * 4, conversations=50, mode=mode),
        10: asks("s", *[70] * 3, conversations=50, mode=mode),
    }
    flying, most = deque([turn("base")]), 0
    for number in range(150):
        looked.clear()
        fresh = seated(
            core.handle(
                admit(waiting.get(number, asks(f"b{number}", 100))), *([done(flying.popleft())] if number % 3 else [])
            )
        )
        flying.extend(fresh)
        assert len(set(looked)) <= LOOKED_AT + len(fresh)
        assert len(looked) <= LOOKED_AT + 1 + 2 * len(fresh)
        most = max(most, len(set(looked)) - len(fresh))
    if group_by is not None:
        assert most == 1
    elif mode is Mode.ROUNDS:
        assert most == LOOKED_AT
    else:
        assert 1 < most < LOOKED_AT  # of each conversation the first, and the others behind it count as well


def test_nothing_is_estimated_where_slots_bound_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without budgets nothing is looked at, and nothing learned."""
    monkeypatch.setattr(RoomKeeper, "need", lambda *_: pytest.fail("there is no budget"))
    core = core_of(ready(kv=None, slots=2), jobs=[asks("j", 300, conversations=3, rounds=2)])
    core.handle(done(turn("j"), 300, 10))
    assert core.view.capacity().conversations == 0


@pytest.mark.parametrize("policy", ["fifo", "progress"])
def test_no_entry_is_left_by_each_look(policy: str) -> None:
    """A free conversation's first has no room, and another agent of it, far ahead in the order, stands for it."""
    large = asks("large", 70, 9950, conversations=30)
    large = replace(large, agents=(large.agents[0], replace(large.agents[1], waits_for=frozenset({"a0"}))))
    core = core_of(ready(kv=10_000, slots=50), policy=policy, jobs=[asks("base", 100), large])
    core.handle(admit(asks("f", *[90] * 3, rounds=9, mode=Mode.FREE)))
    core.handle(done(turn("f", agent="a2"), 100, 10))
    core.handle(done(turn("f", 1, agent="a2"), 9900, 10))
    for number in range(30):
        core.handle(done(turn("large", conversation=number)))
    for agent in ("a1", "a0"):
        core.handle(done(turn("f", agent=agent), 100, 10))
    assert list(core.view.capacity().workers["w"].needs) == [turn("base")]
    for _ in range(1000):
        assert core.handle() == []
    assert core.view.places_kept("m") < 300
    flying = deque([turn("base")])
    while flying:
        flying.extend(seated(core.handle(done(flying.popleft()))))
    assert set(core.view.of_all().values()) == {0}


def test_no_entry_is_left_by_each_look_at_a_group() -> None:
    """Nor of when its turns got ready."""
    core = core_of(ready(), group_by=GroupBy.ADAPTER, jobs=[asks("base", 100), asks("large", 950, conversations=2)])
    for _ in range(2000):
        assert core.handle() == []
    assert core.view.places_kept("m") < 100


# Whatever comes


class Load:
    """Random events for one core, and what has to hold after each of them."""

    def __init__(self, rng: Random, policy: str, group_by: GroupBy | None, mode: Mode) -> None:
        self.rng = rng
        self.mode = mode
        self.is_fifo = policy == "fifo" and group_by is None
        self.group_by = group_by
        self.core = SchedulingCore(POLICIES[policy], group_by)
        self.slots = {"w0": ("m", 3), "w1": ("m", 6), "w2": ("n", 4)}
        self.budgets: dict[str, int | None] = {}  # of workers that are ready
        self.jobs = 0
        self.flying: dict[TurnKey, str] = {}
        self.cut_off: set[TurnKey] = set()
        self.held: set[TurnKey] = set()
        self.seen: dict[TurnKey, int] = {}  # the first time that a turn got ready, and its place in that order
        self.lines: dict[tuple[str, ...], deque[TurnKey]] = {}  # of turns that got ready and were on no slot
        self.passed: Counter[TurnKey] = Counter()  # ready turns, and how many younger ones have started
        self.models: dict[TurnKey, str] = {}
        self.admitted: dict[JobId, Job] = {}
        self.ended: set[JobId] = set()

    def tell(self, *happened: events.Event) -> None:
        for action in self.core.handle(*happened):
            match action:
                case events.TurnIsReady():
                    self.note_ready(action.key)
                case events.StartTurn():
                    self.note_start(action)
                case events.CutOffTurn():
                    self.cut_off.add(action.key)
                    for key in [key for key in self.passed if key[:2] == action.key[:2]]:  # its conversation is over
                        self.forget(key)
                case events.DeferTurn():
                    self.held.add(action.key)
                case events.ConversationEnded():
                    for key in action.unspoken:
                        self.forget(key)
                case events.JobEnded():
                    self.ended.add(action.job_id)
                case _:
                    pass
        self.audit()

    def note_ready(self, key: TurnKey) -> None:
        if key in self.seen:
            return
        self.seen[key] = len(self.seen)
        agent = self.admitted[key.job_id].agents[int(key.agent_id[1:])]
        self.models[key] = agent.model
        line = (*key[:2], agent.model, (agent.adapter or "") if self.group_by else "")
        self.lines.setdefault(line, deque()).append(key)
        self.passed[key] = 0

    def note_start(self, action: events.StartTurn) -> None:
        key, worker = action.key, action.worker
        assert key not in self.flying
        assert worker in self.budgets
        self.flying[key] = worker
        on = [each for each, at in self.flying.items() if at == worker]
        assert len(on) <= self.slots[worker][1]
        if key in self.passed:  # on no slot before
            for line in self.lines.values():
                if key in line:
                    assert self.mode is not Mode.FREE or line[0] == key, "nobody overtakes in a conversation"
                    line.remove(key)
            del self.passed[key]
            for other in self.passed:
                if self.core.view.is_put_behind(other):
                    continue
                if self.models[other] == self.models[key] and self.seen[other] < self.seen[key]:
                    self.passed[other] += 1

    def forget(self, key: TurnKey) -> None:
        self.passed.pop(key, None)
        for line in self.lines.values():
            if key in line:
                line.remove(key)

    def audit(self) -> None:
        rooms = self.core.view.capacity().workers
        for worker in self.slots:
            on = {key for key, at in self.flying.items() if at == worker}
            assert (rooms[worker].needs.keys() if worker in rooms else set()) == on
        for model in ("m", "n"):
            workers = [worker for worker in self.budgets if self.slots[worker][0] == model]
            if workers and not any(at in workers for at in self.flying.values()):
                ready_turns = self.core.view.ready_turns(model)
                assert not {*ready_turns.queued, *ready_turns.suspects}, "somebody could start"
        assert self.core.check() == []
        slots = sum(slots for _, slots in self.slots.values())
        if self.is_fifo:
            assert all(times <= PASSES + slots for key, times in self.passed.items() if key not in self.held)

    def audit_room(self, before: set[TurnKey]) -> None:
        """Whoever has started had room, or is alone."""
        for worker in {at for key, at in self.flying.items() if key not in before}:
            budget, on = self.budgets[worker], [key for key, at in self.flying.items() if at == worker]
            assert budget is None or self.core.view.reserved(worker) <= budget or len(on) == 1

    def step(self) -> None:
        before = set(self.flying)
        names = ["admit", "open", "end", "end", "end", "end", "end", "close", "cancel", "hold", "correct", "correct"]
        getattr(self, self.rng.choice(names))()
        self.audit_room(before)

    def admit(self) -> None:
        needs = [self.rng.choice([70, 100, 300, 900, 4000]) for _ in range(self.rng.randint(1, 4))]
        job = asks(
            f"j{self.jobs}", *needs, conversations=self.rng.randint(1, 4), rounds=self.rng.randint(1, 3), mode=self.mode
        )
        agents = tuple(
            replace(each, model=self.rng.choice("mmn"), adapter=self.rng.choice([None, "x"])) for each in job.agents
        )
        self.jobs += 1
        self.admitted[job.id] = replace(job, agents=agents)
        self.tell(admit(self.admitted[job.id]))

    def open(self, worker: str | None = None) -> None:
        worker = worker or self.rng.choice(list(self.slots))
        model, slots = self.slots[worker]
        self.budgets[worker] = self.rng.choice([10, 400, 1000, 1000, 5000, None])
        shares = self.rng.random() < 0.5
        self.tell(replace(ready(worker, self.budgets[worker], slots=slots, model=model), shares_prefixes=shares))

    def close(self) -> None:
        """Lose a worker; as a rule the turns on it are told to be interrupted."""
        worker = self.rng.choice(list(self.slots))
        self.budgets.pop(worker, None)
        self.tell(events.WorkerNotReady(worker=worker, returns=self.rng.random() < 0.5))
        for key in [key for key, at in self.flying.items() if at == worker and self.rng.random() < 0.8]:
            self.land(key)
            self.tell(events.TurnInterrupted(key=key, trial=self.rng.choice([None, None, Trial.NEXT])))

    def end(self) -> None:
        if not self.flying:
            return
        key = self.rng.choice(list(self.flying))
        was_cut_off = self.land(key)
        answer = self.rng.choice([5, 50, 300])
        context = answer + self.rng.choice([10, 200, 900, 3000])
        seconds = self.rng.choice([None, 0.1, 5.0])
        self.tell(
            events.TurnCutOff(key=key)
            if was_cut_off
            else self.rng.choice(
                [
                    *[done(key, context, answer, seconds)] * 5,
                    done(key),
                    events.TurnRejected(key=key),
                    events.TurnInterrupted(key=key),
                    events.TurnFailed(key=key, reason="engine_rejected"),
                ]
            )
        )

    def land(self, key: TurnKey) -> bool:
        del self.flying[key]
        was_cut_off = key in self.cut_off
        self.cut_off.discard(key)
        return was_cut_off

    def cancel(self) -> None:
        if self.admitted and self.rng.random() < 0.5:
            self.tell(events.JobCancelled(job_id=self.rng.choice(list(self.admitted))))

    def hold(self) -> None:
        if self.held:
            self.tell(events.DeferralOver(key=self.rng.choice(sorted(self.held))))

    def correct(self) -> None:
        """Tell what turns take: some in flight, and some that are it no more, or never were."""
        known = [*self.flying, *self.seen, turn("never")]
        uses = {
            key: KvUse(prompt=self.rng.choice([10, 150, 800, 3000]), answer=self.rng.choice([0, 40, 400]))
            for key in self.rng.sample(known, k=min(4, len(known)))
        }
        seen = uses.keys() & self.flying.keys()
        self.tell(events.KvUseTold(uses=uses))
        for key in seen:
            need = self.core.view.capacity().workers[self.flying[key]].needs[key]
            assert 0 <= need.shared <= need.prompt == uses[key].prompt
            assert need.answer >= uses[key].answer

    def finish(self) -> None:
        """Let every turn that was admitted end; nothing of them is kept."""
        for worker in self.slots:
            self.open(worker)
        while self.flying:
            before = set(self.flying)
            key = self.rng.choice(list(self.flying))
            self.land(key)
            self.tell(done(key, 50, 10, 1.0))
            self.audit_room(before - {key})
        assert self.ended == set(self.admitted)
        assert set(self.core.view.of_all().values()) == {0}
        left = self.core.view.capacity()
        assert (left.passed, left.conversations, left.agents) == ({}, 0, 0)
        assert not any(room.needs for room in left.workers.values())
        assert (left.idle, left.kept, left.pressed) == ({}, frozenset(), frozenset())


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("group_by", [None, GroupBy.ADAPTER])
@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=25)
@given(rng=st.randoms(use_true_random=False), steps=st.integers(1, 80))
def test_whatever_comes_has_room_and_ends(
    policy: str, group_by: GroupBy | None, mode: Mode, rng: Random, steps: int
) -> None:
    """No worker is lent beyond its room or its slots, nothing waits for nothing, and every turn ends."""
    load = Load(rng, policy, group_by, mode)
    load.open("w0")
    for _ in range(steps):
        load.step()
    load.finish()


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("group_by", [None, GroupBy.ADAPTER])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_budget_that_holds_all_changes_nothing(policy: str, group_by: GroupBy | None, mode: Mode) -> None:
    """Action by action what a worker does whose slots bound it."""
    count = 0
    for seed in range(12):
        told = []
        for budget in (None, 10**9):
            load = Load(Random(seed), policy, group_by, mode)  # noqa: S311
            told.append(recorded(load, budget))
        assert told[0] == told[1]
        count += sum(len(seated(actions)) for actions in told[0])
    assert count > 500


def recorded(load: Load, budget: int | None) -> list[list[events.Action]]:
    """Return all that a core has answered, on workers of one budget."""
    told: list[list[events.Action]] = []
    handle = load.core.handle

    def recording(*happened: events.Event) -> list[events.Action]:
        bounded = [
            replace(event, kv_tokens=budget) if isinstance(event, events.WorkerReady) else event for event in happened
        ]
        told.append(handle(*bounded))
        return told[-1]

    load.core.handle = recording  # type: ignore[method-assign]
    load.audit_room = lambda before: None  # type: ignore[method-assign]  # noqa: ARG005
    for worker in load.slots:
        load.open(worker)
    for _ in range(60):
        load.step()
    load.finish()
    return told


def test_a_model_on_lanes_is_full_where_its_cache_is() -> None:
    """Turns wait though slots are free: told with those that wait, in the same decision, and no more once one fits."""
    core = SchedulingCore(POLICIES["fifo"], on_demand=("m",))
    core.handle(ready())
    core.handle(admit(asks("first", 700)))
    assert not core.view.waiting_on_demand()["m"].is_full
    core.handle(admit(asks("second", 700)))
    waiting = core.view.waiting_on_demand()["m"]
    assert (waiting.count, waiting.is_full) == (1, True)
    core.handle(ready("v"))
    assert core.view.waiting_on_demand()["m"].count == 0
