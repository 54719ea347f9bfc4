"""The house rules whose numbers may only shrink (tools/house_rules.py, tools/ceilings.toml)."""

import pytest

from tools.house_rules import MOST_LINES, Counts, count_fragments, excesses, large_classes, lowered


def counted(classes: dict[str, list[int]], fragments: int = 0, told: int = 0) -> Counts:
    words = {word: {"docs": 0} for word in ("nobody", "anew")}
    return {"classes": classes, "fragments": {"service": fragments}, "told": {"docs": told}, **words}


@pytest.mark.parametrize(
    ("now", "fault"),
    [
        ({"Old": [300, 10]}, None),
        ({"Old": [260, 10]}, None),
        ({"Old": [301, 10]}, "class Old: 301 lines and 10 methods; 300 and 10 at most"),
        ({"Old": [300, 26]}, "class Old: 300 lines and 26 methods; 300 and 10 at most"),
        ({}, "class Old is large no longer: take it off with tools/house_rules.py --lower"),
        ({"Old": [300, 10], "New": [251, 2]}, "class New: 251 lines and 2 methods; 250 and 25 at most"),
    ],
)
def test_the_list_of_large_classes_only_shrinks(now: dict[str, list[int]], fault: str | None) -> None:
    """No class on it grows, none joins it, and none stays without need."""
    assert list(excesses(counted(now), counted({"Old": [300, 10]}))) == [fault] * (fault is not None)


def test_a_class_is_large_by_lines_or_by_methods() -> None:
    """Properties and methods of the data model count as any other."""
    methods = "\n".join(f"    def f{number}(self): ..." for number in range(26))
    lines = "\n".join("    x = 1" for _ in range(MOST_LINES))
    text = f"class Small:\n    x = 1\n\nclass Many:\n{methods}\n\nclass Long:\n{lines}\n"
    assert large_classes(text) == {"Many": [27, 26], "Long": [251, 0]}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("x = 1  # of a request\n", 1),
        ("# That is it.\nx = 1\n", 1),
        ("# for which it waits\n", 1),
        ("# seconds\n# of a request\n", 0),
        ("x = 1  # seconds\n# of a request\n", 1),
        ("x = '# of a request'  # office hours\n", 0),
    ],
)
def test_comments_that_begin_as_fragments_are_counted(text: str, count: int) -> None:
    """A second line continues the first comment, and a string is no comment."""
    assert count_fragments(text) == count


def test_words_and_fragments_stay_under_their_ceilings() -> None:
    """A place without a ceiling may have none."""
    most = counted({}, fragments=2, told=3)
    assert list(excesses(counted({}, fragments=2, told=3), most)) == []
    assert len(list(excesses(counted({}, fragments=3, told=4), most))) == 2
    assert len(list(excesses(counted({}) | {"anew": {"tests": 1}}, most))) == 1


def test_ceilings_are_only_lowered() -> None:
    """To the present counts; a count above its ceiling stays a fault."""
    most = counted({"Old": [300, 30], "Gone": [300, 30]}, fragments=5, told=3)
    now = counted({"Old": [290, 31], "New": [300, 3]}, fragments=2, told=9)
    assert lowered(now, most) == counted({"Old": [290, 30]}, fragments=2, told=3)
