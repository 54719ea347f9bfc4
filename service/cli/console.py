"""What a person sees in the terminal while jobs run, and what a transcript looks like there."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

import anyio
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from service.conversations.job import JobId
from service.conversations.states import ENDED_CONVERSATIONS, ENDED_TURNS
from service.jobs import JobView

PLAIN_INTERVAL_S: Final = 1.0  # where the output is no terminal: a line a second at most


class Display(Protocol):
    """Shows how far jobs are."""

    def show(self, view: JobView) -> None:
        """Show one job as it is now."""


class _Bars:
    """A bar a job, on a terminal."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[JobId, TaskID] = {}

    def show(self, view: JobView) -> None:
        name = view.stored.id
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(
                escape(view.stored.name), total=view.stored.total_turns, detail=""
            )
        self._progress.update(self._tasks[name], completed=_done(view), detail=_detail(view))


class _Lines:
    """Plain lines, when something has changed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: dict[str, str] = {}
        self._shown_at = 0.0

    def show(self, view: JobView) -> None:
        line = f"{view.stored.name}: {_done(view)}/{view.stored.total_turns} turns, {_detail(view)}"
        now = anyio.current_time()
        is_over = view.stored.finished_at is not None
        if line == self._last.get(view.stored.id) or (now - self._shown_at < PLAIN_INTERVAL_S and not is_over):
            return
        self._last[view.stored.id] = line
        self._shown_at = now
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def display(console: Console) -> Iterator[Display]:
    """Show progress for a block; the terminal is as it was afterwards, whatever happens."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("turns, {task.fields[detail]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield _Bars(progress)


def print_transcript(console: Console, name: str, transcript: Mapping[str, object]) -> None:
    """Print one conversation, turn by turn."""
    console.print(f"\n[bold]{escape(name)}, conversation {escape(str(transcript['id']))}[/]: {transcript['state']}")
    turns = transcript["turns"]
    for turn in turns if isinstance(turns, Sequence) else ():
        console.print(
            f"\n[cyan]\\[round {turn['round']}] {escape(turn['agent'])}[/] ({turn['state']}, {turn['worker']})"
        )
        console.print(turn["text"], markup=False, highlight=False, soft_wrap=True)


def _done(view: JobView) -> int:
    return sum(view.tally.turns.get(state, 0) for state in ENDED_TURNS)


def _detail(view: JobView) -> str:
    talks = view.tally.conversations
    done = sum(talks.get(state, 0) for state in ENDED_CONVERSATIONS)
    return f"{done}/{view.stored.total_conversations} conversations, {view.in_flight} in flight, {view.ready} ready"
