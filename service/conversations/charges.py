"""What speaks against one turn; stored with it, so that a restart neither forgives nor doubles it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Charges:
    """What a turn has been part of since an engine last answered it.

    ``is_suspect`` says that it was on an engine that died. ``deaths`` are engines that died with it alone; ``outside``
    those that a signal from outside ended with it on them; ``refusals`` are of engines that answered others, ``stalls``
    silences of engines that worked meanwhile. ``refused_at`` is when it was last refused, in seconds since the epoch,
    ``refused_s`` for how long it was asked since the first time. ``service_ends`` counts how often the service itself
    ended by a defect while it was at work.
    """

    is_suspect: bool = False
    deaths: int = 0
    outside: int = 0
    refusals: int = 0
    refused_at: float | None = None
    refused_s: float = 0.0
    stalls: int = 0
    service_ends: int = 0

    def cleared(self) -> "Charges":
        """Return the remaining charges after an engine's answer, or once another turn explains its death."""
        return Charges(service_ends=self.service_ends)
