"""Where agents are pinned: round robin over devices. Pure."""

from collections import Counter
from collections.abc import Collection, Sequence

from service.inference.failures import NoLane
from workers.devices.layout import Lane
from workers.lanes.memory_need import most_room


class Allocator:
    """Gives each checkpoint the lane that it is loaded on first.

    Devices are distinct until all are used; then the device with the fewest pins is next. When every lane has its
    share, checkpoints share lanes and are swapped.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes
        self._pins: dict[str, Lane] = {}

    def __repr__(self) -> str:
        return f"<Allocator {[(model, lane.id) for model, lane in self._pins.items()]}>"

    def pin(
        self, model: str, need_mib: int | None, hint: int | None = None, among: Collection[int] | None = None
    ) -> Lane:
        """Return the lane of a model, the one it has already if it has one; a new one is ``among`` these, or any.

        Raises:
            NoLane: no device has room for it, or the hint is no lane.
        """
        if hint is not None and not 0 <= hint < len(self._lanes):
            raise NoLane(f"lane_hint: {hint} is no lane; there are 0 to {len(self._lanes) - 1}")
        lanes = [lane for lane in self._lanes if among is None or lane.number in among]
        able = [lane for lane in lanes if _fits(lane, need_mib)]
        if not able:
            most = most_room(lanes)
            raise NoLane(f"{model} takes {need_mib} MiB, and the largest device has room for {most} MiB")
        if model in self._pins:
            return self._pins[model]
        on_lane, on_device = Counter(each.id for each in self._pins.values()), self._on_devices()
        hinted = [lane for lane in able if lane.number == hint]
        chosen = min(
            hinted or able,
            key=lambda lane: (on_lane[lane.id] >= lane.capacity, on_device[lane.device.uuid], on_lane[lane.id]),
        )
        self._pins[model] = chosen
        return chosen

    def lane_of(self, model: str) -> Lane:
        """Return the lane that a model is pinned to."""
        return self._pins[model]

    def _on_devices(self) -> Counter[str]:
        return Counter(lane.device.uuid for lane in self._pins.values())


def _fits(lane: Lane, need_mib: int | None) -> bool:
    room = lane.device.room_mib
    return room is None or need_mib is None or need_mib <= room
