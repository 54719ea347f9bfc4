"""Where the programs of clients were last: whatever they ask next begins with what an engine there has read. Pure."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from service.scheduling.core.queue.affinity import CacheLocation

REMEMBERED: Final = 16_384  # programs; some 4 MB


class Programs:
    """The newest programs, each by what it is known by: a session's name, or a digest of all that it has said so far.

    Source: specification, "Programs of clients".
    """

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._places: OrderedDict[bytes, CacheLocation] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Programs {len(self._places)}>"

    def find(self, marks: Sequence[bytes]) -> CacheLocation | None:
        """Return where the program was that is known by the first of these marks that any is known by."""
        for mark in marks:
            place = self._places.get(mark)
            if place is not None:
                self._places.move_to_end(mark)
                return place
        return None

    def note(self, mark: bytes, place: CacheLocation) -> None:
        """Note where a program is from now on."""
        self._places[mark] = place
        self._places.move_to_end(mark)
        if len(self._places) > self._most:
            self._places.popitem(last=False)
