"""Lets one engine at a time start on a device."""

from workers.notifier import Notifier
from workers.spans import collide


class StartPass:
    """The right to start on some devices; releasing it again has no effect."""

    def __init__(self, gate: "StartGate", devices: frozenset[str]) -> None:
        self._gate: StartGate | None = gate
        self.devices = devices

    def release(self) -> None:
        """Let the next engine start."""
        if self._gate is not None:
            self._gate._give_back(self)  # noqa: SLF001 - a pass is the other half of the gate
            self._gate = None


class StartGate:
    """Shared by all workers of a machine. The device ``*`` stands for every device.

    The ``start_s`` of the engines that are starting bounds the wait here.
    """

    def __init__(self) -> None:
        self._passes: list[StartPass] = []
        self._changed = Notifier()

    def __repr__(self) -> str:
        return f"<StartGate {[sorted(each.devices) for each in self._passes]}>"

    async def enter(self, devices: frozenset[str]) -> StartPass:
        """Return when no other engine is starting on any of ``devices``."""
        await self._changed.wait_until(lambda: not any(collide(devices, each.devices) for each in self._passes))
        fresh = StartPass(self, devices)
        self._passes.append(fresh)
        return fresh

    def _give_back(self, ended: StartPass) -> None:
        self._passes.remove(ended)
        self._changed.notify()
