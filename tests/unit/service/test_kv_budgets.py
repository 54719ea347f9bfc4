"""Reservations of a KV cache: their sum, shared prefixes, and corrections for turns in flight."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from service.conversations.job.job import Agent, Job, JobId, Mode, TurnKey
from service.scheduling.core import events
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.kv_budgets import KvBudgets, KvNeed, KvUse
from service.scheduling.core.queue.affinity import PromptReading
from service.scheduling.core.room_keeper import GROWTH
from service.scheduling.core.turn_needs import SHARED, TEMPLATE_TOKENS, PromptLengths, TurnNeeds
from tests.harness.capacity import EMPTY, MOST, admit, asks, core_of, done, names, read, ready, reserved, speaker, turn

PREFIXES = (None, (JobId("j"), "a0"), (JobId("j"), "a1"))


def told(*uses: tuple[TurnKey, int, int]) -> events.KvUseTold:
    return events.KvUseTold(uses={key: KvUse(prompt=prompt, answer=answer) for key, prompt, answer in uses})


# The sum


@st.composite
def needs(draw: st.DrawFn) -> KvNeed:
    """Return what a turn reserves: without a prefix nothing of it is shared."""
    prompt, prefix = draw(st.integers(0, 300)), draw(st.sampled_from(PREFIXES))
    shared = 0 if prefix is None else draw(st.integers(0, prompt))
    return KvNeed(prompt=prompt, answer=draw(st.integers(0, 300)), shared=shared, prefix=prefix)


STEPS = st.lists(st.tuples(st.sampled_from("wv"), st.integers(0, 5), st.none() | needs()), max_size=40)


@given(STEPS, needs(), st.integers(1, 3000), st.sampled_from((1, 16, 128)))
def test_the_reserved_sum_equals_a_recount_of_all_reservations(
    steps: list[tuple[str, int, KvNeed | None]], one_more: KvNeed, budget: int, block: int
) -> None:
    """The recount follows any reservations, corrections and releases, in whole blocks; a shared prefix counts once."""
    kv, kept = KvBudgets(), dict[tuple[str, TurnKey], KvNeed]()
    kv.open("w", budget, block)
    kv.open("v", None, block)

    def blocks(need: KvNeed) -> tuple[int, int]:
        shared = need.shared // block
        return shared, math.ceil((need.tokens - shared * block) / block)

    def total(worker: str) -> int:
        here = [need for (at, _), need in kept.items() if at == worker]
        shared = {each: max((blocks(n)[0] for n in here if n.prefix == each), default=0) for each in PREFIXES[1:]}
        return block * (sum(blocks(need)[1] for need in here) + sum(shared.values()))

    for worker, number, need in steps:
        key = turn("j", number)
        if need is None:
            kept.pop((worker, key), None)
            kv.free_room(worker, key)
        else:
            kept[worker, key] = need
            kv.reserve(worker, key, need)
        assert (kv.reserved("w"), kv.reserved("v")) == (total("w"), total("v"))
        assert kv.need_of(worker, key) == need
    is_alone = not any(at == "w" for at, _ in kept)
    has_room = kv.fits("w", one_more)
    kept["w", turn("more")] = one_more
    assert has_room is (is_alone or total("w") <= budget)
    for worker, key in kept:
        kv.free_room(worker, key)
    assert not kv.workers


def test_a_shared_prefix_is_reserved_once_on_each_worker() -> None:
    """It takes as much as the longest turn that shares it; a turn that leaves frees only what no other holds."""
    kv = KvBudgets()
    kv.open("w", 1000)
    long, short = (KvNeed(prompt=500, answer=10, shared=shared, prefix=PREFIXES[1]) for shared in (400, 300))
    kv.reserve("w", turn("a"), short)
    assert kv.reserved("w") == 510
    kv.reserve("w", turn("b"), long)
    assert kv.reserved("w") == 510 + 110 + 100
    assert kv.fits("w", replace(long, answer=180))
    assert not kv.fits("w", replace(long, answer=181))
    assert not kv.fits("w", replace(long, prefix=PREFIXES[2]))
    kv.reserve("v", turn("c"), long)
    assert kv.reserved("v") == 510
    kv.free_room("w", turn("b"))
    assert kv.reserved("w") == 510
    kv.free_room("w", turn("a"))
    assert kv.reserved("w") == 0
    assert kv.need_of("w", turn("a")) is None


def test_a_turn_reserves_whole_blocks() -> None:
    """Its last block is its own even if it is not full, and only full blocks of a prefix are shared."""
    kv = KvBudgets()
    kv.open("w", 16 * 5, 16)
    need = KvNeed(prompt=20, answer=10, shared=18, prefix=PREFIXES[1])
    kv.reserve("w", turn("a"), need)
    assert kv.reserved("w") == 16 + 16
    kv.reserve("w", turn("b"), need)
    assert kv.reserved("w") == 16 + 2 * 16
    assert kv.fits("w", KvNeed(prompt=20, answer=12))
    assert not kv.fits("w", KvNeed(prompt=20, answer=13))


# Counts of prompts by an engine


def test_a_counted_prompt_replaces_its_estimate() -> None:
    """It does so for its round, agent and conversation alone, and changes when it is reported again."""
    needs, agent = TurnNeeds(), replace(speaker("a0"), system="s" * 400)
    for key in (turn("j", 3), turn("j", 3, conversation=1)):
        needs.learn(replace_round(key, 2), agent, EMPTY, read(900, 50))
    before = needs.prompt_tokens(turn("j", 3), agent, EMPTY)
    assert before == 900 + TEMPLATE_TOKENS
    for counted in (1234, 555):
        needs.tell(turn("j", 3), agent, EMPTY, counted)
        assert needs.prompt_tokens(turn("j", 3), agent, EMPTY) == counted
        assert needs.need(turn("j", 3), agent, EMPTY, MOST).prompt == counted
    assert needs.prompt_tokens(turn("j", 4), agent, EMPTY) == before
    assert needs.prompt_tokens(turn("j", 3, conversation=1), agent, EMPTY) == before
    needs.start(turn("j", 3), agent, hears_all=False)
    needs.learn(turn("j", 3), agent, EMPTY, read(700, 30))
    assert needs.prompt_tokens(turn("j", 3), agent, EMPTY) == 700 + TEMPLATE_TOKENS


def replace_round(key: TurnKey, number: int) -> TurnKey:
    return TurnKey(*key[:3], number)


@pytest.mark.parametrize("times", [0, 1, 5])
def test_a_counted_first_prompt_is_learned_once(times: int) -> None:
    """It may be reported while it is read, several times, or at the turn's end alone."""
    needs, agent = TurnNeeds(), speaker("a0")

    def first(chars: int) -> int:
        return needs.prompt_tokens(turn("j", conversation=9), agent, replace(EMPTY, prompt="p" * chars))

    once = PromptLengths()
    for number, (chars, tokens) in enumerate([(100, 300), (200, 400), (400, 900), (700, 950)]):
        key, conversation = turn("j", conversation=number), replace(EMPTY, prompt="p" * chars)
        once.add(chars, tokens)
        told_times = times * (number + 1) if number != 2 else 0  # with counts so unequal, counting twice would show
        for _ in range(told_times):
            needs.tell(key, agent, conversation, tokens)
        if told_times:
            assert first(chars) == once.expected(chars)  # before the turn has ended
        needs.learn(key, agent, conversation, read(tokens + 10, 10))
        needs.tell(replace_round(key, 1), agent, conversation, 5000)
        assert [first(each) for each in (0, 300, 2000)] == [once.expected(each) for each in (0, 300, 2000)]


