"""Checks citations: quoted headings of the specification, and links between the pages.

A citation names the specification, then a heading in quotes; each heading occurs once in its pages. Part of
``make lint``.
"""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
SPECIFICATION: Final = ROOT / "docs" / "specification"
HEADING: Final = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
CITATION: Final = re.compile(r'[Ss]pecification,\s+("[^"\n]+"(?:\s+and\s+"[^"\n]+")*)')
LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
FENCE: Final = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# Citations from before the specification, of documents outside the repository; written so as not to match itself.
ABSENT: Final = re.compile(r"\b[Ss]eeds? 00\d|\b[Cc]ontract,? (?:sections? \d|\d\.\d)|\b[I]ssue [A-Z]\b")


def main() -> None:
    """Print every fault; exit with 1 if there is any."""
    headings = Counter(heading for page in SPECIFICATION.glob("*.md") for heading in _headings(page))
    faults = [f"the specification has {count} headings {name!r}" for name, count in headings.items() if count > 1]
    faults += [fault for path in _tracked() for fault in _check(path, set(headings))]
    for fault in faults:
        print(fault)
    print(f"citations: {len(faults)} lead nowhere")
    sys.exit(1 if faults else 0)


def _tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def _check(path: Path, headings: set[str]) -> Iterator[str]:
    name = path.relative_to(ROOT)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    for found in CITATION.finditer(text):
        for heading in re.findall(r'"([^"]+)"', found.group(1)):
            if heading not in headings:
                yield f"{name}:{_line(text, found)}: the specification has no heading {heading!r}"
    for found in ABSENT.finditer(text):
        yield f"{name}:{_line(text, found)}: {found.group(0)!r} is not in the repository; cite the specification"
    if path.suffix == ".md":
        yield from _check_links(path, FENCE.sub("", text))


def _check_links(path: Path, text: str) -> Iterator[str]:
    name = path.relative_to(ROOT)
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        page = (path.parent / file).resolve() if file else path
        if not page.exists():
            yield f"{name}: the link {target} leads to no file"
        elif anchor and anchor not in _anchors(page):
            yield f"{name}: the link {target} leads to no heading"


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, in the form of code hosts."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _headings(page)}


def _headings(page: Path) -> list[str]:
    return HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8")))


def _line(text: str, found: re.Match[str]) -> int:
    return text.count("\n", 0, found.start()) + 1


if __name__ == "__main__":
    main()
