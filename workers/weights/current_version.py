"""The version of a model's weights, and where they are: kept across restarts of Roundhouse."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import quote

import anyio.to_thread
import msgspec
from msgspec import Struct

from workers.errors import InvalidTensors, InvalidUpdate
from workers.files.atomic import replace_file
from workers.files.safetensors import Shapes, read_folder
from workers.loaded import LAUNCHED
from workers.weights.update import Tensor

logger = logging.getLogger(__name__)


def check_checkpoint(folder: Path, model: str | None) -> None:
    """Check that ``folder`` holds whole safetensors, with the tensors of ``model`` if that is a folder too.

    Raises:
        InvalidUpdate: it does not; the text has the fault.
    """
    if not folder.is_absolute() or not folder.is_dir():
        raise InvalidUpdate(f"checkpoint {folder}: is not a folder with an absolute path")
    _compare(f"checkpoint {folder}", _tensors(folder), model)


def check_tensors(tensors: Iterable[Tensor], model: str | None) -> None:
    """Check that ``tensors`` are those of ``model``, if that is a folder.

    Raises:
        InvalidUpdate: they are not.
    """
    _compare("tensors", {tensor.name: list(tensor.shape) for tensor in tensors}, model)


def _compare(what: str, found: Mapping[str, list[int]], model: str | None) -> None:
    if model is None or not list(Path(model).glob("*.safetensors")):
        return
    expected = _tensors(Path(model))
    missing = sorted(set(expected) - set(found))
    if missing:
        raise InvalidUpdate(f"{what}: {len(missing)} of the model's {len(expected)} are missing: {missing[0]}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise InvalidUpdate(f"{what}: {name} is {found[name]}, and in the model {shape}")


def _tensors(folder: Path) -> Shapes:
    try:
        return read_folder(folder)
    except InvalidTensors as error:
        raise InvalidUpdate(f"checkpoint {error}") from error


class CurrentWeights(Struct, frozen=True, kw_only=True):
    """A model's version; ``launched`` is the version that an engine starts with, from ``model``.

    ``checkpoint`` is the folder from which a new engine loads the version. None if it starts with that version, or if a
    trainer's weights were not kept.
    """

    version: int = LAUNCHED
    launched: int = LAUNCHED
    model: str | None = None
    checkpoint: str | None = None


class CurrentVersion:
    """A model's version ``now``, and its file; without a state directory it is only in memory."""

    def __init__(self, name: str, state_dir: Path | None, model: str | None) -> None:
        self._name = name
        # Absolute: engines with another working directory read it too.
        self._folder = state_dir.absolute() / "weights" / quote(name, safe="") if state_dir else None
        self.now = self._read(model)

    def __repr__(self) -> str:
        return f"<CurrentVersion {self._name} {self.now.version}>"

    def _read(self, model: str | None) -> CurrentWeights:
        """Read the stored version.

        An engine that is configured with other weights than before starts with a new version: versions only rise.
        """
        folder = self._folder
        try:
            kept = msgspec.json.decode((folder / "standing.json").read_bytes(), type=CurrentWeights) if folder else None
        except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
            kept = None
        if kept is None:
            return CurrentWeights(model=model)
        if kept.model != model:
            return CurrentWeights(version=kept.version + 1, launched=kept.version + 1, model=model)
        return kept

    async def change(self, current: CurrentWeights) -> None:
        """Set the version and store it; the file is always whole."""
        self.now = current
        if self._folder is None:
            return
        file = self._folder / "standing.json"
        try:
            await anyio.to_thread.run_sync(replace_file, file, msgspec.json.encode(current))
        except OSError:
            logger.exception("model %s: weights %d: the version could not be kept", self._name, current.version)

    def kept_folder(self, version: int) -> Path | None:
        """Return the folder for a trainer's weights of a version."""
        return self._folder / f"version-{version}" if self._folder else None
