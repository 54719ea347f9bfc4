"""Numbers of requests to an MCP server, over an upgrade in place."""

from workers.tools.stdio import MessageIds


def test_the_first_program_uses_its_own_numbers() -> None:
    """Messages pass unchanged, and the highest number is known."""
    ids = MessageIds()
    assert [ids.told(number) for number in (1, 2)] == [1, 2]
    assert (ids.own(2), ids.last) == (2, 2)
    assert ids.cancelled({"requestId": 2, "reason": "r"}) == {"requestId": 2, "reason": "r"}


def test_the_next_program_goes_on_after_the_last_number() -> None:
    """Requests, their cancels and answers are all counted from there; a server may answer with a string."""
    ids = MessageIds(base=7)
    assert ids.last == 7  # a program that asks nothing passes the number on
    assert [ids.told(number) for number in (1, 2)] == [8, 9]
    assert ids.last == 9
    assert ids.cancelled({"requestId": 2}) == {"requestId": 9}
    assert (ids.own(8), ids.own("9")) == (1, 2)


def test_an_answer_to_the_earlier_program_is_dropped() -> None:
    """Its number is at most the last one of the earlier program."""
    ids = MessageIds(base=7)
    assert [ids.own(number) for number in (1, 7, "7")] == [None, None, None]


def test_a_foreign_id_is_left_as_it_is() -> None:
    """An identifier of another form is the caller's own."""
    ids = MessageIds(base=7)
    assert (ids.told("a"), ids.own("a"), ids.last) == ("a", "a", 7)
    assert ids.cancelled({"requestId": "a"}) == {"requestId": "a"}
    assert ids.cancelled({}) == {}
