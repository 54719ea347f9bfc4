"""A model's name on a hub, ``hf:ORG/REPO[:FILE-OR-QUANT][@REVISION]``, and which of its files it means. Pure."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from workers.errors import InvalidSpec, ModelUnavailable
from workers.models.companions import NEVER_MODELS, companion_kinds

PREFIX: Final = "hf:"
GGUF: Final = ".gguf"
SAFETENSORS: Final = ".safetensors"
# Files that vLLM reads beside weights. Files that could hold code, Python's or pickled, are never fetched.
BESIDE: Final = (".json", ".jinja", ".model", ".tiktoken", ".txt")
USUAL_QUANTS: Final = ("Q4_K_M", "Q8_0")
MAIN: Final = "main"
SHOWN: Final = 12
_SEGMENT: Final = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}"
_NAME: Final = re.compile(
    rf"hf:(?P<owner>{_SEGMENT})/(?P<repository>{_SEGMENT})(?::(?P<file>{_SEGMENT}(?:/{_SEGMENT})*))?(?:@(?P<revision>{_SEGMENT}))?"
)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
# The end of a name that gives the format of its weights: Q4_K_M, IQ2_XXS, UD-Q4_K_XL, TQ1_0, BF16, MXFP4_MOE.
_QUANT: Final = re.compile(r"(^|[-._/])(I?Q\d\w*|TQ\d\w*|B?F(P)?\d+\w*|MXFP\d\w*|NVFP\d\w*)$", re.IGNORECASE)
_PART: Final = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class HubName(msgspec.Struct, frozen=True, kw_only=True):
    """A model's name; ``file`` is a GGUF file of the repository, with or without its folder, or the end of its name.

    The end may also be that of its folder's name, as in ``Q4_K_M``.

    ``is_gguf`` is the engine's format, and not part of the text: None takes what there is, a GGUF file before a
    checkpoint.
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
        """Whether it means the same files for ever, whatever else the repository or its cache holds."""
        is_exact = self.is_gguf is False or (self.file is not None and self.file.endswith(GGUF))
        return self.is_of_commit and is_exact

    @property
    def is_of_commit(self) -> bool:
        """Whether it means a state of the repository that never changes."""
        return _COMMIT.fullmatch(self.revision) is not None


def parse_hub_name(text: str, *, is_gguf: bool | None = None) -> HubName:
    """Read a model's name, for an engine that loads GGUF files or checkpoints; None is for either.

    Raises:
        InvalidSpec: it is no such name, or names a GGUF file for an engine that loads checkpoints.
    """
    found = _NAME.fullmatch(text)
    if found is None:
        raise InvalidSpec(f"{text}: a model of a hub is written hf:ORG/REPO[:FILE-OR-QUANT][@REVISION]")
    if found["file"] and is_gguf is False:
        raise InvalidSpec(f"{text}: vllm loads a checkpoint, not one GGUF file of a repository")
    return HubName(**{key: value for key, value in found.groupdict().items() if value is not None}, is_gguf=is_gguf)


def choose_files(name: HubName, paths: Collection[str]) -> list[str]:
    """Return the wanted files of a repository: those of one GGUF, or a checkpoint with its weights last.

    Raises:
        ModelUnavailable: there is no such file, or the name fits several.
    """
    files = sorted(filter(is_safe, paths), key=lambda path: (path.count("/"), path))
    ggufs = list(dict.fromkeys(_first_part(path) for path in files if path.endswith(GGUF)))
    kinds = companion_kinds(ggufs, name.repository)
    is_checkpoint = not ggufs or (None not in kinds.values() and "config.json" in files)
    if name.is_gguf is False or (name.is_gguf is None and name.file is None and is_checkpoint):
        return _checkpoint(name, files)
    return _all_parts(name, _gguf(name, kinds), files)


def is_safe(path: str) -> bool:
    """Whether a path of a repository stays in it."""
    return all(re.fullmatch(_SEGMENT, segment) for segment in path.split("/"))


def _base(path: str) -> str:
    return path.rpartition("/")[2]


def _gguf(name: HubName, kinds: Mapping[str, str | None]) -> str:
    """Return the GGUF file that is meant, or its first part; ``kinds`` has all files, companions included."""
    models = [path for path, kind in kinds.items() if kind is None]
    found = _named_files(name, kinds, models)
    for quant in USUAL_QUANTS if name.file is None else (name.file,):
        found = found or [path for path in models if _is_of_quant(path, quant)]
    if len(found) == 1:
        return found[0]
    if found:
        example = f"{PREFIX}{name.owner}/{name.repository}:{found[0]}"
        raise ModelUnavailable(f"{name}: several files fit: {_listed(found)}; name one of them, as {example}")
    missing = "there is no such GGUF file" if name.file or not models else "say which of its files"
    others = [f"{path} ({kind})" for path, kind in kinds.items() if kind is not None]
    beside = f", and beside it {_listed(others)}" if others else ""
    raise ModelUnavailable(f"{name}: {missing}; it has {_listed(models)}{beside}")


def _named_files(name: HubName, kinds: Mapping[str, str | None], models: Sequence[str]) -> list[str]:
    """Return the files that a name gives, in any folder if it gives none; without a file name, the only file."""
    if name.file is None:
        return list(models) if len(models) == 1 else []
    if not name.file.endswith(GGUF):
        return []
    wanted = _first_part(name.file)
    exact = [path for path in kinds if path == wanted] or [path for path in kinds if _base(path) == wanted]
    found = [path for path in exact if kinds[path] not in NEVER_MODELS]
    if exact and not found:
        raise ModelUnavailable(f"{name}: {exact[0]} is {kinds[exact[0]]} and no model; it has {_listed(models)}")
    return found


def _first_part(path: str) -> str:
    part = _PART.fullmatch(path)
    return path if part is None else f"{part['stem']}-00001-of-{part['count']}{GGUF}"


def _is_of_quant(path: str, quant: str) -> bool:
    """Whether a file's name ends with a quant, or its folder's if its own name has none."""
    part = _PART.fullmatch(path)
    stem = part["stem"] if part else path.removesuffix(GGUF)
    ends = [stem]
    if _QUANT.search(stem) is None:
        ends.append(stem.rpartition("/")[0])
    return any(re.search(rf"(^|[-._/]){re.escape(quant)}$", end, re.IGNORECASE) for end in ends)


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
    """Return the files that vLLM reads, as they lie in the repository's top folder."""
    here = [path for path in files if "/" not in path]
    weights = [path for path in here if path.endswith(SAFETENSORS) and not path.startswith("adapter_")]  # PEFT's
    whole = [path for path in weights if path.startswith("model")]  # some have them a second time, in another form
    if not weights or "config.json" not in here:
        what = "no" if name.is_gguf is False else "neither a GGUF file nor a"
        raise ModelUnavailable(f"{name}: there is {what} checkpoint of safetensors")
    return [*(path for path in here if path.endswith(BESIDE)), *(whole or weights)]


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = len(names) - SHOWN
    return (", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")) or "none"
