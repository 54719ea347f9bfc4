"""Flags from a mapping, the way operators write them in the configuration. Pure."""

from collections.abc import Mapping

from workers.errors import InvalidSpec
from workers.spec import Flag, FlagValue


def named(flags: Mapping[str, Flag]) -> dict[str, Flag]:
    """Return flags by their one name, however an operator writes it: no leading hyphens, hyphens for underscores."""
    return {_name(name): value for name, value in flags.items()}


def _name(name: str) -> str:
    return name.lstrip("-").replace("_", "-")


def render_flags(flags: Mapping[str, Flag]) -> list[str]:
    """Return argv: a value follows its flag, True is a bare flag, False and None are none, a sequence repeats.

    An underscore in a name may stand for the hyphen; a name that brings its own hyphens is taken as it is.
    """
    argv: list[str] = []
    for name, value in flags.items():
        flag = name if name.startswith("-") else f"--{name.replace('_', '-')}"
        for one in (value,) if value is None or isinstance(value, str | int | float) else value:
            argv += _render(flag, one)
    return argv


def refuse_owned(flags: Mapping[str, Flag], owned: Mapping[str, str]) -> None:
    """Refuse a flag that a key of the model's configuration decides; ``owned`` maps the flag to that key.

    Raises:
        InvalidSpec: a flag is in both.
    """
    for name in flags:
        key = owned.get(_name(name))
        if key is not None:
            raise InvalidSpec(f"args.{name}: is decided by the key '{key}' of the model; set that instead")


def _render(flag: str, value: FlagValue) -> list[str]:
    if value is None or value is False:
        return []
    return [flag] if value is True else [flag, str(value)]
