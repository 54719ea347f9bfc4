"""Which client is cut off when clients leave too much of their answers unread."""

import asyncio

from typing_extensions import override

from service.api.door.backlog import SETTLED_BYTES, SETTLED_S, Backlog, Backlogs


class Pipe(asyncio.Transport):
    """A connection with this many unsent bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0
        self.is_open = True

    @override
    def get_write_buffer_size(self) -> int:
        return self.left

    @override
    def abort(self) -> None:
        self.is_open = False


def answered(all_of_them: Backlogs, size: int) -> tuple[Pipe, Backlog]:
    pipe = Pipe()
    backlog = Backlog(pipe, all_of_them)
    write(pipe, backlog, size)
    return pipe, backlog


def write(pipe: Pipe, backlog: Backlog, size: int) -> None:
    backlog.written += size
    pipe.left += size
    backlog.measure()


def test_what_the_kernel_buffers_saves_no_slow_reader() -> None:
    """The client answered last has had no time to read, whatever was buffered for the others since."""
    all_of_them = Backlogs(100)
    silent, backlog = answered(all_of_them, 60)
    late, _ = answered(all_of_them, 30)
    silent.left -= 1  # into a buffer that grew
    backlog.tick()
    assert (silent.is_open, late.is_open) == (True, True)
    newest, _ = answered(all_of_them, 30)
    assert (silent.is_open, late.is_open, newest.is_open) == (False, True, True)


def test_a_client_that_was_seen_to_read_is_cut_off_last() -> None:
    """However long a part of its answer stays unsent."""
    for waited_s, size in ((SETTLED_S, 1), (0.0, SETTLED_BYTES)):  # slowly, or much at once
        all_of_them = Backlogs(10 * SETTLED_BYTES)
        reader, backlog = answered(all_of_them, 6 * SETTLED_BYTES)
        silent, _ = answered(all_of_them, 3 * SETTLED_BYTES)
        backlog.left_since -= waited_s
        reader.left -= size
        backlog.tick()
        newest, _ = answered(all_of_them, 3 * SETTLED_BYTES)
        assert (reader.is_open, silent.is_open, newest.is_open) == (True, False, True)
