"""Stores the halves of answers that turns in flight have written: another life of the service goes on from them."""

import time
from contextlib import suppress
from typing import Final

import anyio

from service.errors import StoreUnavailable
from service.scheduling.keeping.turns import Turns
from service.scheduling.pauses import Pauses
from service.scheduling.work import SchedulerStore

LOOK_S: Final = 0.25  # seconds between two looks


async def keep_halves(turns: Turns, pauses: Pauses, store: SchedulerStore) -> None:
    """Store what is due, all turns' in one commit, until cancelled."""
    while True:
        await anyio.sleep(LOOK_S)
        if not pauses.may_write:
            continue
        now_s = time.monotonic()
        halves = [half for turn in turns.in_flight() if (half := turn.take_half(now_s)) is not None]
        if halves:
            with suppress(StoreUnavailable):
                await store.append(halves)  # no more of them wait for a slow store
