"""A covering array over a job's options: rows in which each pair of levels that a job may have occurs."""

from collections.abc import Mapping, Sequence
from itertools import combinations

from allpairspy import AllPairs

from tests.harness.drawn_jobs import FACTORS, refusal_of

Pair = frozenset[tuple[str, str]]


def make_rows() -> list[dict[str, str]]:
    """Return the rows; a pair that a job's parser refuses is in none."""
    names = list(FACTORS)
    pairs = AllPairs([list(levels) for levels in FACTORS.values()], filter_func=lambda row: _may_be(names, row))
    rows = [dict(zip(names, row, strict=True)) for row in pairs]
    left = {pair for pair in every_pair() if refusal_of(dict(pair)) is None}.difference(*map(pairs_of, rows))
    while left:  # those that the library gives up on, beside pairs that may not be
        row = _row_around(min(left, key=sorted), left)
        rows.append(row)
        left -= pairs_of(row)
    return rows


def _row_around(pair: Pair, left: set[Pair]) -> dict[str, str]:
    """Return a row with a pair and as many more missing ones as are found level by level."""
    row = dict(pair)
    for name in FACTORS:
        if name not in row:
            may_be = [{**row, name: level} for level in FACTORS[name] if refusal_of({**row, name: level}) is None]
            row = max(may_be, key=lambda each: len(left & pairs_of(each)))
    return {name: row[name] for name in FACTORS}


def _may_be(names: Sequence[str], row: Sequence[str]) -> bool:
    return refusal_of(dict(zip(names, row, strict=False))) is None


def pairs_of(row: Mapping[str, str]) -> set[Pair]:
    """Return the pairs of levels in a row."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def every_pair() -> set[Pair]:
    """Return all pairs of levels, refused ones too."""
    levels = [(name, level) for name, levels in FACTORS.items() for level in levels]
    return {frozenset((one, other)) for one, other in combinations(levels, 2) if one[0] != other[0]}
