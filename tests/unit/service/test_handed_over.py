"""A program of another version reads the document of an upgrade: each version's form is frozen."""

import json
from pathlib import Path

import msgspec
import pytest

from workers.process import handed_over
from workers.process.handed_over import VERSION, Handover
from workers.process.identity import EngineExit

EXAMPLES = Path(__file__).parent / "handed_over"


def test_the_form_is_that_of_its_version() -> None:
    """A field that is added, renamed, removed or of another type needs a new version and an example of it."""
    recorded = json.loads((EXAMPLES / f"{VERSION}.json").read_text())
    read = msgspec.json.decode(json.dumps(recorded), type=Handover)
    assert json.loads(msgspec.json.encode(read)) == recorded
    assert read.version == VERSION


@pytest.mark.parametrize(
    "kind",
    [each for each in vars(handed_over).values() if isinstance(each, type) and each.__module__ == handed_over.__name__]
    + [EngineExit],
    ids=lambda kind: kind.__name__,
)
def test_the_example_contains_every_part(kind: type) -> None:
    """A part that the example lacks would not be frozen."""
    fields = set(kind.__annotations__) - {"status"}  # an engine ended by a signal has no status
    recorded = json.loads((EXAMPLES / f"{VERSION}.json").read_text())
    assert any(fields <= part.keys() and None not in [part[name] for name in fields] for part in parts(recorded))


def parts(document: object) -> list[dict[str, object]]:
    """Return all objects in a document."""
    if isinstance(document, list):
        return [found for each in document for found in parts(each)]
    if isinstance(document, dict):
        return [document, *(found for each in document.values() for found in parts(each))]
    return []
