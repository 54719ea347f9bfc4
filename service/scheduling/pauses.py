"""The reasons for which the scheduler starts nothing, side by side: turns start again with the end of the last."""

from collections.abc import Callable

from service.scheduling.core import events
from service.scheduling.work import Pause


class Pauses:
    """Anyone may add a reason; ``post`` hands events to the core."""

    def __init__(self, post: Callable[[events.Event], None]) -> None:
        self._post = post
        self._details: dict[Pause, str] = {}

    def __repr__(self) -> str:
        return f"<Pauses {self._details}>"

    def pause(self, why: Pause, detail: str) -> None:
        """Start nothing more for a reason, in addition to other reasons; turns in flight go on."""
        self._details[why] = detail
        self._post(events.Paused())

    def unpause(self, why: Pause) -> None:
        """Take a reason back; with the last of them turns are started again."""
        if self._details.pop(why, None) is not None and not self._details:
            self._post(events.Unpaused())

    @property
    def are_any(self) -> bool:
        """Whether nothing is started at the moment."""
        return bool(self._details)

    @property
    def is_closing(self) -> bool:
        """Whether nothing more is started before the next life of the service."""
        return Pause.CLOSING in self._details

    @property
    def detail(self) -> str | None:
        """Why nothing is started at the moment, None where turns are started."""
        return next(iter(self._details.values()), None)
