"""A timeline that a service has told, as a chart on the terminal or as a file."""

from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Final

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from service.cli.console import can_draw
from service.cli.plain import plain
from service.cli.remote import ServiceAway
from service.cli.timeline_command import TimelineFormat
from service.timeline.chart import BROKE, BUSY, CANCELLED, FAILED, RUNNING, chart
from service.timeline.page import page_pieces
from service.timeline.timeline import Timeline, read_timeline
from service.timeline.trace_file import trace_pieces
from workers.files.atomic import replace_file

PIPE_WIDTH: Final = 120
STYLES: Final = {BUSY: "cyan", FAILED: "bold red", CANCELLED: "dim", RUNNING: "green", BROKE: "bold red"}
IN_ROW: Final = r"[ .#x>!-]"  # what stands beside a mark


def write(text: str, form: TimelineFormat, output: Path) -> None:
    """Write a file, whole or not at all.

    Raises:
        ServiceAway: the text is no timeline.
        OSError: it cannot be written.
    """
    told = _read(text)
    replace_file(output, b"".join(_pieces(told, form)))
    typer.echo(f"{output}: {len(told.attempts)} attempts")


def show(text: str, form: TimelineFormat) -> None:
    """Print a timeline; the chart as wide as the terminal.

    Raises:
        ServiceAway: the text is no timeline.
    """
    told, console = _read(text), Console(emoji=False)
    if form is not TimelineFormat.TEXT or not can_draw(console):
        for piece in _pieces(told, form):
            typer.echo(piece, nl=False)
        return
    for line in chart(told, console.width):
        drawn = Text(plain(line), no_wrap=True, overflow="crop")
        for mark, style in STYLES.items():
            drawn.highlight_regex(f"(?<={IN_ROW}){mark}+(?={IN_ROW}|$)", style)
        console.print(drawn)


def _read(text: str) -> Timeline:
    try:
        return read_timeline(text)
    except msgspec.DecodeError as error:
        raise ServiceAway(f"its timeline cannot be read: {error}") from error


def _pieces(told: Timeline, form: TimelineFormat) -> Iterator[bytes]:
    match form:
        case TimelineFormat.HTML:
            static = resources.files("service.web").joinpath("static")
            script, style = (static.joinpath(f"timeline.{kind}").read_text("utf-8") for kind in ("js", "css"))
            yield from page_pieces(told, script, style)
        case TimelineFormat.TRACE:
            yield from trace_pieces(told)
        case TimelineFormat.TEXT:
            yield plain("\n".join(chart(told, PIPE_WIDTH)) + "\n").encode()
