"""The number of files that a request enters only shrinks: tests/data/net/walks lists the files of each walk.

``RENEW_FROZEN=1 pytest tests/behaviour/test_walk_counts.py`` writes shorter lists, or those of files that have moved. A
walk that has to grow is a decision of its own: delete its list, renew, and give the reason in the commit.
"""

from tests.harness.frozen import shrinking_list
from tests.harness.walks import walks_as_files


def test_a_walk_enters_no_more_files_than_before() -> None:
    """A reader has to open each file on the way."""
    for name, now in walks_as_files().items():
        frozen = shrinking_list(f"walks/{name}.txt", now)
        added, gone = sorted({*now} - {*frozen}), sorted({*frozen} - {*now})
        assert len(now) <= len(frozen), f"{name}: {len(now)} files, not {len(frozen)}; new ones are {added}"
        assert (added, gone) == ([], []), f"{name}: the list is out of date: renew it with RENEW_FROZEN=1"
