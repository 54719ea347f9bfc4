"""A timeline for people: as text, with a line per row and a column per step of time; or as one HTML page."""

import base64
import hashlib
import html
import math
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final

import msgspec

from service.conversations.job.states import ENDED_JOBS, TurnState
from service.timeline.rows import end_of
from service.timeline.spans import Span
from service.timeline.timeline import Timeline, pieces, waiting

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
LETTERS: Final = "abcdefghijklmnopqrstuvwyz"  # letters for agents; "x" is a failure
WORST: Final = {TurnState.FAILED: 3, TurnState.CANCELLED: 2, TurnState.IN_FLIGHT: 1}  # the highest marks a column
MARKS: Final = {TurnState.FAILED: FAILED, TurnState.CANCELLED: CANCELLED, TurnState.IN_FLIGHT: RUNNING}
LEGEND: Final = f"{RUNNING} running  {FAILED} failed  {CANCELLED} cancelled  {BROKE} an engine broke"
LEAST: Final = 20  # least number of columns
TAIL: Final = 9  # characters after the columns: the row's load, or the number of waiting turns
DIGIT: Final = 9
WAITS: Final = "waiting"
NO_BREAK: Final = "\xa0"
INCIDENTS: Final = 20  # last incidents in the list
ROUNDING: Final = 1e-6  # part of a column that an attempt must pass to enter it
MINUTE: Final = 60
HOUR: Final = 3600


class ChartLine(msgspec.Struct, frozen=True):
    """A line of a chart: ``cells`` are its columns, between ``words`` and ``tail``."""

    words: str
    cells: str = ""
    tail: str = ""

    def __str__(self) -> str:
        return f"{self.words}{self.cells}{self.tail}".rstrip()


class _Scale(msgspec.Struct, frozen=True):
    """The columns over so many ``seconds`` from ``begin`` on."""

    begin: float
    seconds: float
    columns: int

    @property
    def each(self) -> float:
        """The seconds of a column."""
        return self.seconds / self.columns or 1.0

    def at(self, second: float) -> int:
        """Return the column of a moment."""
        return min(self.columns - 1, max(0, int((second - self.begin) / self.each)))

    def over(self, begin: float, end: float) -> range:
        """Return the columns of a span of time; one that ends with a column does not enter the next."""
        first, last = self.at(begin), math.ceil((end - self.begin) / self.each - ROUNDING)
        return range(first, min(self.columns, max(first + 1, last)))


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
        yield piece.replace(b"<", b"\\u003c")  # JSON has it only in strings: none can end the element
    yield f'</script>\n<script type="module">{code}</script>\n</body>\n</html>\n'.encode()


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def chart(timeline: Timeline, width: int) -> list[ChartLine]:
    """Return the lines, of at most ``width`` characters unless that leaves fewer than 20 columns."""
    spans = timeline.attempts
    if not spans:
        waits = f"; {len(timeline.waiting)} wait for one" if timeline.waiting else ""
        return [ChartLine(f"{timeline.name}: {timeline.state}; no turn has been on a slot yet{waits}")]
    names = [f"{worker.id} {row}" for worker in timeline.workers for row in range(worker.rows)]
    margin = max(map(len, [*names, WAITS])) + 1
    scale = _scale_of(timeline, max(LEAST, width - margin - TAIL))
    agents = list(dict.fromkeys(span.agent for span in sorted(spans, key=lambda span: span.started_s)))
    letters = dict(zip(agents, LETTERS, strict=False))
    seconds, step = length(scale.seconds), length(scale.each)
    title = f"{timeline.name}: {timeline.state}, {len(spans)} attempts in {seconds}, {step} a column"
    incidents = (
        f"  {_since(incident.at_s - scale.begin)}: {incident.worker}, engine {incident.incarnation}: {incident.reason}:"
        f" {incident.because}"
        for incident in timeline.incidents[-INCIDENTS:]
    )
    return [
        *map(ChartLine, (title, *_legend(letters, len(agents), width))),
        *_row_lines(timeline, letters, scale, margin),
        *_waiting_lines(timeline, scale, margin),
        ChartLine(f"{'':<{margin}}", f"0{seconds.rjust(scale.columns - 1)}"),
        *map(ChartLine, incidents),
    ]


def _scale_of(timeline: Timeline, columns: int) -> _Scale:
    begin = min(span.started_s for span in timeline.attempts)
    ends = [end_of(span, timeline.until_s) for span in timeline.attempts]
    if timeline.state not in ENDED_JOBS:
        ends.append(timeline.until_s)  # a standstill shows as a gap
    return _Scale(begin, max(begin, *ends) - begin, columns)


