"""Writes the tables of modules in the documents, from the first sentence of each module's docstring.

Two comments in a page mark a table, which is written between them::

    <!-- modules: service/node -->    every module and package of a folder
    <!-- rooms: service -->           only its packages
    <!-- end -->

Packages with import contracts keep the contracts' order, everything else is sorted by name. Run
``python tools/module_tables.py`` after a change; a test in ``tests/documents`` compares.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
TABLE: Final = re.compile(r"(<!-- (modules|rooms): (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
CITATION: Final = re.compile(r" \(specification, [^)]*\)")


def main() -> None:
    """Rewrite every table that is out of date."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (written := with_tables(text)) != text:
            page.write_text(written, encoding="utf-8")
            print(f"{page.relative_to(ROOT)}: written")


def pages() -> list[Path]:
    """Return the pages with tables of modules."""
    found = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/*.md")]
    return sorted({page for page in found if TABLE.search(page.read_text(encoding="utf-8"))})


def with_tables(text: str) -> str:
    """Return a page with all its tables rewritten."""
    return TABLE.sub(lambda found: f"{found[1]}\n{table(found[3], found[2] == 'rooms')}\n{found[5]}", text)


def table(folder: str, is_rooms: bool) -> str:
    """Return the table of a folder's modules, or only of its packages."""
    rows = [
        f"| `{path.name}/` | {sentence(path / '__init__.py')} |"
        if path.is_dir()
        else f"| `{path.stem}` | {sentence(path)} |"
        for path in _in_order(ROOT / folder)
        if path.is_dir() or not is_rooms
    ]
    if not rows:
        raise SystemExit(f"{folder} has no modules; a page has a table of them")
    return "\n".join(["| room | holds |" if is_rooms else "| module | holds |", "| --- | --- |", *rows]) + "\n"


def sentence(module: Path) -> str:
    """Return the first sentence of a module's docstring as a cell of a table, without citations."""
    docstring = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    first = re.split(r"\.(?:\s|$)", " ".join(docstring.split("\n\n")[0].split()), maxsplit=1)[0]
    return CITATION.sub("", first).replace("``", "`").replace("|", "\\|")


def _in_order(folder: Path) -> list[Path]:
    floors = _floors().get(folder.name, [])
    found = sorted(path for path in folder.glob("*") if _is_module(path))
    return sorted(found, key=lambda path: floors.index(path.stem) if path.stem in floors else len(floors))


def _is_module(path: Path) -> bool:
    return (path / "__init__.py").is_file() or (path.suffix == ".py" and not path.stem.startswith("__"))


def _floors() -> dict[str, list[str]]:
    """Return each package's layers from top to bottom, from the import contracts."""
    return dict(_layers(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))))


def _layers(project: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    for contract in project["tool"]["importlinter"]["contracts"]:
        for container in contract.get("containers", ()):
            yield container, [name.strip() for layer in contract["layers"] for name in layer.split("|")]


if __name__ == "__main__":
    main()
