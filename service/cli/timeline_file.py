"""``roundhouse timeline``: which turn held which slot when, as a chart on the terminal or as a file."""

from collections.abc import Iterator
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from roundhouse_client.calls import job_calls
from roundhouse_client.drivers.exchange import DEFAULT_URL
from service.cli.console import can_draw
from service.cli.plain import plain
from service.cli.remote import JsonOption, KeyOption, ServiceAway, UrlOption, connect
from service.errors import ConfigError
from service.timeline.chart import BROKE, BUSY, CANCELLED, FAILED, RUNNING, chart
from service.timeline.page import page_pieces
from service.timeline.timeline import Timeline, read_timeline
from service.timeline.trace_file import trace_pieces
from workers.files.atomic import replace_file

PIPE_WIDTH: Final = 120
STYLES: Final = {BUSY: "cyan", FAILED: "bold red", CANCELLED: "dim", RUNNING: "green", BROKE: "bold red"}


class TimelineFormat(StrEnum):
    """How a timeline is written."""

    HTML = "html"  # a page that needs nothing else
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
        TimelineFormat | None, typer.Option("--format", help="Over what the file's name says; without a file, text.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show which turn held which slot when: a chart on the terminal, one HTML file, or a trace for Perfetto."""
    chosen = _format(output, form)
    with connect(url, api_key) as service:
        text = service.ask(job_calls.get_timeline(job_id))
    if as_json:
        typer.echo(text)
        return
    try:
        shown = read_timeline(text)
    except msgspec.DecodeError as error:
        raise ServiceAway(f"{url}: its timeline cannot be read: {error}") from error
    if output is not None:
        replace_file(output, b"".join(_pieces(shown, chosen)))
        typer.echo(f"{output}: {len(shown.attempts)} attempts")
    elif chosen is TimelineFormat.TEXT:
        _print(shown)
    else:
        for piece in _pieces(shown, chosen):
            typer.echo(piece, nl=False)


def _format(output: Path | None, form: TimelineFormat | None) -> TimelineFormat:
    if form is not None:
        return form
    if output is None:
        return TimelineFormat.TEXT
    if output.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"-o {output}: end its name in {', '.join(SUFFIXES)}, or give --format")
    return SUFFIXES[output.suffix.lower()]


def _pieces(shown: Timeline, form: TimelineFormat) -> Iterator[bytes]:
    match form:
        case TimelineFormat.HTML:
            static = resources.files("service.web").joinpath("static")
            script, style = (static.joinpath(f"timeline.{kind}").read_text("utf-8") for kind in ("js", "css"))
            yield from page_pieces(shown, script, style)
        case TimelineFormat.TRACE:
            yield from trace_pieces(shown)
        case TimelineFormat.TEXT:
            yield plain("\n".join(chart(shown, PIPE_WIDTH)) + "\n").encode()


def _print(shown: Timeline) -> None:
    console = Console(emoji=False)
    if not can_draw(console):
        typer.echo(plain("\n".join(chart(shown, PIPE_WIDTH))))
        return
    for line in chart(shown, console.width):
        text = Text(plain(line), no_wrap=True, overflow="crop")
        for mark, style in STYLES.items():
            text.highlight_regex(f"(?<=[ .#x>!-]){mark}+(?=[ .#x>!-]|$)", style)
        console.print(text)
