"""Chains of recorded tokens: stored once, and read as rows (specification, "Chains")."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from service.conversations.record.rollout import Reward, Row, RowPlace, SpokenTokens, chains_of, rows_of
from service.conversations.record.token_arrays import ChainEnd, RecordedMessage, add_to_chain, pack, unpack
from workers.requests.tokens import Lacking, RecordedTokens

PLACE = RowPlace(job="j", conversation="c", state="completed", first=100)
FEW = st.lists(st.integers(0, 9), max_size=4)
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=20)


def tokens(prompt: Sequence[int], ids: Sequence[int], **fields: Any) -> RecordedTokens:  # noqa: ANN401 - fields
    logprobs = [-0.5] * len(ids)
    return RecordedTokens(
        **{"prompt": prompt, "ids": ids, "logprobs": logprobs, "versions": [(1, 0, len(ids))], **fields}
    )


def spoken(*turns: list[RecordedTokens]) -> list[SpokenTokens]:
    """Return turns of one agent as the store has them."""
    end: ChainEnd | None = None
    found = []
    for number, messages in enumerate(turns):
        made, end = add_to_chain(end, messages, "raw")
        found.append(SpokenTokens(agent="a", round=number, messages=unpack(pack(made))))
    return found


def rows(turns: list[SpokenTokens], **rewards: Reward) -> list[Row]:
    return [row for row, _ in rows_of(PLACE, chains_of(turns), rewards, lambda _: 4)]


def test_a_turn_stores_only_the_ids_that_it_adds() -> None:
    """The prompt before, and the answer to it, are there already."""
    first, second = spoken([tokens([1, 2], [3])], [tokens([1, 2, 3, 4, 5], [6])])
    assert [(each.begins_at, each.prompt) for each in (*first.messages, *second.messages)] == [(0, [1, 2]), (3, [4, 5])]
    (row,) = rows([first, second])
    assert (row.prompt_ids, row.completion_ids, row.mask) == ([1, 2], [3, 4, 5, 6], [1, 0, 0, 1])
    assert row.logprobs == [-0.5, None, None, -0.5]
    assert row.versions == [1, None, None, 1]
    assert (row.behind, row.rounds, row.number) == ((3, 3), (0, 1), 100)


def test_messages_of_one_turn_are_one_chain() -> None:
    """Each call of a tool ends a message; its result is only read."""
    (row,) = rows(spoken([tokens([1], [2, 3]), tokens([1, 2, 3, 9], [4])]))
    assert (row.completion_ids, row.mask, row.rounds) == ([2, 3, 9, 4], [1, 1, 0, 1], (0, 0))


def test_a_prompt_that_differs_in_one_id_begins_a_chain() -> None:
    """It is never joined to tokens that the model has not read."""
    found = rows(spoken([tokens([1, 2], [3])], [tokens([1, 2, 8, 4], [6])], [tokens([1, 2, 8, 4, 6], [7])]))
    assert [(row.chain, row.rounds, row.prompt_ids, row.completion_ids) for row in found] == [
        (0, (0, 0), [1, 2], [3]),
        (1, (1, 2), [1, 2, 8, 4], [6, 7]),
    ]
    assert [row.number for row in found] == [100, 101]


def test_a_shorter_prompt_begins_a_chain() -> None:
    """A memory may have cut it."""
    assert [row.rounds for row in rows(spoken([tokens([1, 2], [3])], [tokens([1], [3])]))] == [(0, 0), (1, 1)]


def test_nothing_continues_ids_that_are_not_whole() -> None:
    """What is not known cannot be compared."""
    broken = tokens([1, 2], [3], partial=(Lacking.IDS,))
    found = rows(spoken([tokens([1], [2])], [broken], [tokens([1, 2, 3], [4])]))
    assert [(row.rounds, row.partial) for row in found] == [((0, 1), ["ids"]), ((2, 2), [])]
    lost = SpokenTokens(agent="a", round=1, messages=[], partial=["store"])
    first, last = spoken([tokens([1], [2])])[0], spoken([tokens([1, 2], [4])])[0]
    assert [(row.rounds, row.partial) for row in rows([first, lost, last])] == [
        ((0, 0), []),
        ((1, 1), ["store"]),
        ((0, 0), []),
    ]


def test_a_row_without_logprobs_has_none() -> None:
    """They were not wanted; that is no fault of the record."""
    (row,) = rows(spoken([tokens([1], [2], logprobs=None)]))
    assert (row.logprobs, row.partial) == (None, [])


def test_logprobs_after_a_constraint_are_named() -> None:
    """They are not the model's own; a chain that has both kinds says so."""
    masked = tokens([1], [2], is_masked=True)
    assert rows(spoken([masked]))[0].logprobs_mode == "constrained"
    assert rows(spoken([masked], [tokens([1, 2], [3])]))[0].logprobs_mode == "mixed"
    assert rows(spoken([tokens([1], [2])]))[0].logprobs_mode == "raw"


def test_an_agents_own_reward_comes_first() -> None:
    """The conversation's is for all others."""
    turns = spoken([tokens([1], [2])])
    assert rows(turns, a=Reward(reward=1.0), **{"": Reward(reward=2.0)})[0].reward == 1.0
    assert rows(turns, **{"": Reward(reward=2.0)})[0].reward == 2.0
    assert rows(turns)[0].reward is None


@given(
    st.lists(
        st.builds(
            RecordedMessage,
            begins_at=st.integers(0, 10),
            prompt=IDS,
            ids=st.just([1, 2, 3]),
            logprobs=st.none() | st.just([-0.25, None, -1.5]),
            versions=st.lists(st.just((1, 0, 3)), max_size=1),
            stop_reason=st.none() | st.text(max_size=5),
            params=st.dictionaries(st.text(max_size=5), st.integers() | st.text() | st.none(), max_size=3).map(
                lambda given: {
                    name: value for name, value in given.items() if not isinstance(value, int) or abs(value) < 2**63
                }
            ),
            mode=st.just("raw"),
            partial=st.just(()) | st.just((Lacking.LOGPROBS,)),
        ),
        max_size=4,
    )
)
@settings(max_examples=100, deadline=None)
def test_what_is_packed_comes_back(messages: list[RecordedMessage]) -> None:
    """Every id, and which tokens have no logprob."""
    found = unpack(pack(messages))
    assert [(each.prompt, each.ids, each.logprobs, each.params) for each in found] == [
        (each.prompt, each.ids, each.logprobs, each.params) for each in messages
    ]
    assert [(each.begins_at, each.partial, each.stop_reason) for each in found] == [
        (each.begins_at, each.partial, each.stop_reason) for each in messages
    ]


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=4), st.lists(st.integers(0, 9), max_size=4)), max_size=6)
)
@settings(max_examples=200, deadline=None)
def test_rows_hold_each_written_token_once(turns: list[tuple[list[int], list[int]]]) -> None:
    """Whatever the prompts are, and wherever the chain breaks."""
    made = [[tokens(prompt, ids)] for prompt, ids in turns]
    found = rows(spoken(*made))
    written = [id_ for row in found for id_, mask in zip(row.completion_ids, row.mask, strict=True) if mask]
    assert written == [id_ for _, ids in turns for id_ in ids]
    whole = [[*prompt, *ids] for prompt, ids in turns]
    for row in found:
        assert [*row.prompt_ids, *row.completion_ids] == whole[row.rounds[1]]
