"""A timeline for people: as lines of text, a line a row, a column a share of the time; or as one HTML page."""

import base64
import hashlib
import html
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from service.conversations.states import TurnState
from service.timeline.rows import end_of
from service.timeline.spans import Span
from service.timeline.timeline import Timeline, pieces

START: Final = """
const data = JSON.parse(document.getElementById("data").textContent);
drawTimeline(document.getElementById("timeline"), data);
"""
PAGE_STYLE: Final = (
    ":root{color-scheme:light dark}body{margin:0;padding:1rem;background:light-dark(#fff,#12171e)}"
    "h1{font:600 1.1rem system-ui,sans-serif;margin:0 0 .5rem}"
)
IDLE, BUSY, FAILED, CANCELLED, RUNNING = ".", "#", "x", "-", ">"
BROKE: Final = "!"
MARKS: Final = {
    TurnState.COMPLETED: BUSY,
    TurnState.FAILED: FAILED,
    TurnState.CANCELLED: CANCELLED,
    TurnState.IN_FLIGHT: RUNNING,
}
STRENGTH: Final = IDLE + BUSY + RUNNING + CANCELLED + FAILED  # what is told of a column with several things in it
LEGEND: Final = f"{BUSY} completed  {RUNNING} running  {FAILED} failed  {CANCELLED} cancelled  {BROKE} engine broke"
LEAST: Final = 20  # columns
INCIDENTS: Final = 20  # that are listed, the last
ROUNDING: Final = 1e-6  # of a column, which no attempt that ends with it enters
MINUTE: Final = 60
HOUR: Final = 3600


def page_pieces(timeline: Timeline, script: str, style: str) -> Iterator[bytes]:
    """Yield the file in pieces; ``script`` is a module that declares ``drawTimeline``, ``style`` its style sheet."""
    code, look = script + START, style + PAGE_STYLE
    policy = (
        f"default-src 'none'; script-src {_hash(code)}; style-src {_hash(look)}; base-uri 'none'; form-action 'none'"
    )
    title = html.escape(f"{timeline.name}: timeline")
    yield (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n<style>{look}</style>\n</head>\n<body>\n"
        f'<main>\n<h1>{title}</h1>\n<div id="timeline"></div>\n</main>\n<script type="application/json" id="data">'
    ).encode()
    for piece in pieces(timeline):
        yield piece.replace(b"<", b"\\u003c")  # in JSON it stands in texts alone: no word ends the element
    yield f'</script>\n<script type="module">{code}</script>\n</body>\n</html>\n'.encode()


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def chart(timeline: Timeline, width: int) -> list[str]:
    """Return the lines, each of at most ``width`` characters where that leaves 20 columns for the time."""
    spans = timeline.attempts
    if not spans:
        return [f"{timeline.name}: {timeline.state}; no turn has been on a slot yet"]
    begin = min(span.started_s for span in spans)
    end = max(begin, *(end_of(span, timeline.until_s) for span in spans))
    by_row: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in spans:
        by_row[span.worker, span.row].append(span)
    labels = {place: f"{place[0]} {place[1]}" for place in by_row}
    margin = max(map(len, [*labels.values(), *(worker.id for worker in timeline.workers)])) + 1
    columns = max(LEAST, width - margin)
    each = (end - begin) / columns or 1.0
    lines = [
        f"{timeline.name}: {timeline.state}, {len(spans)} attempts in {length(end - begin)}, {length(each)} a column",
        LEGEND,
    ]
    for worker in timeline.workers:
        broken = [incident.at_s for incident in timeline.incidents if incident.worker == worker.id]
        if broken:
            marks = [" "] * columns
            for at_s in broken:
                marks[_column(at_s, begin, each, columns)] = BROKE
            lines.append(f"{worker.id:<{margin}}{''.join(marks)}".rstrip())
        lines += [
            f"{labels[worker.id, row]:<{margin}}{_line(by_row[worker.id, row], begin, each, columns, timeline.until_s)}"
            for row in range(worker.rows)
        ]
    lines.append(f"{'':<{margin}}{_axis(length(end - begin), columns)}")
    lines += [
        f"  {length(incident.at_s - begin)}: {incident.worker}, engine {incident.incarnation}: {incident.reason}:"
        f" {incident.because}"
        for incident in timeline.incidents[-INCIDENTS:]
    ]
    return lines


def length(seconds: float) -> str:
    """Return a length of time for people: ``0.35 s``, ``12.3 s``, ``4m05s``, ``2h07m``."""
    whole = round(seconds)
    if whole < 1:
        return f"{seconds:.2f} s"
    if whole < MINUTE:
        return f"{seconds:.1f} s"
    if whole < HOUR:
        return f"{whole // MINUTE}m{whole % MINUTE:02d}s"
    return f"{whole // HOUR}h{whole % HOUR // MINUTE:02d}m"


def _line(spans: Sequence[Span], begin: float, each: float, columns: int, until_s: float) -> str:
    cells = [IDLE] * columns
    for span in spans:
        mark = MARKS.get(span.outcome, BUSY)
        first = _column(span.started_s, begin, each, columns)
        last = math.ceil((end_of(span, until_s) - begin) / each - ROUNDING)
        for column in range(first, min(columns, max(first + 1, last))):
            cells[column] = max(cells[column], mark, key=STRENGTH.index)
    return "".join(cells)


def _column(at_s: float, begin: float, each: float, columns: int) -> int:
    return min(columns - 1, max(0, int((at_s - begin) / each)))


def _axis(whole: str, columns: int) -> str:
    return "0" + whole.rjust(columns - 1)
