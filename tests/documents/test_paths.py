"""Every path in backticks on a page leads to a file or a folder of this repository."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.documents.pages import ROOT

PAGES = sorted(
    page
    for page in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part == "node_modules" for part in page.relative_to(ROOT).parts)
    and page.name != "CHANGELOG.md"  # it names files of its time
)
BASES = ("", "service", "workers", "transport", "client", "client/roundhouse_client", "docs", "tests", "deploy")
OWN_PROGRAMS = ("docs/how-to", "docs/tutorial.md")  # their readers write files of their own
# Words of the same form: a parameter, a route's end, a field of MCP, and files of a reader's.
NO_PATHS = {
    "models/tiny.gguf",
    "roundhouse/idempotency-key",
    "roundhouse/models/SmolLM2-135M-Instruct.Q4_1.gguf",
    "weights/init",
}
QUOTED = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[a-z_.][a-z0-9_.-]*(?:/[\w.-]+)+/?|[a-z_]\w*\.(?:py|md|toml)")


@cache
def tree() -> frozenset[str]:
    """Return every tracked file and folder."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    there = [Path(name) for name in files if (ROOT / name).exists()]
    return frozenset(str(each) for file in there for each in (file, *file.parents))


@cache
def folders() -> frozenset[str]:
    """Return the names of all folders: a path of ours begins with one of them."""
    return frozenset(Path(name).name for name in tree() if (ROOT / name).is_dir())


def paths_of(page: Path) -> list[str]:
    """Return the texts of a page that look like a path of ours; code blocks are readers' own programs and files."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    quoted = {each.partition("::")[0] for each in QUOTED.findall(text)} - NO_PATHS
    found = {each for each in quoted if PATH.fullmatch(each) and not re.search(r"/[A-Z]{2}", each)}
    of_readers = str(page.relative_to(ROOT)).startswith(OWN_PROGRAMS)
    return sorted(each for each in found if (each.split("/")[0] in folders() if "/" in each else not of_readers))


def is_there(path: str, page: Path) -> bool:
    """Return whether a path leads from the root, a package or the page's folder to a file, or to a name in one."""
    bases = [Path(base) for base in BASES] + list(page.relative_to(ROOT).parents)
    for base in bases:
        whole = str(base / path)
        if {whole, f"{whole}.py", f"{whole}.sql"} & tree():
            return True
        file, _, name = whole.rpartition(".")
        if f"{file}.py" in tree() and re.search(rf"\b{re.escape(name)}\b", (ROOT / f"{file}.py").read_text()):
            return True
    return "/" not in path and any(Path(each).name == path for each in tree())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_on_a_page_exists(page: Path) -> None:
    """Files move, and the pages that name them have to follow."""
    assert [path for path in paths_of(page) if not is_there(path, page)] == []


def test_paths_are_found_on_pages() -> None:
    """The pattern is not so narrow that it finds none."""
    assert sum(len(paths_of(page)) for page in PAGES) > 400
