"""All possible configurations, as rows of factors: every two values that go together are in a row."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import combinations, product
from typing import Any, Final

Pair = tuple[tuple[str, object], tuple[str, object]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration, and the change that it is reloaded with. Factors of models apply to all of them."""

    kind: str = "llama-server"  # the first model's engine
    beside: str = "llama-server"  # the engine of the others, and of one that a reload adds
    models: int = 2
    replicas: int = 1
    spares: int = 0
    placement: str = "fixed"  # mixed: the first model is on lanes
    devices: str = "none"  # the machine's, an inventory's, or those of the machine that each model lists
    address: str = "default"  # folder: of UNIX sockets; port: no UNIX socket
    capacity: str = "default"
    keys: str = "none"
    store: str = "sqlite"  # cluster: PostgreSQL, with an address for other nodes
    tools: str = "none"
    params: str = "none"
    change: str = "nothing"  # changes the last model, except for add

    def __str__(self) -> str:
        return "-".join(str(value) for value in asdict(self).values())

    def has(self, pair: Pair) -> bool:
        """Return whether both values are the row's."""
        return all(getattr(self, name) == value for name, value in pair)


KINDS: Final = ("llama-server", "embedded", "vllm", "attached")
FACTORS: Final[Mapping[str, tuple[Any, ...]]] = {
    "kind": KINDS,
    "beside": KINDS,
    "models": (1, 2, 3),
    "replicas": (1, 2),
    "spares": (0, 1),
    "placement": ("fixed", "lanes", "mixed"),
    "devices": ("none", "gpus", "inventory", "listed"),
    "address": ("default", "folder", "port"),
    "capacity": ("default", "slots", "tokens"),
    "keys": ("none", "list", "file"),
    "store": ("sqlite", "memory", "postgres", "cluster"),
    "tools": ("none", "python", "mcp", "http"),
    "params": ("none", "some"),
    "change": ("nothing", "add", "remove", "params", "slots", "args", "resize"),
}


def _pair(**values: object) -> Pair:
    first, second = sorted(values.items(), key=lambda item: list(FACTORS).index(item[0]))
    return first, second


def _of_every_model(name: str, value: object, words: str, kinds: tuple[str, ...]) -> Iterator[tuple[Pair, str]]:
    for which, kind in product(("kind", "beside"), kinds):
        yield _pair(**{which: kind, name: value}), words


# What `check` refuses, with the words of the refusal; a change is refused as the file that it makes.
REFUSED: Final[Mapping[Pair, str]] = dict(
    [
        *_of_every_model("placement", "lanes", "placement: an attached engine cannot be on lanes", ("attached",)),
        (_pair(kind="attached", placement="mixed"), "placement: an attached engine cannot be on lanes"),
        *_of_every_model("replicas", 2, "replicas: not for an attached engine", ("attached",)),
        *_of_every_model("spares", 1, "spares: not for an attached engine", ("attached",)),
        *_of_every_model("devices", "listed", "devices: not for an attached engine", ("attached",)),
        *_of_every_model("capacity", "tokens", "capacity: not for an attached engine", ("attached",)),
        *_of_every_model(
            "address",
            "folder",
            "socket_dir: only vllm listens on a UNIX socket",
            ("llama-server", "embedded", "attached"),
        ),
        (_pair(replicas=2, placement="lanes"), "replicas: set by the lane"),
        (_pair(spares=1, placement="lanes"), "spares: set by the lane"),
        (_pair(placement="lanes", devices="listed"), "devices: set by the lane"),
        (_pair(beside="attached", change="args"), "args: not for an attached engine"),
        (_pair(beside="attached", change="resize"), "replicas: not for an attached engine"),
        (_pair(placement="lanes", change="resize"), "replicas: set by the lane"),
        (_pair(models=1, change="remove"), "models: dictionary should have at least 1 item"),
    ]
)
# A single model has no second kind and no second placement.
MEANINGLESS: Final = _pair(models=1, placement="mixed")


def pairs() -> set[Pair]:
    """Return every two values of two factors that go together."""
    found = {
        ((one, first), (other, second))
        for one, other in combinations(FACTORS, 2)
        for first, second in product(FACTORS[one], FACTORS[other])
    }
    return found - REFUSED.keys() - {MEANINGLESS}


def pairs_of(row: Row) -> set[Pair]:
    """Return the pairs of a row."""
    return set(combinations(((name, getattr(row, name)) for name in FACTORS), 2))


def rows() -> list[Row]:
    """Return few rows that contain every such pair.

    Each begins with a missing pair, and takes the values that bring the most others. ``allpairspy`` never revises a
    choice, and left out 82 of the 867 pairs, since few values go with an attached engine or a folder of sockets.
    """
    missing, found = pairs(), list[Row]()
    used = Counter[tuple[str, object]]()
    while missing:
        begun = min(missing, key=str)
        values = _filled(dict(begun), missing, used)
        assert values is not None, f"no row has {begun}, and no refusal says why"
        found.append(Row(**values))
        missing -= pairs_of(found[-1])
        used.update(values.items())
    return found


def _filled(given: dict[str, Any], missing: set[Pair], used: Counter[tuple[str, object]]) -> dict[str, Any] | None:
    """Return a whole row with the given values; None if there is none."""
    if len(given) == len(FACTORS):
        return given
    left = {name: values for name, values in _choices(given).items() if name not in given}
    name = min(left, key=lambda each: len(left[each]))

    def worth(value: object) -> tuple[int, int]:
        return sum(_pair(**{name: value, key: given[key]}) in missing for key in given), -used[name, value]

    best = sorted(left[name], key=worth, reverse=True)
    whole = (_filled({**given, name: value}, missing, used) for value in best)
    return next((each for each in whole if each is not None), None)


def _choices(given: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return which values of each factor go with those that are given."""
    return {
        name: [value for value in values if given.get(name, value) == value and _go_together({**given, name: value})]
        for name, values in FACTORS.items()
    }


def _go_together(given: Mapping[str, Any]) -> bool:
    if given.get("models") == 1 and len({given[name] for name in ("kind", "beside") if name in given}) > 1:
        return False
    ordered = [(name, given[name]) for name in FACTORS if name in given]
    return not any(pair in REFUSED or pair == MEANINGLESS for pair in combinations(ordered, 2))
