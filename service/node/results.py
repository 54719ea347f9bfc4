"""The result of a job in the forms that callers read: one document, one transcript per line, or a table of turns."""

import csv
import io
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
from msgspec import Struct

from service.conversations.document.job_document import PostedValues, posted_values
from service.formats.result_form import ResultForm
from service.node.jobs import Jobs
from service.store.records import StoredJob

COLUMNS: Final = (
    *("job", "conversation", "round", "agent", "state", "reason", "detail", "text", "worker"),
    *("prompt_tokens", "cached_tokens", "completion_tokens", "started_at", "finished_at", "kind", "inherited"),
    *("finish_reason", "findings"),
)
MOST_NAMES: Final = 200  # names of metadata and of variables with columns of their own
FORMULAS: Final = ("=", "+", "-", "@", "\t", "\r")
Transcripts = AsyncIterator[Iterator[bytes]]


async def result_pieces(jobs: Jobs, stored: StoredJob, form: ResultForm) -> AsyncIterator[bytes]:
    """Yield the result of an ended job, which may be larger than memory."""
    transcripts = jobs.transcripts(stored.id)
    if form is ResultForm.CSV:
        posted = await anyio.to_thread.run_sync(posted_values, await jobs.document(stored.id, "all"))
        pieces = csv_rows(stored.id, posted, transcripts)
    elif form is ResultForm.JSONL:
        pieces = _lines(transcripts)
    else:
        given_up = [each.document for each in await jobs.given_up(stored.id)]
        pieces = _whole(stored, given_up, transcripts)
    async for piece in pieces:
        yield piece


async def spread(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield pieces as they are made, and let other tasks run between them."""
    for piece in pieces:
        yield piece
        await anyio.lowlevel.checkpoint()


async def _lines(transcripts: Transcripts) -> AsyncIterator[bytes]:
    async for transcript in transcripts:
        async for piece in spread(transcript):
            yield piece
        yield b"\n"


async def _whole(stored: StoredJob, given_up: Sequence[object], transcripts: Transcripts) -> AsyncIterator[bytes]:
    head = {"id": stored.id, "state": stored.state, "given_up": given_up}
    yield msgspec.json.encode(head)[:-1] + b',"conversations":['
    is_first = True
    async for transcript in transcripts:
        if not is_first:
            yield b","
        is_first = False
        async for piece in spread(transcript):
            yield piece
    yield b"]}"


class _Usage(Struct):
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


class _Origin(Struct):
    job: str
    conversation: str


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
    kind: str = ""
    inherited: _Origin | None = None
    finish_reason: str | None = None
    findings: tuple[str, ...] = ()


class _Transcript(Struct):
    id: str
    turns: list[_Turn]


_decode = msgspec.json.Decoder(_Transcript).decode


async def csv_rows(job_id: str, posted: Sequence[PostedValues], transcripts: Transcripts) -> AsyncIterator[bytes]:
    """Yield a heading and the rows of each conversation, in the order of the job's document.

    The ``metadata`` and ``variables`` of conversations are in columns after the others.
    """
    values = {"metadata": [each.metadata for each in posted], "variables": [each.variables or {} for each in posted]}
    named = [(field, name) for field, of_all in values.items() for name in _names(of_all)]
    yield _line((*COLUMNS, *(f"{field}.{name}" for field, name in named)))
    place = -1
    async for pieces in transcripts:
        transcript, place = _decode(b"".join(pieces)), place + 1
        own = [_cell(values[field][place].get(name)) for field, name in named]
        for turn in transcript.turns:
            origin = turn.inherited
            yield _line(
                (
                    *(job_id, transcript.id, turn.round, turn.agent, turn.state, turn.reason, turn.detail),
                    *(turn.text, turn.worker, turn.usage.prompt_tokens, turn.usage.cached_tokens),
                    *(turn.usage.completion_tokens, turn.started_at, turn.finished_at, turn.kind),
                    None if origin is None else f"{origin.job}/{origin.conversation}",
                    *(turn.finish_reason, " ".join(turn.findings) or None),
                    *own,
                )
            )
        await anyio.lowlevel.checkpoint()


def _names(values: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names for which conversations have values, in order of appearance."""
    return list(dict.fromkeys(chain.from_iterable(values)))[:MOST_NAMES]


def _cell(value: object) -> object:
    """Return a JSON value for a table: a text or a number as it is, anything else as JSON."""
    is_plain = value is None or (isinstance(value, str | int | float) and not isinstance(value, bool))
    return value if is_plain else msgspec.json.encode(value).decode()


def _line(cells: Sequence[object]) -> bytes:
    written = io.StringIO(newline="")
    csv.writer(written).writerow([_as_text(cell) for cell in cells])
    return written.getvalue().encode()


def _as_text(cell: object) -> object:
    """Escape a text that a spreadsheet would compute: its author is not the reader (OWASP)."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULAS) else cell
