"""The tokens that a turn is expected to take of a KV cache, learned from its agent and its conversation."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from service.conversations.job.job import JobId, Mode, TurnKey
from service.conversations.talk.discussion import Discussion
from service.scheduling.core import events
from service.scheduling.core.turn_needs import (
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
from tests.harness.capacity import EMPTY, MOST, admit, asks, core_of, done, read, ready, seated, speaker, turn


def learned(needs: TurnNeeds, answers: Sequence[int], agent: str = "a0", context: int = 0) -> None:
    for number, answer in enumerate(answers):
        needs.learn(turn("j", number, agent=agent), speaker(agent), EMPTY, read(context or answer, answer))


def test_a_first_prompt_is_estimated_from_its_characters() -> None:
    """Half a token per character of system prompt and topic until prompts were counted, and the template's tokens."""
    agent, talk = replace(speaker("a0"), system="s" * 300), replace(EMPTY, prompt="p" * 101)
    assert TurnNeeds().prompt_tokens(turn("j"), agent, talk) == round(401 * TOKENS_A_CHAR) + TEMPLATE_TOKENS
    assert TurnNeeds().prompt_tokens(turn("j"), speaker("a0"), EMPTY) == TEMPLATE_TOKENS


def test_a_first_prompt_includes_the_words_of_others() -> None:
    """An agent that joins late reads all of them."""
    needs = TurnNeeds()
    learned(needs, [30, 40])
    assert needs.prompt_tokens(turn("j", agent="a1"), speaker("a1"), EMPTY) == 70 + TEMPLATE_TOKENS
    assert needs.prompt_tokens(turn("j", agent="a1", conversation=1), speaker("a1"), EMPTY) == TEMPLATE_TOKENS
    assert needs.prompt_tokens(turn("k", agent="a1"), speaker("a1"), EMPTY) == TEMPLATE_TOKENS


def test_a_later_prompt_is_the_last_context_and_the_words_since() -> None:
    """The engine has counted the context, whatever its characters suggest."""
    needs, agent = TurnNeeds(), replace(speaker("a0"), system="s" * 9000)
    needs.start(turn("j"), agent, hears_all=True)
    needs.learn(turn("j"), agent, EMPTY, read(700, 50))
    assert needs.prompt_tokens(turn("j", 1), agent, EMPTY) == 700 + TEMPLATE_TOKENS
    for other, answer in (("a1", 20), ("a2", 5)):
        needs.start(turn("j", agent=other), speaker(other), hears_all=True)
        needs.learn(turn("j", agent=other), speaker(other), EMPTY, read(900, answer))
    assert needs.prompt_tokens(turn("j", 1), agent, EMPTY) == 725 + TEMPLATE_TOKENS
    assert needs.prompt_tokens(turn("j", 1, agent="a1"), speaker("a1"), EMPTY) == 905 + TEMPLATE_TOKENS
    assert needs.prompt_tokens(turn("j", 1, agent="a2"), speaker("a2"), EMPTY) == 900 + TEMPLATE_TOKENS


@pytest.mark.parametrize("bound", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_an_answer_reserves_its_bound_until_enough_answers_are_known(bound: str) -> None:
    """The agent's own bound goes before the worker's; an invalid one is ignored."""
    bounded = replace(speaker("a0"), params={bound: 70})
    assert TurnNeeds().answer_tokens(turn("j"), bounded, MOST) == 70
    for nothing in (-1, 0, None, "many"):
        unbounded = replace(speaker("a0"), params={bound: nothing})
        assert TurnNeeds().answer_tokens(turn("j"), unbounded, MOST) == MOST
    assert TurnNeeds().need(turn("j"), bounded, EMPTY, MOST).tokens == TEMPLATE_TOKENS + 70


def test_an_answer_is_expected_to_be_as_long_as_those_before() -> None:
    """As long as nearly all of that agent's answers, once there are enough; never longer than its bound."""
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
    """A single long answer does not set the expectation for fifty turns."""
    needs = TurnNeeds()
    learned(needs, [10] * 19 + [400])
    assert needs.answer_tokens(turn("j"), speaker("a0"), MOST) == 400  # one of twenty is no less than the quantile
    learned(needs, [10])
    assert needs.answer_tokens(turn("j"), speaker("a0"), MOST) == 10


@settings(max_examples=30)
@given(st.integers(0, 3 * NEWEST), st.randoms(use_true_random=False))
def test_only_the_newest_answers_count(count: int, rng: Random) -> None:
    """The test compares with a list that is sorted each time."""
    lengths, answers = AnswerLengths(), [rng.randint(0, 50) for _ in range(count)]
    for place, answer in enumerate(answers):
        lengths.add(answer)
        newest = sorted(answers[: place + 1][-NEWEST:])
        expected = newest[min(len(newest) - 1, int(QUANTILE * len(newest)))] if len(newest) >= LEAST else None
        assert lengths.expected == expected


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000)), min_size=1, max_size=12), st.integers(0, 9000))
def test_first_prompt_lengths_are_fitted_by_least_squares(prompts: list[tuple[int, int]], chars: int) -> None:
    """The test compares with a textbook's sums; a character takes between zero and four tokens."""
    lengths = PromptLengths()
    for known in prompts:
        lengths.add(*known)
    mean_chars, mean_tokens = (sum(each) / len(prompts) for each in zip(*prompts, strict=True))
    spread = sum((each - mean_chars) ** 2 for each, _ in prompts)
    together = sum((each - mean_chars) * (tokens - mean_tokens) for each, tokens in prompts)
    rate = min(MOST_A_CHAR, max(0.0, together / spread)) if spread else TOKENS_A_CHAR
    assert lengths.expected(chars) == pytest.approx(max(1, mean_tokens + (chars - mean_chars) * rate), abs=0.51)


def test_first_prompts_of_an_agent_estimate_its_next_ones() -> None:
    """They include its tools and template, without others' words; later prompts teach nothing."""
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


def test_estimates_are_forgotten_with_their_conversation_or_job() -> None:
    """A conversation's words go with its end, an agent's answers with its job; others' stay."""
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


@pytest.mark.parametrize("mode", [Mode.ROUNDS, Mode.FREE])
@settings(max_examples=50)
@given(
    waits=st.lists(st.sets(st.integers(0, 3), max_size=2), min_size=4, max_size=4),
    slots=st.integers(1, 6),
    rng=st.randoms(use_true_random=False),
)
def test_a_reservation_equals_what_the_prompt_takes(mode: Mode, waits: list[set[int]], slots: int, rng: Random) -> None:
    """The reservation is compared with what the agent is shown, in a round or at once, whoever spoke at the same time.

    Besides the template, only words of its own round are counted in excess: those of agents it does not wait for.
    """
    own = 300  # tokens of a system prompt, unknown to any estimate before a first prompt is counted
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
        return own + sum(len(each.text or "") for each in heard)

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
