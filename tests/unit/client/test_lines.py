"""Streams cut into lines and events: any division of the same bytes gives the same result."""

import pytest

from roundhouse_client.errors import AnswerMalformed
from roundhouse_client.flows import lines
from roundhouse_client.flows.lines import Frame, FrameCutter, LineCutter

STREAM = (
    ": keep-alive\n\n"
    'id: 1\nevent: job\ndata: {"state":"queued"}\n\n'
    'event: progress\r\ndata: {"turns":\r\ndata: []}\r\n\r\n'
    'id:2\nevent:turn\nretry: 5\ndata:{"text":"a\u2028b\u0085c"}\n\n'
    "data: unnamed\n\n"
    "id: 3\nevent: end\ndata: {}\n"  # cut before its blank line
).encode()
FRAMES = [
    Frame("1", "job", '{"state":"queued"}'),
    Frame("", "progress", '{"turns":\n[]}'),
    Frame("2", "turn", '{"text":"a\u2028b\u0085c"}'),
    Frame("", "message", "unnamed"),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, len(STREAM)])
def test_events_are_the_same_at_any_division(size: int) -> None:
    """An id belongs to its own event; an event that was cut is dropped, so it is requested again."""
    cutter = FrameCutter()
    found = [frame for at in range(0, len(STREAM), size) for frame in cutter.feed(STREAM[at : at + size])]
    assert found == FRAMES


def test_lines_are_the_same_at_any_division() -> None:
    """The test cuts at each byte."""
    text = "one\u2028\r\n\ntwo \u0085\nrest".encode()
    for at in range(len(text) + 1):
        cutter = LineCutter()
        found = [*cutter.feed(text[:at]), *cutter.feed(text[at:])]
        assert found == ["one\u2028".encode(), b"", "two \u0085".encode()]
        assert not cutter.is_between


def test_an_endless_line_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sender is not Roundhouse: no transcript is that long."""
    monkeypatch.setattr(lines, "MOST_LINE_BYTES", 10)
    cutter = LineCutter()
    assert list(cutter.feed(b"123456789\n12345")) == [b"123456789"]
    with pytest.raises(AnswerMalformed, match="more than 10 bytes"):
        list(cutter.feed(b"678901"))
