"""Looks at new weights before any engine is told of them: what it cannot read breaks every engine at once.

What is not the whole model is refused too: engines fuse tensors, and one that comes without its neighbours leaves
theirs undefined.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from workers.errors import InvalidTensors, InvalidUpdate
from workers.files.safetensors import Shapes, read_folder
from workers.weights.update import Tensor


def check_checkpoint(folder: Path, model: str | None) -> None:
    """Return if ``folder`` holds whole safetensors, with the tensors of ``model`` where that is a folder as well.

    Raises:
        InvalidUpdate: it does not, and what is wrong with it.
    """
    if not folder.is_absolute() or not folder.is_dir():
        raise InvalidUpdate(f"checkpoint {folder}: is not a folder with an absolute path")
    _compare(f"checkpoint {folder}", _tensors(folder), model)


def check_tensors(tensors: Iterable[Tensor], model: str | None) -> None:
    """Return if ``tensors`` are those of ``model``, where that is a folder.

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
