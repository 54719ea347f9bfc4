"""Reads documentation pages: their sections, the tables in them, and blocks of code."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"


def section(page: Path, heading: str) -> str:
    """Return the text under a heading, down to the next one of its level or above."""
    text = page.read_text(encoding="utf-8")
    found = re.search(rf"^(#+) +{re.escape(heading)} *$", text, re.MULTILINE)
    assert found is not None, f"{page.name} has no heading {heading!r}"
    rest = text[found.end() :]
    after = re.search(rf"^#{{1,{len(found.group(1))}}} ", rest, re.MULTILINE)
    return rest[: after.start()] if after else rest


def rows(text: str) -> list[list[str]]:
    """Return the rows of all tables, without their heads, as cells without backticks around a whole cell."""
    found = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        is_row = line.startswith("|") and not re.match(r"^\|[\s|:-]+$", line)
        is_head = number + 1 < len(lines) and re.match(r"^\|[\s|:-]+$", lines[number + 1])
        if is_row and not is_head:
            cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
            found.append([cell.strip() for cell in cells])
    return found


def names(text: str, column: int = 0) -> list[str]:
    """Return every name in backticks of a column of the tables."""
    return [name for row in rows(text) for name in re.findall(r"`([^`]+)`", row[column])]


def own_rows(page: Path, heading: str) -> list[list[str]]:
    """Return the rows of the tables right under a heading, not those of the headings below it."""
    return rows(re.split(r"^#", section(page, heading), maxsplit=1, flags=re.MULTILINE)[0])
