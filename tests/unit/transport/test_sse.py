import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.sse import FrameDecoder


def frames_of(chunks: list[bytes], max_frame_bytes: int = 1 << 20) -> list[bytes | None]:
    """Return the frames, and a last None if the cap ended them."""
    decoder = FrameDecoder(max_frame_bytes)
    frames: list[bytes | None] = [frame for chunk in chunks for frame in decoder.feed(chunk)]
    return [*frames, *decoder.close(), *([None] if decoder.failure else [])]


@pytest.mark.parametrize(
    ("stream", "frames"),
    [
        pytest.param(b"data: one\n\ndata: two\n\n", [b"one", b"two"], id="two frames"),
        pytest.param(b"data: one\r\n\r\ndata: two\r\n\r\n", [b"one", b"two"], id="CRLF"),
        pytest.param(b"data: one\r\rdata: two\r\r", [b"one", b"two"], id="CR"),
        pytest.param(b"data: a\r\rdata: b\n\ndata: c\r\n\r\n", [b"a", b"b", b"c"], id="mixed line ends"),
        pytest.param(b": ping\n\n:\n\ndata: x\n\n", [b"x"], id="comments are no frames"),
        pytest.param(b"data: a\ndata: b\n\n", [b"a\nb"], id="several data lines are one frame"),
        pytest.param(b"data\n\ndata\ndata\n\ndata:", [b"", b"\n", b""], id="empty data, as WHATWG has it"),
        pytest.param(b"data:test\n\ndata: test\n\ndata:  x\n\n", [b"test", b"test", b" x"], id="one space is cut"),
        pytest.param(b"event: e\nid: 1\nretry: 5\ndata: x\n\nfoo: bar\n\n", [b"x"], id="other fields are skipped"),
        pytest.param(b"data: one\n\ndata: two", [b"one", b"two"], id="a missing last blank line"),
        pytest.param(b"data: one\n\ndata: two\n", [b"one", b"two"], id="a missing last blank line, line ended"),
        pytest.param(b"\xef\xbb\xbfdata: x\n\n", [b"x"], id="a byte order mark"),
        pytest.param(
            "data: \u2028\u0085\x0b\x0c\x1c x\n\n".encode(), ["\u2028\u0085\x0b\x0c\x1c x".encode()], id="U+2028"
        ),
        pytest.param(b"", [], id="nothing"),
        pytest.param(b"\n\n\r\n\r", [], id="blank lines alone"),
        pytest.param(b"datax: no\n\ndat: no\n\n", [], id="names that only begin like data"),
    ],
)
def test_frames_follow_the_standard_at_every_cut(stream: bytes, frames: list[bytes]) -> None:
    """The standard is WHATWG HTML, server-sent events. The cut between two reads never matters."""
    assert frames_of([stream]) == frames
    for cut in range(len(stream) + 1):
        assert frames_of([stream[:cut], stream[cut:]]) == frames
    assert frames_of([stream[index : index + 1] for index in range(len(stream))]) == frames


PIECES = st.sampled_from(
    [
        b"data: ",
        b"data:",
        b"data",
        b":",
        b": ping",
        b"\n",
        b"\r",
        b"\r\n",
        b"\n\n",
        b"x",
        "\u2028".encode(),
        b"id: 7",
        b" ",
    ]
)


@given(st.lists(PIECES, max_size=30), st.data())
def test_any_rechunking_gives_the_same_frames(pieces: list[bytes], data: st.DataObject) -> None:
    """Specification, "Streaming": framing does no I/O, and any division of the bytes gives the same events."""
    stream = b"".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    chunks = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    for cap in (1 << 20, 12):
        assert frames_of(chunks, cap) == frames_of([stream], cap)


@pytest.mark.parametrize("chunk_size", [1, 7, 10_000])
@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(b"data: " + b"x" * 200 + b"\n\n", id="one long line"),
        pytest.param(b"data: " + b"x" * 200, id="a line without end"),
        pytest.param(b"data: xxxxxxxxx\n" * 20, id="many lines"),
        pytest.param(b"data\n" * 200, id="many empty lines"),
        pytest.param(b": " + b"x" * 200 + b"\n\n", id="a long comment"),
    ],
)
def test_a_frame_over_the_cap_is_an_error(stream: bytes, chunk_size: int) -> None:
    """A frame over the size cap ends the stream with an error, however it arrives."""
    whole = b"data: before\n\n" + stream + b"\n\ndata: after\n\n"
    chunks = [whole[start : start + chunk_size] for start in range(0, len(whole), chunk_size)]
    assert frames_of(chunks, max_frame_bytes=100) == [b"before", None]


def test_frames_within_the_cap_pass_without_end() -> None:
    """The cap is on one frame, not on the stream."""
    assert len(frames_of([b"data: " + b"x" * 90 + b"\n\n"] * 1000, max_frame_bytes=100)) == 1000


def test_a_large_frame_in_small_reads_comes_whole() -> None:
    """Quadratic buffers are common in SSE clients: 8 MiB in 1 KiB reads took one of them 70 s."""
    decoder = FrameDecoder()
    chunks = [b"data: ", *[b"x" * 1024] * 8192, b"\n\n"]
    assert [len(frame) for chunk in chunks for frame in decoder.feed(chunk)] == [8 * 1024 * 1024]
