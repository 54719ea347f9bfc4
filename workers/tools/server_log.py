"""The standard error of a tool server: in our log, under its name, with its last line kept."""

import logging
import os
from typing import Final

import anyio

CHUNK_BYTES: Final = 65_536

LINE_BYTES: Final = 2_000  # the rest of a longer line is a line of its own

LAST_WORDS: Final = 200
logger = logging.getLogger(__name__)


class StderrLog:
    """The standard error of one program at a time; ``half`` is the beginning of an unfinished line."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.half = b""
        self.last_words = ""

    def __repr__(self) -> str:
        return f"<StderrLog {self._name}>"

    def begin(self, half: bytes = b"") -> None:
        """Forget an earlier program's output; ``half`` is the beginning of this one's."""
        self.half, self.last_words = half, ""

    async def follow(self, source: int) -> None:
        """Log the output on a non-blocking descriptor, until its end."""
        while True:
            await anyio.wait_readable(source)
            if not self._take(source):
                return

    def finish(self, source: int) -> None:
        """Log the remaining output, and the unfinished line."""
        self._take(source)
        if self.half:
            self._tell(self.half)
            self.half = b""

    def _take(self, source: int) -> bool:
        """Log the available output; return whether more may come."""
        try:
            read = os.read(source, CHUNK_BYTES)
        except BlockingIOError:
            return True
        *lines, self.half = (self.half + read).split(b"\n")
        for line in lines:
            self._tell(line)
        while len(self.half) > LINE_BYTES:
            self._tell(self.half[:LINE_BYTES])
            self.half = self.half[LINE_BYTES:]
        return bool(read)

    def _tell(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").strip()
        text = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
        if text:
            self.last_words = text[:LAST_WORDS]
            logger.info("MCP server %s says: %s", self._name, text[:LINE_BYTES])
