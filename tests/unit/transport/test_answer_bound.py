"""The bound of an answer has several names and one meaning (specification, "Generation parameters")."""

import pytest

from transport.answer_bound import bound_of, laid_over
from transport.client import is_short


@pytest.mark.parametrize(
    ("earlier", "later", "both"),
    [
        ({"max_tokens": 5}, {"n_predict": 40}, {"n_predict": 40}),
        ({"n_predict": 5, "seed": 1}, {"max_completion_tokens": 7}, {"seed": 1, "max_completion_tokens": 7}),
        ({"max_tokens": 5}, {"max_tokens": None, "seed": None}, {"max_tokens": 5, "seed": None}),
        ({"n_predict": 5}, {"max_tokens": None}, {"n_predict": 5}),
        ({"max_tokens": None}, {}, {}),
        ({"max_tokens": 5}, {"n_predict": -1}, {"n_predict": -1}),
    ],
)
def test_a_later_bound_replaces_an_earlier_one_of_any_name(
    earlier: dict[str, object], later: dict[str, object], both: dict[str, object]
) -> None:
    """Null counts as not given: it neither bounds nor removes a bound."""
    assert laid_over(earlier, later) == both


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_each_name_is_read(name: str) -> None:
    """A number from 1 up bounds; other values do not."""
    assert [bound_of({name: each}) for each in (8, 8.0, -1, 0, None, True, "8", 0.5, float("nan"), 1e300)] == [
        *(8, 8),
        *[None] * 8,
    ]
    assert (is_short({name: 8}), is_short({name: 800}), is_short({name: -1})) == (True, False, False)
