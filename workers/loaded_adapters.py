"""Which adapters a worker's engine has."""

from collections.abc import Mapping


class HeldAdapters:
    """Names to paths: ``wanted`` is what the next engine is started with, ``loaded`` what the present one has.

    The order of ``loaded`` is that in which llama-server was given them, and numbers them; ``numbers`` are vLLM's own,
    which begin with one. What an engine has and nobody wants any more stays there until the engine's end, if it cannot
    be unloaded.
    """

    def __init__(self, adapters: Mapping[str, str]) -> None:
        self.wanted = dict(adapters)
        self.loaded = dict(adapters)
        self.numbers: dict[str, int | None] = {}

    def __repr__(self) -> str:
        """State which."""
        return f"<HeldAdapters {list(self.loaded)} wanted={list(self.wanted)}>"

    @property
    def missing(self) -> dict[str, str]:
        """What the present engine has yet to be given."""
        return {name: path for name, path in self.wanted.items() if self.loaded.get(name) != path}

    def begin(self) -> None:
        """Take the fact that an engine is started, with all that is wanted."""
        self.loaded = dict(self.wanted)
        self.numbers = {name: place for place, name in enumerate(self.loaded, start=1)}

    def add(self, name: str, path: str, number: int | None) -> None:
        """Take the fact that the engine has one more."""
        self.loaded[name] = path
        self.numbers[name] = number

    def remove(self, name: str) -> None:
        """Take the fact that it has one less."""
        self.loaded.pop(name, None)
        self.numbers.pop(name, None)
