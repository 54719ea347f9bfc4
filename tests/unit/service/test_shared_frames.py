"""All viewers share one encoding, made no more often than needed."""

import anyio
import pytest

from service.api.routes.overview import INTERVAL_S, KEEP_ALIVE_S, MOST_KEPT, REST, FramesBySubject, SharedFrames
from tests.harness.virtual import pass_time, virtually

MANY = 100


class Making:
    """Makes numbered frames, ``took_s`` each; they stay the same from ``settled`` on and end after ``last``."""

    def __init__(self, took_s: float = 0.0, last: int = 1000, settled: int = 1000) -> None:
        self.made = 0
        self.took_s = took_s
        self.last = last
        self.settled = settled
        self.fails = False

    async def __call__(self) -> tuple[bytes, bool]:
        if self.fails:
            raise ValueError("not now")
        await pass_time(self.took_s)
        self.made += 1
        return b"%d" % min(self.made, self.settled), self.made >= self.last


async def collect(frames: SharedFrames, seconds: float) -> list[bytes]:
    found = []
    with anyio.move_on_after(seconds):
        async for frame in frames.follow(lambda: False):
            found.append(frame)  # noqa: PERF401 - it is cut off
    return found


def test_a_hundred_viewers_cost_one_encoding() -> None:
    """Each gets the same frames as they change, and none is made without viewers."""
    making = Making()

    async def scenario() -> None:
        frames = SharedFrames(making)
        seen: list[list[bytes]] = []

        async def look() -> None:
            seen.append(await collect(frames, 9.5 * INTERVAL_S))

        async with anyio.create_task_group() as tasks:
            for _ in range(MANY):
                tasks.start_soon(look)
        assert seen == [[b"%d" % number for number in range(1, 11)]] * MANY
        await pass_time(3600)
        assert making.made == 10

    virtually(scenario)


def test_expensive_frames_are_made_rarely() -> None:
    """Frames take at most a twentieth of the time, however long one takes."""
    making = Making(took_s=1.0)

    async def scenario() -> None:
        assert len(await collect(SharedFrames(making), 10 * REST)) == 10

    virtually(scenario)


def test_an_unchanged_frame_is_not_sent_again() -> None:
    """A sign of life is sent now and then."""
    making = Making(settled=1)

    async def scenario() -> None:
        assert await collect(SharedFrames(making), 2.5 * KEEP_ALIVE_S) == [b"1", b"", b""]

    virtually(scenario)


def test_the_last_frame_ends_a_stream_and_is_kept() -> None:
    """A later viewer gets the last frame, and it is not made again."""
    making = Making(last=3)

    async def scenario() -> None:
        frames = SharedFrames(making)
        assert await collect(frames, 60) == [b"1", b"2", b"3"]
        await pass_time(60)
        assert await collect(frames, 60) == [b"3"]
        assert making.made == 3

    virtually(scenario)


def test_a_viewer_that_leaves_passes_the_frame_to_the_next() -> None:
    """If making a frame fails, its viewer gets the error, and the next viewer tries again."""
    making = Making(took_s=5.0)

    async def scenario() -> None:
        frames = SharedFrames(making)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collect, frames, 1.0)
            await pass_time(0.5)
            assert await frames.newest() == (b"1", False)
        making.fails = True
        await pass_time(REST * 10)
        with pytest.raises(ValueError, match="not now"):
            await frames.newest()
        making.fails = False
        assert await frames.newest() == (b"2", False)

    virtually(scenario)


def test_a_stream_ends_when_the_service_stops() -> None:
    """It ends within the interval, so that no stop waits for viewers."""

    async def scenario() -> None:
        found: list[bytes] = []
        with anyio.fail_after(3 * INTERVAL_S):
            async for frame in SharedFrames(Making()).follow(lambda: bool(found)):
                found.append(frame)  # noqa: PERF401 - it is closed by that
        assert found == [b"1"]

    virtually(scenario)


def test_each_subject_has_its_frames_and_few_are_kept() -> None:
    """Viewers of one subject share its frames; those viewed longest ago are dropped first."""
    kept, making = FramesBySubject(), Making()
    first = kept.get_or_make("first", making)
    for number in range(MOST_KEPT):
        assert kept.get_or_make("first", making) is first
        kept.get_or_make(number, making)
    for number in range(MOST_KEPT):
        kept.get_or_make(number, making)
    assert kept.get_or_make("first", making) is not first
