"""Values as operators give them: whether one is the default, and what it stands for."""

from collections import Counter

from service.formats.faults import defaults_of


def is_default(section: object, key: str) -> bool:
    """Whether a key has its default value: the effective configuration lists all keys."""
    return bool(getattr(section, key) == defaults_of(type(section)).get(key))


def unlike_default(section: object, *keys: str) -> list[str]:
    """Return those of the keys whose values are not their defaults."""
    return [key for key in keys if not is_default(section, key)]


def distinct(devices: list[int | str] | None) -> list[int | str] | None:
    """Return the devices, each of which is named once.

    Raises:
        ValueError: one is named twice.
    """
    twice = next((each for each, count in Counter(devices or ()).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is given twice")
    return devices


def whole(value: object) -> int | None:
    """Return a number of tokens as it will be parsed: 8192.0 and "8192" are 8192; None for anything else."""
    try:
        number = float(str(value))
    except ValueError:
        return None
    return int(number) if number.is_integer() else None
