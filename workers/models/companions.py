"""Files of a repository that accompany a model: projectors, drafters, adapters, importance matrices. Pure.

Source: repositories of ggml-org, unsloth, bartowski and others on Hugging Face, by the names that people give.
"""

import re
from collections.abc import Collection
from typing import Final

PROJECTOR, MATRIX, DRAFTER, ADAPTER = "a projector", "an importance matrix", "a drafter", "an adapter"
NEVER_MODELS: Final = frozenset({PROJECTOR, MATRIX})  # not even if the name asks for one
_BETWEEN: Final = re.compile(r"[-._ ]+")
_MATRICES: Final = frozenset({"imatrix"})
_DRAFTERS: Final = frozenset({
    "mtp", "nextn", "draft", "drafter", "draftmodel", "dflash", "dspark", "eagle2", "eagle3", "medusa", "speculator",
})  # fmt: skip
_ADAPTERS: Final = frozenset({"lora", "loras", "qlora", "dora", "adapter", "adapters", "peft", "cvector"})
_MERGED: Final = frozenset({"merged", "merge", "fused"})  # into a model


def companion_kinds(paths: Collection[str], repository: str) -> dict[str, str | None]:
    """Return the kind of companion that each GGUF file of a repository is, None for a model."""
    kinds = {path: _kind(path, _words(repository)) for path in paths}
    if None not in kinds.values():  # a word that all files share does not distinguish them
        common = set.intersection(*(_words(path.rpartition("/")[2]) for path in paths)) if paths else set()
        kinds = {path: _kind(path, common | _words(repository)) for path in paths}
    return kinds


def _kind(path: str, usual: set[str]) -> str | None:
    """Return the kind of companion by a file's name; ``usual`` words mean nothing in the middle of it."""
    *folders, base = path.lower().removesuffix(".gguf").split("/")
    words = _BETWEEN.split(base)
    own, above = set(words), {word for folder in folders for word in _words(folder)}
    if "mmproj" in path.lower() or "projector" in own | above:
        return PROJECTOR
    # In the middle of a name, before a quant, it only says how the quant was made.
    if _MATRICES & {words[0], words[-1], *above}:
        return MATRIX
    if _DRAFTERS & ({words[0]} | above | (own - usual)):
        return DRAFTER
    return ADAPTER if _ADAPTERS & (own | above) and not _MERGED & own else None


def _words(name: str) -> set[str]:
    return set(_BETWEEN.split(name.lower().removesuffix(".gguf")))
