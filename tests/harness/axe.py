"""axe-core, Deque's accessibility checks, run inside a page.

Only the script is taken from its package: the package's dependencies include a browser of 160 MB.
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from tests.harness.browser import Page

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
KEPT = Path(__file__).parents[2] / "output" / "axe"
RULES = '{runOnly: {type: "tag", values: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}}'


def axe_script() -> str:
    """Return the script of the version in ``constraints.txt``; it is fetched once for a clone."""
    (wanted,) = re.findall(r"^axe-playwright-python==\S+", CONSTRAINTS.read_text(), re.MULTILINE)
    kept = KEPT / f"{wanted}.js"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, wanted]
            subprocess.run(command, check=True, timeout=120)
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (name for name in archive.namelist() if name.endswith("axe.min.js"))
                kept.write_bytes(archive.read(name))
    return kept.read_text()


def violations(page: Page, script: str) -> list[str]:
    """Return the violations of a page that is shown, each rule with its elements."""
    if not page.run("typeof axe === 'object'"):
        page.run(f"{script}; true")
    found: list[dict[str, Any]] = page.run(f"axe.run(document, {RULES}).then((told) => told.violations)")
    return [f"{each['id']}: {[node['html'][:200] for node in each['nodes']]}" for each in found]
