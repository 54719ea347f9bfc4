"""Names that may become values of a label: so many, and no more, whoever invents them."""

from collections.abc import Iterable
from typing import Final

OTHER: Final = "other"
MOST_CHARS: Final = 64


class CappedNames:
    """Gives names their places in the order in which they come; those that are ``known`` have theirs from the start."""

    def __init__(self, most: int, known: Iterable[str] = ()) -> None:
        self._most = most
        self._shown = {name: _shown(name) for name in known}

    def __repr__(self) -> str:
        return f"<CappedNames {len(self._shown)} of {self._most}>"

    def __call__(self, name: str) -> str:
        """Return a name as a label shows it; ``other`` where there are as many as may be."""
        shown = self._shown.get(name)
        if shown is not None:
            return shown
        if len(self._shown) >= self._most:
            return OTHER
        shown = self._shown[name] = _shown(name)
        return shown


def _shown(name: str) -> str:
    return name[:MOST_CHARS].encode("utf-8", "replace").decode()
