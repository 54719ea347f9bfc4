"""Environments of the programs that benchmarks compare with: made by pip where they are not there yet."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

PINS: Final = {"sglang-router": ["sglang-router==0.3.2"], "litellm": ["litellm[proxy]==1.106.2"]}


def environment(name: str) -> Path:
    """Return the Python of a rival's environment in the user's cache folder."""
    pins = PINS[name]
    key = hashlib.sha256(f"{sys.version_info[:2]} {pins}".encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roundhouse" / "rivals"
    folder = cache / f"{name}-{key}"
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        print(f"setting up {name} in {folder}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *pins], check=True, stdout=sys.stderr)
        (folder / ".ready").touch()
    return python
