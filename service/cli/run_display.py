"""What a person sees in the terminal while jobs run in this process."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

import anyio
from rich.console import Console
from rich.live import Live
from rich.markup import escape

from service.api.status import status_document
from service.cli.console import can_draw
from service.cli.plain import plain
from service.cli.status_table import table
from service.conversations.states import ENDED_CONVERSATIONS, ENDED_TURNS
from service.node.jobs import JobView
from service.node.node import Node

PLAIN_INTERVAL_S: Final = 1.0  # where the output is no terminal: a line a second at most
REFRESH_HZ: Final = 4


class Display(Protocol):
    """Shows how far jobs are."""

    def show(self, views: Sequence[JobView], node: Node) -> None:
        """Show all jobs as they are now, and what runs and waits."""


class _Table:
    """The live table, on a terminal."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, views: Sequence[JobView], node: Node) -> None:
        below = "\n".join(escape(_line(view)) for view in views)
        self._live.update(table(status_document(node).model_dump(), below))


class _Lines:
    """Plain lines, when something has changed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: dict[str, tuple[str, float]] = {}  # of each job: its last line, and when it was shown

    def show(self, views: Sequence[JobView], _node: Node) -> None:
        for view in views:
            self._show(view)

    def _show(self, view: JobView) -> None:
        line = _line(view)
        now = anyio.current_time()
        is_over = view.stored.finished_at is not None
        last, shown_at = self._last.get(view.stored.id, ("", 0.0))
        if line == last or (now - shown_at < PLAIN_INTERVAL_S and not is_over):
            return
        self._last[view.stored.id] = (line, now)
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def display(console: Console) -> Iterator[Display]:
    """Show progress for a block; the terminal is as it was afterwards, its cursor too, whatever happens."""
    if not can_draw(console):
        yield _Lines(console)
        return
    with Live(console=console, refresh_per_second=REFRESH_HZ, transient=False) as live:
        yield _Table(live)


def _line(view: JobView) -> str:
    done = sum(view.tally.turns.get(state, 0) for state in ENDED_TURNS)
    conversations = sum(view.tally.conversations.get(state, 0) for state in ENDED_CONVERSATIONS)
    return (
        f"{plain(view.stored.name)}: {done}/{view.stored.total_turns} turns, "
        f"{conversations}/{view.stored.total_conversations} conversations, "
        f"{view.in_flight} in flight, {view.ready} ready"
    )
