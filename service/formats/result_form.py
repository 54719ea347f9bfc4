"""The formats of a job's result."""

from enum import StrEnum


class ResultForm(StrEnum):
    """One document, one transcript per line, or a table of turns."""

    JSON = "json"
    JSONL = "jsonl"
    CSV = "csv"
