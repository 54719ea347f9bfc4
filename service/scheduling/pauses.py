"""The reasons for which the scheduler starts nothing; turns start again when the last one ends."""

from collections.abc import Callable

from service.scheduling.core import events
from service.scheduling.work import Pause


class Pauses:
    """The present reasons; any part may add one. ``post`` hands events to the core."""

    def __init__(self, post: Callable[[events.Event], None]) -> None:
        self._post = post
        self._details: dict[Pause, str] = {}

    def __repr__(self) -> str:
        return f"<Pauses {self._details}>"

    def pause(self, why: Pause, detail: str) -> None:
        """Start no more turns for a reason, beside other reasons; turns in flight go on."""
        self._details[why] = detail
        self._post(events.Paused())

    def unpause(self, why: Pause) -> None:
        """Remove a reason; without any, turns start again."""
        if self._details.pop(why, None) is not None and not self._details:
            self._post(events.Unpaused())

    @property
    def are_any(self) -> bool:
        """Whether no turn starts at the moment."""
        return bool(self._details)

    @property
    def may_write(self) -> bool:
        """Whether facts of turns in flight may be written: the store is there, and the turns are this node's."""
        return self._details.keys().isdisjoint((Pause.STORE, Pause.LEASE))

    @property
    def is_closing(self) -> bool:
        """Whether no turn starts until the next life of the service."""
        return Pause.CLOSING in self._details

    @property
    def detail(self) -> str | None:
        """The reason why no turn starts at the moment, None if turns start."""
        return next(iter(self._details.values()), None)
