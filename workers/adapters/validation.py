"""Checks an adapter before any engine gets it: vLLM ends if one does not fit, and llama-server does not start.

Only plain faults are refused here; the engine itself judges the rest.
"""

from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from workers.errors import InvalidAdapter, InvalidTensors
from workers.files.gguf_header import read_gguf_header
from workers.files.safetensors import Shapes, read_folder, read_shapes

CONFIG: Final = "adapter_config.json"
TENSORS: Final = "adapter_model.safetensors"
PEFT_FILES: Final = (CONFIG, TENSORS)
PREFIX: Final = "base_model.model."  # PEFT's, before the name of the model's own tensor
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
MAX_CONFIG_BYTES: Final = 1024 * 1024


class _PeftConfig(Struct):
    peft_type: str
    r: int


def check_source(source: Path, *, is_folder: bool) -> None:
    """Check that the files to be copied exist.

    Raises:
        InvalidAdapter: one does not.
    """
    if not source.is_absolute():
        raise InvalidAdapter(f"{source} is not an absolute path")
    for file in (source / name for name in PEFT_FILES) if is_folder else (source,):
        if not file.is_file():
            raise InvalidAdapter(f"there is no file {file}")


def check_peft(folder: Path, model: str | None, most_rank: int | None) -> None:
    """Check that ``folder`` holds a LoRA adapter in PEFT's form, for ``model`` if that is a folder too.

    Raises:
        InvalidAdapter: it does not; the text has the fault.
    """
    config = _config(folder / CONFIG)
    if config.peft_type.upper() != "LORA":
        raise InvalidAdapter(f"{CONFIG}: peft_type is {config.peft_type}, not LORA")
    try:
        found = read_shapes(folder / TENSORS)
        base = read_folder(Path(model)) if model and list(Path(model).glob("*.safetensors")) else {}
    except InvalidTensors as error:
        raise InvalidAdapter(str(error)) from error
    ranks = [_check_pair(name, found, base) for name in found if name.endswith(DOWN)]
    if not ranks:
        raise InvalidAdapter(f"{TENSORS}: holds no tensor whose name ends with {DOWN}")
    if most_rank is not None and max(ranks) > most_rank:
        raise InvalidAdapter(f"its rank is {max(ranks)}, and the engines take {most_rank}: args.max-lora-rank")


def check_gguf(file: Path) -> None:
    """Check that ``file`` is a LoRA adapter in GGUF, as far as its header shows.

    Raises:
        InvalidAdapter: it is not; the text has the fault.
    """
    try:
        kind = read_gguf_header(file).get("general.type", "model")
    except InvalidTensors as error:
        raise InvalidAdapter(str(error)) from error
    if kind != "adapter":
        raise InvalidAdapter(f"it is a {kind}, and no adapter")


def is_gguf_adapter(file: Path) -> bool:
    """Whether a GGUF file declares itself an adapter; False if it cannot be read."""
    try:
        check_gguf(file)
    except InvalidAdapter:
        return False
    return True


def _config(file: Path) -> _PeftConfig:
    try:
        with file.open("rb") as opened:
            return msgspec.json.decode(opened.read(MAX_CONFIG_BYTES), type=_PeftConfig)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidAdapter(f"{CONFIG} cannot be read: {error}") from error


def _check_pair(down: str, found: Shapes, base: Shapes) -> int:
    """Return the rank of one layer's pair, which must fit the model's tensor of the same name, if there is one."""
    stem = down.removesuffix(DOWN)
    up = stem + UP
    if up not in found:
        raise InvalidAdapter(f"{down} is there, and {up} is not")
    inner, outer = found[down], found[up]
    if len(inner) != len(outer) or len(inner) < 2 or inner[0] != outer[1]:  # noqa: PLR2004 - matrices
        raise InvalidAdapter(f"{down} is {inner} and {up} is {outer}: they do not go together")
    target = base.get(f"{stem.removeprefix(PREFIX)}.weight")
    if target is not None and target != [outer[0], *inner[1:]]:
        raise InvalidAdapter(f"{stem.removeprefix(PREFIX)} is {target} in the model, and {[outer[0], *inner[1:]]} here")
    return inner[0]
