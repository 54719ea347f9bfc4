"""``roundhouse timeline``: the turns on each slot over time, on the terminal or in a file."""

from collections.abc import Iterator
from enum import StrEnum
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from roundhouse_client.calls import job_calls
from service.cli.connection import JsonOption, KeyOption, ServiceAway, UrlOption, connect
from service.cli.displays.console import can_draw, plain
from service.errors import ConfigError
from service.timeline.chart import BROKE, CANCELLED, FAILED, IDLE, LETTERS, RUNNING, chart, page_pieces
from service.timeline.timeline import Timeline, read_timeline
from service.timeline.trace_file import trace_pieces
from workers.files.atomic import replace_file

PIPE_WIDTH: Final = 120
HUES: Final = ("cyan", "magenta", "yellow", "blue", "bright_cyan", "bright_magenta", "bright_yellow", "bright_blue")
STYLES: Final = {IDLE: "dim", FAILED: "bold red", CANCELLED: "dim", RUNNING: "green", BROKE: "bold red"}


class TimelineFormat(StrEnum):
    """The file format of a timeline."""

    HTML = "html"  # a self-contained page
    TRACE = "trace"  # Chrome's trace format, for Perfetto
    TEXT = "text"  # the chart of the terminal


SUFFIXES: Final = {
    ".html": TimelineFormat.HTML,
    ".htm": TimelineFormat.HTML,
    ".json": TimelineFormat.TRACE,
    ".txt": TimelineFormat.TEXT,
}


def timeline(
    job_id: Annotated[str, typer.Argument(metavar="JOB_ID", help="The job.")],
    *,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write a file: .html, .json (for Perfetto) or .txt.")
    ] = None,
    form: Annotated[
        TimelineFormat | None, typer.Option("--format", help="Overrides the file's ending; without a file, text.")
    ] = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show which turn used which slot, and when: as a text chart, one HTML file, or a trace for Perfetto."""
    if as_json and (output is not None or form is not None):
        raise ConfigError("--json prints the service's answer: leave out --output and --format, or --json")
    chosen = _format(output, form)
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"-o {output}: there is no folder {output.parent}")
    with connect(url, api_key) as service:
        text = service.ask(job_calls.get_timeline(job_id))
    if as_json:
        typer.echo(text)
        return
    if output is not None:
        write(text, chosen, output)
    else:
        show(text, chosen)


def _format(output: Path | None, form: TimelineFormat | None) -> TimelineFormat:
    if form is not None:
        return form
    if output is None:
        return TimelineFormat.TEXT
    if output.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"-o {output}: end its name in {', '.join(SUFFIXES)}, or give --format")
    return SUFFIXES[output.suffix.lower()]


def write(text: str, form: TimelineFormat, output: Path) -> None:
    """Write a file atomically.

    Raises:
        ServiceAway: the text is not a timeline.
        OSError: it cannot be written.
    """
    timeline = _read(text)
    replace_file(output, b"".join(_pieces(timeline, form)))
    typer.echo(f"{output}: {len(timeline.attempts)} attempts")


def show(text: str, form: TimelineFormat) -> None:
    """Print a timeline; the chart is as wide as the terminal.

    Raises:
        ServiceAway: the text is not a timeline.
    """
    timeline, console = _read(text), Console(emoji=False)
    if form is not TimelineFormat.TEXT or not can_draw(console):
        for piece in _pieces(timeline, form):
            typer.echo(piece, nl=False)
        return
    for line in chart(timeline, console.width):
        drawn = Text(plain(line.words), no_wrap=True, overflow="crop")
        for mark, cells in groupby(line.cells):
            drawn.append("".join(cells), _style_of(mark))
        console.print(drawn.append(line.tail))


def _style_of(mark: str) -> str:
    hue = STYLES.get(mark) or (HUES[LETTERS.index(mark.lower()) % len(HUES)] if mark.lower() in LETTERS else "")
    return f"bold {hue}" if mark.isupper() else hue


def _read(text: str) -> Timeline:
    try:
        return read_timeline(text)
    except msgspec.DecodeError as error:
        raise ServiceAway(f"the service's timeline cannot be read: {error}") from error


def _pieces(timeline: Timeline, form: TimelineFormat) -> Iterator[bytes]:
    match form:
        case TimelineFormat.HTML:
            static = resources.files("service.web").joinpath("static")
            script, style = (static.joinpath(f"timeline.{kind}").read_text("utf-8") for kind in ("js", "css"))
            yield from page_pieces(timeline, script, style)
        case TimelineFormat.TRACE:
            yield from trace_pieces(timeline)
        case TimelineFormat.TEXT:
            yield plain("\n".join(map(str, chart(timeline, PIPE_WIDTH))) + "\n").encode()
