"""A model by its name on a hub: ``hf:ORG/REPO[:FILE-OR-QUANT][@REVISION]``, and which of its files are wanted. Pure."""

import re
from collections.abc import Collection, Iterable
from typing import Final

import msgspec

from workers.errors import InvalidSpec, ModelUnavailable

PREFIX: Final = "hf:"
GGUF: Final = ".gguf"
SAFETENSORS: Final = ".safetensors"
# What vLLM reads beside weights. What could hold code, Python's or pickled, is never fetched.
BESIDE: Final = (".json", ".jinja", ".model", ".tiktoken", ".txt")
USUAL_QUANTS: Final = ("Q4_K_M", "Q8_0")
MAIN: Final = "main"
SHOWN: Final = 12
_SEGMENT: Final = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}"
_NAME: Final = re.compile(
    rf"hf:(?P<owner>{_SEGMENT})/(?P<repository>{_SEGMENT})(?::(?P<file>{_SEGMENT}))?(?:@(?P<revision>{_SEGMENT}))?"
)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_PART: Final = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class HubName(msgspec.Struct, frozen=True, kw_only=True):
    """A model's name; ``file`` is a GGUF file of the repository or the end of its name, as ``Q4_K_M``.

    ``is_gguf`` is what an engine loads, and is not written: None is what there is, a GGUF file before a checkpoint.
    """

    owner: str
    repository: str
    file: str | None = None
    revision: str = MAIN
    is_gguf: bool | None = None

    def __str__(self) -> str:
        file = "" if self.file is None else f":{self.file}"
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return f"{PREFIX}{self.owner}/{self.repository}{file}{revision}"

    @property
    def is_pinned(self) -> bool:
        """Whether it means the same files for ever."""
        return _COMMIT.fullmatch(self.revision) is not None


def parse_hub_name(text: str, *, is_gguf: bool | None = None) -> HubName:
    """Read a model's name, for an engine that loads GGUF files, or checkpoints; None is for either.

    Raises:
        InvalidSpec: it is none, or names a GGUF file for an engine that loads checkpoints.
    """
    found = _NAME.fullmatch(text)
    if found is None:
        raise InvalidSpec(f"{text}: a model of a hub is written hf:ORG/REPO[:FILE-OR-QUANT][@REVISION]")
    if found["file"] and is_gguf is False:
        raise InvalidSpec(f"{text}: vllm loads a checkpoint, not one GGUF file of a repository")
    return HubName(**{key: value for key, value in found.groupdict().items() if value is not None}, is_gguf=is_gguf)


def choose_files(name: HubName, paths: Collection[str]) -> list[str]:
    """Return which files of a repository are wanted: those of one GGUF, or a checkpoint with its weights last.

    Raises:
        ModelUnavailable: there is no such file, or a person has to say which.
    """
    files = sorted(filter(is_safe, paths), key=lambda path: (path.count("/"), path))
    ggufs = [path for path in files if path.endswith(GGUF) and "mmproj" not in _base(path).lower()]
    if name.is_gguf is False or (name.is_gguf is None and name.file is None and not ggufs):
        return _checkpoint(name, files)
    return _all_parts(name, _gguf(name, ggufs), files)


def is_safe(path: str) -> bool:
    """Whether a path of a repository stays in it."""
    return all(re.fullmatch(_SEGMENT, segment) for segment in path.split("/"))


def _base(path: str) -> str:
    return path.rpartition("/")[2]


def _gguf(name: HubName, ggufs: list[str]) -> str:
    """Return the GGUF file that is meant; of one in parts the first."""
    first = [path for path in ggufs if (part := _PART.fullmatch(path)) is None or int(part["number"]) == 1]
    if name.file is None:
        quants: Iterable[str] = USUAL_QUANTS
        found = first if len(first) == 1 else []
    else:
        quants = (name.file,)
        found = [path for path in first if _base(path) == name.file]
    for quant in quants:
        found = found or [path for path in first if _is_of_quant(path, quant)]
    if not found:
        missing = "there is no such GGUF file" if name.file or not first else "say which of its files"
        raise ModelUnavailable(f"{name}: {missing}; it has {_listed(map(_base, first))}")
    return found[0]


def _is_of_quant(path: str, quant: str) -> bool:
    part = _PART.fullmatch(path)
    stem = part["stem"] if part else path.removesuffix(GGUF)
    return re.search(rf"(^|[-._/]){re.escape(quant)}$", stem, re.IGNORECASE) is not None


def _all_parts(name: HubName, path: str, files: list[str]) -> list[str]:
    part = _PART.fullmatch(path)
    if part is None:
        return [path]
    count = part["count"]
    parts = [f"{part['stem']}-{number:05}-of-{count}{GGUF}" for number in range(1, min(int(count), len(files)) + 1)]
    missing = sorted({*parts} - {*files})
    if missing or len(parts) < int(count):
        raise ModelUnavailable(f"{name}: of {_base(path)} parts are missing: {_listed(map(_base, missing))}")
    return parts


def _checkpoint(name: HubName, files: list[str]) -> list[str]:
    """Return the files that vLLM reads, as they lie in the repository's own folder."""
    here = [path for path in files if "/" not in path]
    weights = [path for path in here if path.endswith(SAFETENSORS)]
    whole = [path for path in weights if path.startswith("model")]  # some have them a second time, in another form
    if not weights or "config.json" not in here:
        what = "no" if name.is_gguf is False else "neither a GGUF file nor a"
        raise ModelUnavailable(f"{name}: there is {what} checkpoint of safetensors")
    return [*(path for path in here if path.endswith(BESIDE)), *(whole or weights)]


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = len(names) - SHOWN
    return (", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")) or "none"
