"""A bar for each file that is fetched before the start."""

from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from rich.console import Console

from service.cli.displays.console import can_draw, part

if TYPE_CHECKING:  # most starts fetch nothing
    from rich.progress import Progress, TaskID


class FetchBars(ExitStack):
    """Bars on standard error for a block, one per file; each call is a ``workers.models.download.Progress``."""

    def __init__(self) -> None:
        super().__init__()
        self._console = Console(stderr=True)
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._announced: set[str] = set()

    def __repr__(self) -> str:
        return f"<FetchBars {sorted(self._tasks)}>"

    def on_terminal(self) -> Self | None:
        """Return the bars; None where they cannot be drawn, so that the log reports instead."""
        return self if can_draw(self._console) else None

    def in_any_case(self) -> Self:
        """Return the bars, for commands without a log; where they cannot be drawn each file gets a line."""
        return self

    def __call__(self, name: str, there: int, size: int | None) -> None:
        """Show the number of bytes that a file has so far."""
        if not can_draw(self._console):
            if name not in self._announced:
                self._console.print(f"fetching {name}{part(', {:.0f} MB', (size or 0) / 1e6)}", markup=False)
            self._announced.add(name)
            return
        if self._bars is None:
            from rich import progress  # noqa: PLC0415 - see above

            columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.DownloadColumn())
            pace = (progress.TransferSpeedColumn(), progress.TimeRemainingColumn())
            bars = progress.Progress(*columns, *pace, console=self._console, transient=True)
            self._bars = self.enter_context(bars)
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(f"fetching {name}")
        self._bars.update(self._tasks[name], completed=there, total=size)
