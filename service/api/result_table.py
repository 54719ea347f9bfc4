"""A job's result as a table: a row for each turn, as spreadsheets and data frames read it (RFC 4180)."""

import csv
import io
from collections.abc import AsyncIterator, Iterator
from typing import Final

import anyio.lowlevel
import msgspec
from msgspec import Struct

CSV: Final = "text/csv"
COLUMNS: Final = (
    *("job", "conversation", "round", "agent", "state", "reason", "detail", "text", "worker"),
    *("prompt_tokens", "cached_tokens", "completion_tokens", "started_at", "finished_at"),
)


class _Usage(Struct):
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


class _Turn(Struct):
    agent: str
    round: int
    state: str
    usage: _Usage
    text: str = ""
    reason: str | None = None
    detail: str | None = None
    worker: str | None = None
    started_at: str | None = None
    finished_at: str | None = None


class _Transcript(Struct):
    id: str
    turns: list[_Turn]


_decode = msgspec.json.Decoder(_Transcript).decode


async def csv_rows(job_id: str, transcripts: AsyncIterator[Iterator[bytes]]) -> AsyncIterator[bytes]:
    """Yield a heading and the rows of each conversation, in the order of the job document."""
    yield _line(COLUMNS)
    async for pieces in transcripts:
        transcript = _decode(b"".join(pieces))
        for turn in transcript.turns:
            yield _line(
                (
                    *(job_id, transcript.id, turn.round, turn.agent, turn.state, turn.reason, turn.detail),
                    *(turn.text, turn.worker, turn.usage.prompt_tokens, turn.usage.cached_tokens),
                    *(turn.usage.completion_tokens, turn.started_at, turn.finished_at),
                )
            )
        await anyio.lowlevel.checkpoint()


def _line(cells: tuple[object, ...]) -> bytes:
    written = io.StringIO(newline="")
    csv.writer(written).writerow(cells)
    return written.getvalue().encode()
