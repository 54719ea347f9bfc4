"""Watches the KV cache of an engine that is lent by tokens: its use, and preemptions."""

import logging
from collections.abc import Callable
from typing import Final

import anyio

from transport.client import EngineClient
from transport.counters import KvCache
from transport.errors import EngineError
from workers.policy.kv_share import KvShare
from workers.requests.kv_pool import KvPool
from workers.spec import Capacity, WorkerSpec

LOOK_S: Final = 2.0
STEP: Final = 0.05  # share of the cache: smaller changes of the lent part are not reported
logger = logging.getLogger(__name__)


class KvWatch:
    """Looks while the engine serves; a change of the lent part of the cache calls ``on_change``.

    A ``pool`` replaces the reports of an engine that makes none.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        client: EngineClient,
        pool: KvPool | None,
        is_serving: Callable[[], bool],
        on_change: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._client = client
        self._pool = pool
        self._is_serving = is_serving
        self._on_change = on_change
        self._share = KvShare()
        self._known = self._share.part
        self.cache: KvCache | None = pool.cache if pool is not None else None  # at the last look

    def __repr__(self) -> str:
        return f"<KvWatch {self._spec.id} {self._share} {self.cache}>"

    @property
    def budget(self) -> int | None:
        """The number of lent tokens; None if only slots bound the engine, or it reports no cache."""
        if self._spec.capacity is Capacity.SLOTS or self.cache is None:
            return None
        return int(self.cache.tokens * self._known)

    @property
    def block(self) -> int:
        """The number of tokens that each request takes at a time."""
        return 1 if self.cache is None else self.cache.block

    async def begin_incarnation(self) -> None:
        """Look at an engine that is about to be ready."""
        self._share = KvShare()
        self._known = self._share.part
        self.cache = self._pool.cache if self._pool is not None else None
        await self.refresh()

    async def run(self) -> None:
        """Look until cancelled."""
        while self._spec.capacity is Capacity.TOKENS:
            await anyio.sleep(LOOK_S)
            if self._is_serving():
                await self.refresh()

    async def refresh(self) -> None:
        """Look once; an engine that does not answer now is looked at again."""
        was_known = self.cache is not None
        try:
            self.cache = await self._client.read_kv_cache() if self._pool is None else self._pool.cache
        except EngineError:
            return
        if self.cache is None:
            return
        before, self._share = self._share, self._share.looked(self.cache.preemptions)
        if self._share.part < before.part:
            lent = int(self.cache.tokens * self._share.part)
            logger.warning("worker %s: requests had to give way; %d tokens are lent from now on", self._spec.id, lent)
        has_moved = abs(self._share.part - self._known) >= STEP or (self._share.part == 1.0) != (self._known == 1.0)
        if has_moved or not was_known:
            self._known = self._share.part
            if self._is_serving():
                self._on_change()
