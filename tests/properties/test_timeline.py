"""Any set of attempts lies on rows without overlap, each once, on as few rows as possible."""

from collections import defaultdict
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from service.conversations.job.states import TurnState
from service.timeline.chart import IDLE, LEAST, TAIL, chart
from service.timeline.rows import end_of, lay_rows
from service.timeline.spans import Span
from service.timeline.trace_file import trace_pieces
from tests.harness.trace_format import trace_faults
from tests.unit.service.test_timeline import timeline

MOMENTS = st.integers(0, 40).map(float)


@st.composite
def attempts(draw: st.DrawFn) -> list[Span]:
    """Return attempts on up to three workers: some without length, some still running, some reversed by a clock."""
    made = []
    for number in range(draw(st.integers(0, 40))):
        end = draw(st.none() | MOMENTS)
        made.append(
            Span(
                conversation="q",
                agent="a",
                round=number,
                number=1,
                worker=f"w-{draw(st.integers(0, 2))}",
                incarnation=1,
                outcome=TurnState.IN_FLIGHT if end is None else draw(st.sampled_from(TurnState)),
                started_s=draw(MOMENTS),
                finished_s=end,
            )
        )
    return made


def is_met(span: Span, other: Span) -> bool:
    """Return whether another attempt occupies a row when one starts. One without length is over when another starts."""
    is_momentary = end_of(span) == span.started_s
    begun = other.started_s < span.started_s if is_momentary else other.started_s <= span.started_s
    return begun and span.started_s < end_of(other)


@given(attempts())
def test_no_two_attempts_of_a_row_overlap_and_each_is_there_once(spans: list[Span]) -> None:
    """A worker has exactly as many rows as attempts at its busiest moment."""
    laid, rows = lay_rows(spans)
    assert sorted(span.round for span in laid) == list(range(len(spans)))
    by_row: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in laid:
        by_row[span.worker, span.row].append(span)
    for on_row in by_row.values():
        for earlier, later in pairwise(on_row):
            assert end_of(earlier) <= later.started_s
    for worker, count in rows.items():
        mine = [span for span in spans if span.worker == worker]
        assert {row for name, row in by_row if name == worker} == set(range(count))
        assert count == max(1 + sum(is_met(span, each) for each in mine if each is not span) for span in mine)


@given(attempts(), st.integers(1, 200))
def test_a_chart_has_a_line_for_each_row_and_one_width(spans: list[Span], width: int) -> None:
    """Every row shows something, since it has an attempt."""
    shown = timeline(*spans, until_s=50.0)
    rows = sum(worker.rows for worker in shown.workers)
    lines = [line for line in chart(shown, width) if line.words.startswith("w-")]
    assert len(lines) == rows
    margin = max((len(f"w-0 {span.row}") + 1 for span in shown.attempts), default=0)
    columns = max(LEAST, width - max(margin, 8) - TAIL)
    assert all(len(line.cells) == columns for line in lines)
    assert all(len(str(line)) <= max(width, max(margin, 8) + LEAST + TAIL) for line in lines)
    assert all(line.cells.strip(IDLE) for line in lines)


@given(attempts())
def test_a_trace_follows_its_format(spans: list[Span]) -> None:
    """For any attempts, some of them before the origin: it contains nothing that Perfetto would drop."""
    early = [replace(span, started_s=span.started_s - 10, queued_s=span.started_s - 20) for span in spans]
    assert trace_faults(b"".join(trace_pieces(timeline(*early)))) == []
