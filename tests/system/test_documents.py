"""README and tutorial, followed exactly: every file is saved and every command run, in order."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from workers.models.small_model import ensure_small_model, small_model_path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^(?:[^\n]*?Save this as `([\w./-]+)`[^\n]*\n\n)?```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LIMIT_S = 300.0
# Processes that a page leaves running for its reader end with it.
BEGIN = "set -e\ntrap 'for pid in $(jobs -p); do kill $pid || true; wait $pid || true; done' EXIT"


def script_of(page: Path) -> str:
    """Return a shell script of a page: files as here-documents, commands unchanged."""
    parts = [BEGIN]
    for file, language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if file:
            parts.append(f"cat > {file} <<'END OF FILE'\n{text}END OF FILE")
        elif language == "sh" and "make " not in text:
            parts.append(text)
    return "\n".join(parts) + "\n"


@pytest.mark.parametrize("name", ["README.md", "docs/tutorial.md"])
def test_a_page_works_as_written(name: str, tmp_path: Path) -> None:
    """In a network namespace, since its ports may be in use here."""
    page = ROOT / name
    text = script_of(page)
    assert "END OF FILE" in text
    ensure_small_model()  # a network of its own has no index
    (tmp_path / "page.sh").write_text(text)
    environment = Path(sys.executable).parent
    (tmp_path / ".venv").symlink_to(environment.parent)
    own_network = f"{sys.executable} -I -S {ROOT}/tests/system/loopback.py && exec bash page.sh"
    with (tmp_path / "told").open("w+") as told:
        done = subprocess.run(
            ["unshare", "--net", "--", "sh", "-c", own_network],  # noqa: S607 - of util-linux
            cwd=tmp_path,
            env={
                "PATH": f"{environment}:/usr/local/bin:/usr/bin:/bin",
                "HOME": str(tmp_path),
                "XDG_CACHE_HOME": str(small_model_path().parents[2]),
            },
            stdout=told,
            stderr=told,
            timeout=LIMIT_S,
            check=False,
        )
        told.seek(0)
        assert done.returncode == 0, told.read()[-5000:]
