"""Programs of the how-to pages run as written, and pass a strict type checker."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.documents.pages import ROOT
from tests.documents.test_pages import blocks

HOW_TO = ROOT / "docs" / "how-to"
CLASSES = ROOT / "docs" / "reference" / "python-classes.md"
LIMIT_S = 120
# Modules that a reader has, and that a trainer's environment has.
FOREIGN = ("my_training", "datasets", "tokenizers", "torch", "transformers", "trl")


def program(page: str, name: str) -> str:
    """Return a block of Python that a page tells its readers to save."""
    text = (HOW_TO / page).read_text(encoding="utf-8")
    found = re.search(rf"Save\s+this as `{re.escape(name)}`.*?^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert found is not None, f"{page} has no {name}"
    return found.group(1)


@pytest.mark.system
@pytest.mark.parametrize(
    ("page", "name", "expected"),
    [
        ("python-worker.md", "sums.py", r"running \w+\ncompleted None length 64\nTrue\n"),
        ("python-worker.md", "many.py", r"20 completed\n"),
        ("agents-on-gpus.md", "town.py", r"(?s).*\n6 answers\n7 tries, 112 tokens\npredicted: \w+\n"),
    ],
)
def test_a_program_prints_what_its_page_says(
    tmp_path: Path, free_ports: Callable[[int], int], page: str, name: str, expected: str
) -> None:
    """In an empty folder; only ports differ, since several tests run at once."""
    port = free_ports(2)
    text = program(page, name).replace("port=9100", f"port={port}")
    text = text.replace("        spec,\n", f"        spec,\n        ports=({port}, {port + 1}),\n")
    (tmp_path / name).write_text(text)
    ran = subprocess.run(
        [sys.executable, name], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert re.fullmatch(expected, ran.stdout), ran.stdout


@pytest.mark.system
def test_programs_of_all_pages_pass_a_strict_type_checker(tmp_path: Path) -> None:
    """Worker, engine and clients come with types."""
    pages = [page for page in [*sorted(HOW_TO.glob("*.md")), CLASSES] if "import" in "".join(blocks(page, "python"))]
    for page in pages:
        for number, text in enumerate(blocks(page, "python")):
            if re.search(r"^(from|import) ", text, re.MULTILINE):
                (tmp_path / f"{page.stem.replace('-', '_')}_{number}.py").write_text(text)
    python = _installation(tmp_path / "installation")
    missing = "".join(f"[mypy-{name}]\nignore_missing_imports = true\n" for name in FOREIGN)
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nstrict = true\n{missing}")
    command = [sys.executable, "-m", "mypy", "--cache-dir", os.devnull, "--python-executable", str(python)]
    command += ["--exclude", "installation", "."]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S * 3, check=False)
    assert ran.returncode == 0, ran.stdout


def _installation(folder: Path) -> Path:
    """Return the interpreter of an environment in which our packages lie as a wheel would put them."""
    venv.create(folder, with_pip=False)
    packages = folder / "packages"
    packages.mkdir()
    for name in ("roundhouse", "service", "transport", "workers"):
        (packages / name).symlink_to(ROOT / name)
    (packages / "roundhouse_client").symlink_to(ROOT / "client" / "roundhouse_client")
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "ours.pth").write_text(f"{packages}\n{sysconfig.get_path('purelib')}\n")
    return folder / "bin" / "python"