def test_a_counted_first_prompt_is_learned_without_the_words_of_others() -> None:
    """Other words join the prompts of other conversations, before anything was said."""
    needs = TurnNeeds()
    needs.start(turn("j"), speaker("a0"), hears_all=False)
    needs.learn(turn("j"), speaker("a0"), EMPTY, read(1000, 70))
    late = replace(speaker("a1"), waits_for=frozenset({"a0"}))
    needs.start(turn("j", agent="a1"), late, hears_all=False)
    needs.tell(turn("j", agent="a1"), late, EMPTY, 270)
    assert needs.prompt_tokens(turn("j", agent="a1", conversation=1), late, EMPTY) == 200


def test_counted_prompts_are_forgotten_with_their_conversation() -> None:
    """They are forgotten at the turn's end too; what was learned from them stays until the job ends."""
    needs = TurnNeeds()
    needs.tell(turn("j"), speaker("a0"), EMPTY, 400)
    needs.learn(turn("j"), speaker("a0"), EMPTY, read(410, 10))
    assert needs.prompt_tokens(turn("j"), speaker("a0"), EMPTY) == 410 + TEMPLATE_TOKENS
    needs.tell(turn("j", 1), speaker("a0"), EMPTY, 700)
    needs.forget_conversation(JobId("j"), "c0")
    assert needs.conversations == 0
    assert needs.prompt_tokens(turn("j", 1), speaker("a0"), EMPTY) == 400
    needs.forget_job(JobId("j"), ["a0"])
    assert needs.agents == 0
    assert needs.prompt_tokens(turn("j", 1), speaker("a0"), EMPTY) == TEMPLATE_TOKENS