def _row_lines(timeline: Timeline, letters: Mapping[str, str], scale: _Scale, margin: int) -> Iterator[ChartLine]:
    """Yield the lines of each worker: the columns in which an engine of it broke, and its rows with their load."""
    by_row: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in timeline.attempts:
        by_row[span.worker, span.row].append(span)
    broken: dict[str, set[int]] = defaultdict(set)
    for incident in timeline.incidents:
        if 0 <= incident.at_s - scale.begin <= scale.seconds:
            broken[incident.worker].add(scale.at(incident.at_s))
    for worker in timeline.workers:
        if worker.id in broken:
            marks = "".join(BROKE if column in broken[worker.id] else " " for column in range(scale.columns))
            yield ChartLine(f"{worker.id:<{margin}}", marks)
        for row in range(worker.rows):
            on_row = by_row[worker.id, row]
            busy_s = sum(end_of(span, timeline.until_s) - span.started_s for span in on_row)
            cells = _cells(on_row, letters, scale, timeline.until_s)
            yield ChartLine(
                f"{f'{worker.id} {row}':<{margin}}", cells, f"{round(100 * busy_s / (scale.seconds or 1.0)):4d} %"
            )


def _since(seconds: float) -> str:
    """Return a moment on the axis, or its distance before the axis begins."""
    return length(seconds) if seconds >= 0 else f"{length(-seconds)} before"


def _legend(letters: Mapping[str, str], agents: int, width: int) -> list[str]:
    named = [f"{letter} {agent}" for agent, letter in letters.items()]
    if agents > len(letters):
        named.append(f"{BUSY} the other {agents - len(letters)}")
    entries = [each.replace(" ", NO_BREAK) for each in [*named, *LEGEND.split("  ")]]
    wrapped = textwrap.wrap("  ".join(entries), width=max(LEAST, width), break_long_words=False, break_on_hyphens=False)
    return [line.replace(NO_BREAK, " ") for line in wrapped]


def _cells(spans: Sequence[Span], letters: Mapping[str, str], scale: _Scale, until_s: float) -> str:
    """Return a row's marks: each column has its worst or longest attempt; a turn begins with a capital."""
    held: list[Span | None] = [None] * scale.columns
    weights: list[tuple[int, float]] = [(0, -1.0)] * scale.columns
    for span in spans:
        end = end_of(span, until_s)
        for column in scale.over(span.started_s, end):
            left = scale.begin + column * scale.each
            weight = WORST.get(span.outcome, 0), min(end, left + scale.each) - max(span.started_s, left)
            if weight > weights[column]:
                weights[column], held[column] = weight, span
    return "".join(
        IDLE if span is None else _mark(span, letters, is_first=span is not before)
        for before, span in zip([None, *held], held, strict=False)
    )


def _mark(span: Span, letters: Mapping[str, str], *, is_first: bool) -> str:
    letter = letters.get(span.agent, BUSY)
    return MARKS.get(span.outcome, letter.upper() if is_first else letter)


def _waiting_lines(timeline: Timeline, scale: _Scale, margin: int) -> list[ChartLine]:
    """Return a line of the number of waiting turns, as ninths of a maximum above 9; nothing if none waited."""
    moments = pairwise([*waiting(timeline), (timeline.until_s, 0)])
    steps = [
        (at_s, until_s, count) for (at_s, count), (until_s, _) in moments if at_s < until_s and until_s > scale.begin
    ]
    most = max((count for *_, count in steps), default=0)
    if not most:
        return []
    cells = [0] * scale.columns
    for at_s, until_s, count in steps:
        for column in scale.over(at_s, until_s):
            cells[column] = max(cells[column], count)
    share = max(1.0, most / DIGIT)
    digits = "".join(str(math.ceil(count / share)) if count else IDLE for count in cells)
    return [ChartLine(f"{WAITS:<{margin}}", digits, f" most {most}")]


def length(seconds: float) -> str:
    """Return a length of time for people: ``0.35 s``, ``12.3 s``, ``4m05s``, ``2h07m``."""
    whole = round(seconds)
    forms = {
        1: f"{seconds:.2f} s",
        MINUTE: f"{seconds:.1f} s",
        HOUR: f"{whole // MINUTE}m{whole % MINUTE:02d}s",
        math.inf: f"{whole // HOUR}h{whole % HOUR // MINUTE:02d}m",
    }
    return next(form for below, form in forms.items() if whole < below)
