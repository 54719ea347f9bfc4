"""Stores the halves of answers that turns in flight have written: another life of the service goes on from them."""

import time
from typing import Final

import anyio

from service.scheduling.keeping.turns import Turns
from service.scheduling.pauses import Pauses
from service.scheduling.work import SchedulerStore

LOOK_S: Final = 0.25  # seconds between two looks


async def keep_halves(turns: Turns, pauses: Pauses, store: SchedulerStore) -> None:
    """Store what is due, all turns' in one commit, until cancelled."""
    while True:
        await anyio.sleep(LOOK_S)
        if pauses.are_any:  # the store may be away, or the turns another node's
            continue
        now_s = time.monotonic()
        halves = [half for turn in turns.in_flight() if (half := turn.take_half(now_s)) is not None]
        if halves:
            store.append_nowait(halves, lambda: None)
