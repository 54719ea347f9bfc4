"""The forms in which a job's result is read."""

from enum import StrEnum


class ResultForm(StrEnum):
    """One document, a transcript a line, or a table of turns."""

    JSON = "json"
    JSONL = "jsonl"
    CSV = "csv"
