"""Flags from a mapping, as operators write them in the configuration. Pure."""

from collections.abc import Mapping

from workers.errors import InvalidSpec
from workers.spec import Flag, FlagValue


def named(flags: Mapping[str, Flag]) -> dict[str, Flag]:
    """Return flags by canonical name, however an operator writes it: no leading hyphens, hyphens for underscores."""
    return {_name(name): value for name, value in flags.items()}


def _name(name: str) -> str:
    return name.lstrip("-").replace("_", "-")


def render_flags(flags: Mapping[str, Flag]) -> list[str]:
    """Return argv: a value follows its flag, True is a bare flag, False and None are left out, a sequence repeats.

    An underscore in a name may stand for the hyphen; a name with its own leading hyphens is taken as it is.
    """
    argv: list[str] = []
    for name, value in flags.items():
        flag = name if name.startswith("-") else f"--{name.replace('_', '-')}"
        for one in (value,) if value is None or isinstance(value, str | int | float) else value:
            argv += _render(flag, one)
    return argv


def refuse_owned(flags: Mapping[str, Flag], owned: Mapping[str, str]) -> None:
    """Refuse a flag that a key of the model's configuration sets; ``owned`` maps the flag to that key.

    Raises:
        InvalidSpec: a flag is in both.
    """
    for name in flags:
        key = owned.get(_name(name))
        if key is not None:
            raise InvalidSpec(f"args.{name}: is decided by the key '{key}' of the model; set that instead")


def refuse_doubled(flags: Mapping[str, Flag], aliases: Mapping[str, str]) -> None:
    """Refuse a flag that is given twice: in two spellings, by its short name, or with its opposite.

    Raises:
        InvalidSpec: the engine would use only the last one.
    """
    seen: dict[str, str] = {}
    for name, value in flags.items():
        if value is None or value is False:
            continue
        long = aliases.get(_name(name), _name(name)).removeprefix("no-")
        first = seen.setdefault(long, name)
        if first != name:
            raise InvalidSpec(f"args.{name}: args.{first} decides the same; give one of both")


def _render(flag: str, value: FlagValue) -> list[str]:
    if value is None or value is False:
        return []
    return [flag] if value is True else [flag, str(value)]
