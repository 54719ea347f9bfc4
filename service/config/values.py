"""The kinds of single values in a configuration, with what each may be."""

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field

LAST_PORT: Final = 65535
Scalar = str | int | float | bool | None


def _usable_path(path: Path) -> Path:
    if "\0" in str(path):
        raise ValueError("no path holds a NUL")
    return path


def _usable_argument(value: object) -> object:
    if not all(isinstance(each, Scalar) for each in (value if isinstance(value, list) else [value])):
        raise ValueError("must be text, a number, true, false, null or a list of those")
    return value


def _usable_folder(value: object) -> object:
    if value is not None and value is not False and not isinstance(value, str | Path):
        raise ValueError("must be a path, false or null")
    return value


Port = Annotated[int, Field(ge=1, le=LAST_PORT)]
Kept = Annotated[float, Field(gt=0, le=3e9)]  # seconds: a date before our time cannot be told
Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]  # no program can be given a NUL
# Each becomes a value in an engine's environment, where a comma or a line would be a second one.
Uuid = Annotated[str, Field(pattern=r"^[A-Za-z0-9._/-]{1,128}$")]
Place = Annotated[Path, AfterValidator(_usable_path)]
# What is wrong with a union's value would be told once for each member: what it may be is told before they are tried.
Argument = Annotated[Scalar | list[Scalar], BeforeValidator(_usable_argument)]
Folder = Annotated[Place | Literal[False] | None, BeforeValidator(_usable_folder)]
