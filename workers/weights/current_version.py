"""Which version of its weights a model has, and where they are: kept over restarts of Roundhouse."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import msgspec
from msgspec import Struct

from workers.files.atomic import replace_file
from workers.loaded import LAUNCHED


class CurrentWeights(Struct, frozen=True, kw_only=True):
    """A model's version; ``launched`` is that of the weights that an engine is started with, from ``model``.

    ``checkpoint`` is the folder that an engine started anew is brought to the version from. None where it has it
    already, or where what a trainer sent was not kept.
    """

    version: int = LAUNCHED
    launched: int = LAUNCHED
    model: str | None = None
    checkpoint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentWeightsFile:
    """Where a model's standing is kept; in memory alone where there is no state directory."""

    name: str
    state_dir: Path | None

    @property
    def folder(self) -> Path | None:
        """Where what belongs to this model's weights is kept."""
        return self.state_dir / "weights" / quote(self.name, safe="") if self.state_dir else None

    def read(self, model: str | None) -> CurrentWeights:
        """Read the stored version.

        An engine that is configured with other weights than before starts with a version of their own: versions only
        rise.
        """
        folder = self.folder
        try:
            kept = msgspec.json.decode((folder / "standing.json").read_bytes(), type=CurrentWeights) if folder else None
        except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
            kept = None
        if kept is None:
            return CurrentWeights(model=model)
        if kept.model != model:
            return CurrentWeights(version=kept.version + 1, launched=kept.version + 1, model=model)
        return kept

    def write(self, current: CurrentWeights) -> None:
        """Keep it; what is there is always whole.

        Raises:
            OSError: it cannot be.
        """
        if self.folder is not None:
            replace_file(self.folder / "standing.json", msgspec.json.encode(current))

    def kept_folder(self, version: int) -> Path | None:
        """Return where what a trainer sent as a version is kept."""
        return self.folder / f"version-{version}" if self.folder else None