# What prompts begin with


def had(conversation: int, cached: int, prompt: int = 500, number: int = 0) -> tuple[TurnKey, PromptReading]:
    """Return a turn, and what its engine read of its prompt."""
    reading = PromptReading(fresh_tokens=prompt - cached, seconds=1.0, context_tokens=prompt + 10, answer_tokens=10)
    return turn("j", number, conversation=conversation), reading


def test_the_shared_prefix_is_the_smallest_of_the_last_five_cache_hits() -> None:
    """It is never longer than the prompt. Later prompts of a conversation hit their own words and teach nothing."""
    needs, agent = TurnNeeds(), speaker("a0")

    def shared() -> int:
        need = needs.need(turn("j", conversation=99), agent, EMPTY, MOST)
        assert (need.prefix == (JobId("j"), "a0")) is bool(need.shared)
        assert (need.prefix is None) is not bool(need.shared)
        return need.shared

    for number, cached in enumerate([260, 210, 300, 220]):
        needs.learn(had(number, cached)[0], agent, EMPTY, had(number, cached)[1])
        key, again = had(number, 490, number=1)
        needs.learn(key, agent, EMPTY, again)
        assert shared() == 0
    for number, (cached, expected) in enumerate([(230, 210), (240, 210), (5, 5), (240, 5)], start=4):
        needs.learn(had(number, cached)[0], agent, EMPTY, had(number, cached)[1])
        assert shared() == expected
    for number in range(10, 10 + SHARED):
        needs.learn(had(number, 495)[0], agent, EMPTY, had(number, 495)[1])
    assert shared() == 495
    needs.tell(turn("j", conversation=99), agent, EMPTY, 480)
    assert shared() == 480
    other = needs.need(turn("j", agent="a1"), speaker("a1"), EMPTY, MOST)
    assert (other.shared, other.prefix) == (0, None)


@pytest.mark.parametrize("is_sharing", [True, False])
def test_turns_whose_prompts_begin_alike_start_together(is_sharing: bool) -> None:
    """They do where the engine stores the beginning once; in a pool of llama.cpp each has its own copy."""
    core = core_of(replace(ready(slots=3), shares_prefixes=is_sharing))
    core.handle(admit(replace(asks("j", 0, conversations=12), agents=(speaker("a0", 50),))))
    for number in range(SHARED):
        core.handle(events.TurnCompleted(key=had(number, 400)[0], reading=had(number, 400)[1]))
    core.handle(events.TurnCompleted(key=turn("j", conversation=5)), events.Paused())
    for number in range(6, 8):
        core.handle(done(turn("j", conversation=number)))
    assert reserved(core) == 0
    core.handle(events.Unpaused())
    assert (len(core.view.capacity().workers["w"].needs), reserved(core)) == (
        (3, 400 + 3 * 110) if is_sharing else (1, 510)
    )


# What turns in flight are seen to take


def prompter(name: str, chars: int, most: int = 50) -> Job:
    """Return a job of one turn, with an estimate of half a token per character and the template's tokens."""
    agent = Agent(id="a0", role="", model="m", system="s" * chars, params={"max_tokens": most})
    return replace(asks(name, 0), agents=(agent,))


def test_a_turn_that_takes_more_leaves_no_room_for_the_next() -> None:
    """The counted prompt is reserved, and the bound of its answer stays reserved."""
    core = core_of(ready(), jobs=[prompter("j", 400)])
    assert reserved(core) == 264 + 50
    assert core.handle(told((turn("j"), 700, 3))) == []
    assert reserved(core) == 750
    assert names(core.handle(admit(asks("next", 251)))) == []
    assert names(core.handle(admit(asks("small", 250)))) == ["small"]


