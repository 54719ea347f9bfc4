"""Lines of the log, for people or as JSON, each with the fields of its context (``workers.log_context``)."""

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final, Literal

import msgspec

from workers.log_context import concerns_now

LogFormat = Literal["text", "json"]
PEOPLE: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MOST_SAID: Final = 2000  # longest message in characters: an engine may repeat all that a client has sent
# Characters that would fake a line, control a terminal, or change the direction of text.
CONTROLS: Final = (
    {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
    | {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
    | {9: "\t", 10: "\\n", 13: "\\r"}
)


class PeopleFormatter(logging.Formatter):
    """One line in words, with its context's fields in brackets at the end."""

    def __init__(self) -> None:
        super().__init__(PEOPLE)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        """Return the line without its traceback."""
        record.message = _bounded(record.message).translate(CONTROLS)
        line, fields = super().formatMessage(record), fields_of(record)
        return f"{line} [{' '.join(f'{key}={value}' for key, value in fields.items())}]" if fields else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, the context's fields, and a traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": _bounded(record.getMessage()),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode({key: _sound(value) for key, value in line.items()}).decode()


def fields_of(record: logging.LogRecord) -> Mapping[str, str | int]:
    """Return the fields of a log record; they come from the context, so call it where the record is written."""
    own: Mapping[str, str | int] | None = getattr(record, "about", None)
    return concerns_now()() if own is None else own


def set_format(kind: LogFormat) -> None:
    """Set the format of every handler of the root logger."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter() if kind == "json" else PeopleFormatter())


def _bounded(message: str) -> str:
    more = len(message) - MOST_SAID
    return message if more <= 0 else f"{message[:MOST_SAID]}… and {more} characters more"


def _sound(value: object) -> object:
    """Return a value that JSON can hold: lone surrogates are replaced."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
