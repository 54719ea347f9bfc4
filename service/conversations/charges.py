"""What speaks against one turn; stored with it, so that a restart neither forgives nor doubles it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Charges:
    """What a turn has been part of since an engine last answered it.

    ``is_suspect`` says that it was on an engine that died. ``deaths`` are engines that died with it alone; ``outside``
    those that a signal from outside ended with it on them; ``refusals`` are of engines that answered others.
    ``refused_at`` is when it was first refused, in seconds since the epoch.
    """

    is_suspect: bool = False
    deaths: int = 0
    outside: int = 0
    refusals: int = 0
    refused_at: float | None = None
