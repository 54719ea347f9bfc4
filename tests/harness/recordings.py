"""Recorded answers of real servers (``tests/data/streams``), in their form on the wire."""

import json
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

FOLDER: Final = Path(__file__).parents[1] / "data" / "streams"
KEPT_HEADERS: Final = ("content-type", "retry-after")


class Recording(msgspec.Struct, frozen=True):
    """One answer; ``expected`` is the plain meaning of its body."""

    id: str
    status: int
    kind: str
    body: str
    expected: dict[str, Any]
    headers: dict[str, str] | None = None

    @property
    def error(self) -> dict[str, Any] | None:
        """The error in it."""
        return self.expected.get("error")

    @property
    def is_stream(self) -> bool:
        """Whether it is a stream of an accepted request."""
        return self.kind == "sse" and self.status == 200

    @property
    def told_headers(self) -> dict[str, str]:
        """The headers that describe the body."""
        headers = {name.lower(): value for name, value in (self.headers or {}).items()}
        return {name: headers[name] for name in KEPT_HEADERS if name in headers}


@cache
def recordings() -> tuple[Recording, ...]:
    """Return all of them."""
    lines = [line for file in sorted(FOLDER.glob("*.jsonl")) for line in file.read_text("utf-8").splitlines()]
    return tuple(msgspec.convert(json.loads(line), Recording) for line in lines)
