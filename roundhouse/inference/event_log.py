"""The log of timing events: JSON lines that a thread writes, rotated by size, and their replay in order."""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

INFER_START: Final = "EVENT_INFER_START"
INFER_DONE: Final = "EVENT_INFER_DONE"
MAX_BYTES: Final = 64 * 1024 * 1024
KEPT: Final = 1000  # files that a log was rotated into, of which the oldest goes then


class EventLog:
    """Appends events to a file without holding up who tells them; ``close`` returns when all are on the disk."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = RotatingFileHandler(path, maxBytes=max_bytes, backupCount=KEPT, encoding="utf-8", errors="replace")
        queue: SimpleQueue[Any] = SimpleQueue()
        self._handler = QueueHandler(queue)
        self._listener = QueueListener(queue, self._file)
        self._listener.start()

    def __repr__(self) -> str:
        return f"<EventLog {self._path}>"

    def write(self, event: Mapping[str, object]) -> None:
        """Take an event; nothing waits."""
        self._handler.enqueue(logging.makeLogRecord({"msg": json.dumps(event, ensure_ascii=False)}))

    def close(self) -> None:
        """Write what is left, and close; called once."""
        self._listener.stop()
        if self._file.stream is not None:
            self._file.flush()
            os.fsync(self._file.stream.fileno())
        self._file.close()


def replay(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a log in the order of the wall clock, over its rotations.

    A line that a crash cut off is passed over.
    """
    rotated = sorted(path.parent.glob(f"{path.name}.*"), key=_age, reverse=True)
    events = [event for file in (*rotated, path) if file.exists() for event in _events_of(file)]
    yield from sorted(events, key=lambda event: float(event["time"]))


def _age(file: Path) -> int:
    number = file.suffix.removeprefix(".")
    return int(number) if number.isdecimal() else -1


def _events_of(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and isinstance(event.get("time"), int | float):
                yield event
