"""The KV cache that llama.cpp's slots share: which requests are admitted, and which leave before it is full.

The engine counts a prompt before it is sent, unless the prompt is so short that one like it would fit for every slot.
"""

import logging
from typing import Final

import anyio

from transport.client import EngineClient
from transport.counters import KvCache
from transport.errors import EngineError
from transport.request import ChatRequest
from workers.log_context import line_about
from workers.outcome import Cancelled, CancelReason, FailureReason, Outcome, RequestFailed
from workers.policy.kv_share import Holding, room_for, youngest_without_room
from workers.requests.answer import Answer
from workers.requests.in_flight import InFlightRequest, InFlightRequests

LOOK_S: Final = 0.1
LEAVE_LIMIT_S: Final = 5.0  # for requests that give way to close their connections
ROOM_LIMIT_S: Final = 1.0  # for others to leave before a new request gives way: its turn may be back in a millisecond
MESSAGE_BYTES: Final = 64  # most that a template puts around a message: roles and marks
logger = logging.getLogger(__name__)


class KvPool:
    """The cache of one worker; it holds only counts, taken from the requests in flight.

    ``size`` is in tokens, as is ``most``, which one request may hold; ``slots`` share it. ``given_way`` counts requests
    that were ended midway.
    """

    def __init__(
        self, worker: str, client: EngineClient, in_flight: InFlightRequests, *, size: int, slots: int, most: int
    ) -> None:
        self._worker = worker
        self._client = client
        self._in_flight = in_flight
        self._slots = slots
        self._most = most
        self._written = 0  # by answers in flight, at the last look
        self._tokens_per_s = 0.0  # between the last two looks
        self.size = size
        self.given_way = 0

    def __repr__(self) -> str:
        return f"<KvPool {self._worker} {self.used}/{self.size}>"

    @property
    def used(self) -> int:
        """The tokens that requests hold now."""
        return sum(holding.tokens for holding in self._holdings())

    @property
    def cache(self) -> KvCache:
        """The use of the cache, and how often requests gave way."""
        return KvCache(tokens=self.size, used=self.used, preemptions=self.given_way)

    async def admit(self, answer: Answer, chat: ChatRequest) -> Outcome | None:
        """Admit the newest generation of ``answer``, or return how its request ends for lack of room.

        A new request waits a moment for its room, and holds nothing meanwhile; without room it is the youngest, and
        ends.
        """
        return await self.admit_prompt(answer, most_tokens(chat), self._client.dialect.encode(chat))

    async def admit_prompt(self, answer: Answer, tokens: int, chat: bytes | None, later: int = 0) -> Outcome | None:
        """Admit a prompt of up to ``tokens``; ``chat`` is a body with which the engine can count it.

        ``later`` tokens are kept for an answer that shows no progress before it is whole.
        """
        if tokens > self.size // self._slots and chat is not None:
            counted = await self._count(chat)
            if counted is not None and counted >= self._most:
                detail = f"the prompt has {counted} tokens, and one request may hold {self._most}"
                return RequestFailed(reason=FailureReason.CONTEXT_OVERFLOW, detail=detail)
            answer.counted_tokens = counted
            tokens = min(tokens, self._most) if counted is None else counted
        tokens = min(tokens + later, max(tokens, self._most))
        with anyio.move_on_after(ROOM_LIMIT_S):
            await self._in_flight.left.wait_until(lambda: self._has_room(answer, tokens))
        answer.prompt_tokens = tokens
        self.relieve()
        with anyio.move_on_after(LEAVE_LIMIT_S):
            await self._in_flight.left.wait_until(lambda: self.used <= self.size or len(self._holdings()) == 1)
        return None

    async def run(self) -> None:
        """Watch the room until cancelled."""
        while True:
            await anyio.sleep(LOOK_S)
            written = sum(running.answer.output_tokens for running in self._in_flight)
            # The worker's own rate is half a second old: a fast engine fills its cache in that time.
            self._tokens_per_s = max(0, written - self._written) / LOOK_S
            self._written = written
            self.relieve()

    def relieve(self) -> None:
        """End the youngest requests if the others are running out of room."""
        holdings = self._holdings()
        going = set(youngest_without_room(holdings, self._room(len(holdings))))
        for running in self._in_flight if going else ():
            if running.id not in going:
                continue
            logger.info(
                "worker %s: request %d of %s gives way: %d of %d tokens are held",
                self._worker,
                running.id,
                running.job_name,
                sum(holding.tokens for holding in holdings),
                self.size,
                extra=line_about(running.concerns()),
            )
            running.end(Cancelled(reason=CancelReason.CACHE_FULL))

    def note_end(self, running: InFlightRequest) -> None:
        """Count an ended request that gave way after its engine had begun to read it."""
        is_full = running.ending == Cancelled(reason=CancelReason.CACHE_FULL)
        self.given_way += is_full and running.answer.generation.has_progressed

    def _room(self, holdings: int) -> int:
        return room_for(self.size, holdings, max(self._tokens_per_s, self._in_flight.tokens_per_s), LOOK_S)

    def _has_room(self, answer: Answer, tokens: int) -> bool:
        """Whether a request with that many tokens may stay if admitted: younger ones end for it."""
        own = next(running.id for running in self._in_flight if running.answer is answer)
        holdings = [*self._holdings(), Holding(request=own, tokens=tokens)]
        return own not in youngest_without_room(holdings, self._room(len(holdings)))

    def _holdings(self) -> list[Holding]:
        return [
            Holding(request=running.id, tokens=running.answer.held_tokens)
            for running in self._in_flight
            if running.answer.held_tokens
        ]

    async def _count(self, chat: bytes) -> int | None:
        try:
            return await self._client.count_prompt(chat)
        except EngineError:
            return None  # a fault of the request shows when it is asked


def most_tokens(chat: ChatRequest) -> int:
    """Return the most tokens that a prompt can have: one per byte, and some for its template."""
    calls = [f"{call.name}{call.arguments}" for message in chat.messages for call in message.calls]
    said = sum(len(each.encode()) + MESSAGE_BYTES for each in (*(one.content for one in chat.messages), *calls))
    return said + sum(len(str(tool).encode()) for tool in chat.tools)
