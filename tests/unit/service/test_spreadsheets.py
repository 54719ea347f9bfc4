"""Results as CSV: words of models and callers are text for a spreadsheet, and never a formula.

Source: OWASP, "CSV Injection".
"""

import csv
import io
import json
from collections.abc import AsyncIterator, Iterator

import pytest

from service.conversations.document.job_document import PostedValues
from service.node.results import csv_rows

SAID = {"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 2}


async def rows_of(turn: dict[str, object], conversation: str = "c0") -> list[dict[str, str]]:
    """Return the rows of a job with one turn."""
    document = {"id": conversation, "turns": [{"round": 0, "agent": "a", "state": "completed", "usage": SAID, **turn}]}

    async def transcripts() -> AsyncIterator[Iterator[bytes]]:
        yield iter([json.dumps(document).encode()])

    lines = b"".join([line async for line in csv_rows("job_1", [PostedValues()], transcripts())])
    return list(csv.DictReader(io.StringIO(lines.decode(), newline="")))


@pytest.mark.parametrize("text", ["=cmd|' /C calc'!A0", "+1+1", "-2", "@SUM(A1)", "\t=1", "\r=1"])
async def test_a_formula_is_stored_as_text(text: str) -> None:
    """The reader of the file did not write it; spreadsheets mark text with an apostrophe before it."""
    (row,) = await rows_of({"text": text, "reason": text, "detail": text, "worker": text})
    assert [row[name] for name in ("text", "reason", "detail", "worker")] == [f"'{text}"] * 4
    (row,) = await rows_of({"text": "Hello.", "agent": text}, text)
    assert (row["conversation"], row["agent"]) == (f"'{text}", f"'{text}")


@pytest.mark.parametrize("text", ["2 + 2 = 4", "a-b", "me@example.org", "'quoted'", "", "line\n=1"])
async def test_other_texts_and_numbers_stay_as_they_are(text: str) -> None:
    """Programs read the file too."""
    (row,) = await rows_of({"text": text})
    assert (row["text"], row["round"], row["cached_tokens"]) == (text, "0", "0")
