"""The cache of a hub's models, shared with the hub's own programs, so that no model is fetched twice.

Source: huggingface_hub, "Understand caching" for the folders, and "Environment variables" for the names.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from workers.errors import ModelUnavailable
from workers.files.atomic import replace_file
from workers.models.hub_name import GGUF, HubName, choose_files, is_safe

ENDPOINT: Final = "https://huggingface.co"
MOST_PAGE_BYTES: Final = 32 * 1024 * 1024  # a hub's listing of a repository, or an index of weights
MOST_TOKEN_BYTES: Final = 4096
MEANINGS: Final = ".roundhouse"  # beside the hub's own folders of a repository
INDEX: Final = "model.safetensors.index.json"


class HubSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The hub's address and the cache of its models; ``token`` is only for the hub's own host."""

    endpoint: str = ENDPOINT
    cache: Path
    token: str | None = None
    is_offline: bool = False

    def __repr__(self) -> str:
        return f"<HubSettings {self.endpoint}, {self.cache}>"  # without the token


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
    """Return the folder of a repository in the cache."""
    return cache / f"models--{name.owner}--{name.repository}"


def find_kept(name: HubName, cache: Path) -> Path | None:
    """Return a model's file or folder in the cache; None unless it is complete.

    If a name does not give the file itself, that is the file that it was found to mean, else one of those present.
    """
    folder = folder_of(name, cache)
    try:
        commit = name.revision if name.is_of_commit else (folder / "refs" / name.revision).read_text().strip()
        snapshot = folder / "snapshots" / commit
        if not is_safe(commit) or not snapshot.is_dir():
            return None
        there = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()]
        meant = _meaning(name, commit, cache)
        chosen = choose_files(name if meant is None else msgspec.structs.replace(name, file=meant), there)
        if chosen[-1].endswith(GGUF):
            return snapshot / chosen[0]
        return snapshot if _has_all_weights(snapshot) else None
    except (OSError, ModelUnavailable, UnicodeDecodeError):
        return None


def is_settled(name: HubName, kept: Path, cache: Path) -> bool:
    """Return whether a name means a cached file for ever, so that the hub need not be asked."""
    if not name.is_of_commit:
        return False
    snapshot = folder_of(name, cache) / "snapshots" / name.revision
    is_said = name.is_pinned and (name.file is None or kept == snapshot / name.file)
    return is_said or _meaning(name, name.revision, cache) is not None


def note_meaning(name: HubName, commit: str, file: str, cache: Path) -> None:
    """Record which file a name means in a commit, if the cache is writable."""
    if "/" not in (name.file or ""):
        with suppress(OSError):
            replace_file(_meaning_file(name, commit, cache), file.encode())


def _meaning(name: HubName, commit: str, cache: Path) -> str | None:
    if name.is_gguf is False or "/" in (name.file or ""):
        return None
    try:
        with _meaning_file(name, commit, cache).open() as opened:
            file = opened.read(MOST_TOKEN_BYTES)
    except (OSError, UnicodeDecodeError):
        return None
    return file if is_safe(file) and file.endswith(GGUF) else None


def _meaning_file(name: HubName, commit: str, cache: Path) -> Path:
    return folder_of(name, cache) / MEANINGS / commit / (name.file or "any")


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
