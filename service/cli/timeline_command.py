"""The form of ``roundhouse timeline``; what it does is imported when it is called (``timeline_file``)."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from roundhouse_client.calls import job_calls
from roundhouse_client.drivers.exchange import DEFAULT_URL
from service.cli.remote import JsonOption, KeyOption, UrlOption, connect
from service.errors import ConfigError


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
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"-o {output}: there is no folder {output.parent}")
    with connect(url, api_key) as service:
        text = service.ask(job_calls.get_timeline(job_id))
    if as_json:
        typer.echo(text)
        return
    from service.cli.timeline_file import show, write  # noqa: PLC0415 - see above

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