def test_a_turn_that_takes_less_lets_the_next_start_at_once() -> None:
    """No turn has to end first."""
    core = core_of(ready(), jobs=[prompter("j", 1600), asks("next", 600)])
    assert reserved(core) == 864 + 50
    assert names(core.handle(told((turn("j"), 351, 0)))) == []
    assert names(core.handle(told((turn("j"), 350, 0)))) == ["next"]
    assert reserved(core) == 1000


def test_an_answer_longer_than_expected_reserves_more() -> None:
    """The reservation grows with it; a shorter answer gives nothing back before its end."""
    core = core_of(ready(), jobs=[prompter("j", 400, most=100)])
    for answer, expected in ((0, 100), (68, 100), (69, 101), (300, 332), (310, 342), (10, 342)):
        core.handle(told((turn("j"), 264, answer)))
        assert reserved(core) == 264 + expected
        assert expected in (100, answer + GROWTH, 342)
    core.handle(done(turn("j")))
    assert reserved(core) == 0


def test_a_turn_that_runs_again_reserves_its_counted_prompt() -> None:
    """Its engine has counted it, whatever the estimate says, so it does not start where it has no room again."""
    core = core_of(ready(), jobs=[asks("old", 500), prompter("j", 400)])
    core.handle(told((turn("j"), 600, 0)))
    assert seated(core, events.TurnInterrupted(key=turn("j"))) == []
    assert reserved(core) == 500
    assert seated(core, done(turn("old"))) == ["j"]
    assert reserved(core) == 650


def seated(core: SchedulingCore, *happened: events.Event) -> list[str]:
    return names(core.handle(*happened))


@pytest.mark.parametrize("mode", Mode)
def test_a_late_count_for_an_ended_turn_changes_nothing(mode: Mode) -> None:
    """The turn has ended, waits for its slot, or belongs to a job that was never here."""
    core = core_of(ready(slots=1), jobs=[asks("j", 100, rounds=2, mode=mode), asks("waits", 100)])
    core.handle(done(turn("j"), 100, 10))
    before = core.view.capacity()
    waiting = turn("waits") if turn("j", 1) in before.workers["w"].needs else turn("j", 1)
    told_late = told((turn("j"), 900, 9), (waiting, 900, 9), (turn("never"), 900, 9))
    assert core.handle(told_late) == []
    assert core.view.capacity() == before
    assert waiting not in before.workers["w"].needs


def test_a_turn_whose_worker_was_lost_is_corrected_there() -> None:
    """Its reservation stands until its end is reported."""
    core = core_of(ready("w"), ready("v"), jobs=[asks("j", 400)])
    core.handle(events.WorkerNotReady(worker="w"), events.WorkerNotReady(worker="v"))
    core.handle(told((turn("j"), 500, 0)))
    assert reserved(core, "w") + reserved(core, "v") == 500 + 400 - TEMPLATE_TOKENS
    core.handle(ready("w"), ready("v"), done(turn("j")))
    assert (reserved(core, "w"), reserved(core, "v")) == (0, 0)


def test_a_shared_prefix_is_no_longer_than_the_counted_prompt() -> None:
    """Otherwise the reservation would be negative."""
    core = core_of(replace(ready(slots=1), shares_prefixes=True))
    core.handle(admit(replace(asks("j", 0, conversations=SHARED + 1), agents=(speaker("a0", 40),))))
    for number in range(SHARED):
        core.handle(events.TurnCompleted(key=had(number, 450)[0], reading=had(number, 450)[1]))
    core.handle(ready(slots=2), admit(asks("x", 65)))
    last, prefix = turn("j", conversation=SHARED), (JobId("j"), "a0")
    needs = core.view.capacity().workers["w"].needs
    assert (needs[last].prompt, needs[last].shared, needs[last].prefix) == (500, 450, prefix)
    core.handle(told((last, 20, 0)))
    needs = core.view.capacity().workers["w"].needs
    assert needs[last] == KvNeed(prompt=20, answer=GROWTH, shared=20, prefix=prefix)
    assert reserved(core) == 20 + GROWTH + 65
