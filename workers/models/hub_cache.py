"""The cache of a hub's models: that of the hub's own programs, so that nobody fetches a model twice.

Source: huggingface_hub, "Understand caching" for the folders, and "Environment variables" for the names.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from workers.errors import ModelUnavailable
from workers.models.hub_name import GGUF, HubName, choose_files, is_safe

ENDPOINT: Final = "https://huggingface.co"
MOST_PAGE_BYTES: Final = 32 * 1024 * 1024  # of what a hub says about a repository, and of an index of weights
MOST_TOKEN_BYTES: Final = 4096
INDEX: Final = "model.safetensors.index.json"


class HubSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The hub's address and the cache of its models; ``token`` is for the hub's own host alone."""

    endpoint: str = ENDPOINT
    cache: Path
    token: str | None = None
    is_offline: bool = False

    def __repr__(self) -> str:
        return f"<HubSettings {self.endpoint}, {self.cache}>"  # no token


def hub_settings(environment: Mapping[str, str], home: Path) -> HubSettings:
    """Return the settings that a hub's own programs would take from the same environment."""
    said = environment.get
    caches = Path(said("XDG_CACHE_HOME") or home / ".cache")
    hub_home = Path(said("HF_HOME") or caches / "huggingface")
    return HubSettings(
        endpoint=(said("HF_ENDPOINT") or ENDPOINT).rstrip("/"),
        cache=Path(said("HF_HUB_CACHE") or said("HUGGINGFACE_HUB_CACHE") or hub_home / "hub").expanduser(),
        token=said("HF_TOKEN") or _kept_token(Path(said("HF_TOKEN_PATH") or hub_home / "token").expanduser()),
        is_offline=said("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"},
    )


def _kept_token(path: Path) -> str | None:
    try:
        with path.open() as file:
            return file.read(MOST_TOKEN_BYTES).strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def folder_of(name: HubName, cache: Path) -> Path:
    """Return the folder that a repository has in the cache."""
    return cache / f"models--{name.owner}--{name.repository}"


def find_kept(name: HubName, cache: Path) -> Path | None:
    """Return a model's file or folder in the cache; None unless all of it is there."""
    folder = folder_of(name, cache)
    try:
        commit = name.revision if name.is_pinned else (folder / "refs" / name.revision).read_text().strip()
        snapshot = folder / "snapshots" / commit
        if not is_safe(commit) or not snapshot.is_dir():
            return None
        there = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()]
        chosen = choose_files(name, there)
        if chosen[-1].endswith(GGUF):
            return snapshot / chosen[0]
        return snapshot if _has_all_weights(snapshot) else None
    except (OSError, ModelUnavailable, UnicodeDecodeError):
        return None


def _has_all_weights(snapshot: Path) -> bool:
    index = snapshot / INDEX
    if not index.is_file():
        return True
    try:
        with index.open("rb") as file:
            shards = msgspec.json.decode(file.read(MOST_PAGE_BYTES), type=_Shards).weight_map.values()
    except (msgspec.DecodeError, RecursionError):
        return False
    return all(is_safe(shard) and (snapshot / shard).is_file() for shard in set(shards))


class _Shards(msgspec.Struct):
    weight_map: dict[str, str]
