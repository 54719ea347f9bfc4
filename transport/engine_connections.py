"""The connections to one engine: opened for each exchange, or kept for a moment after one."""

import asyncio
import errno
from collections.abc import Callable, Iterator
from typing import Final

import anyio
from msgspec.structs import replace

from transport.endpoint import Endpoint
from transport.errors import CannotAsk, EngineError, EngineTimeout, EngineUnreachable
from transport.exchange import Exchange
from transport.kept import KeptConnections
from transport.relay import RelayExchange

CONNECT_LIMIT_S: Final = 10.0  # loopback connects in microseconds; only a full accept backlog takes longer
CLOSED_S: Final = 1.0  # a kept connection that fails within it had been closed before; later, its engine has failed
_OURS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


class EngineConnections:
    """Performs exchanges with the engine at ``endpoint``."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.tls = endpoint.tls()
        self._heads: dict[tuple[str, str, str], bytes] = {}
        self._kept = KeptConnections()

    def __repr__(self) -> str:
        return f"<EngineConnections {self.endpoint}>"

    def close_idle(self) -> None:
        """Close the idle connections."""
        self._kept.close()

    def use_key(self, key: str) -> None:
        """Send this key with every request from now on."""
        headers = {**self.endpoint.headers, "Authorization": f"Bearer {key}"}
        self.endpoint = replace(self.endpoint, headers=headers)
        self._heads.clear()

    def head(self, path: str, accept: str, *, keeps: bool) -> bytes:
        """Return the head of a request up to its length."""
        about = (path, accept, "keep-alive" if keeps else "close")
        if about not in self._heads:
            self._heads[about] = self.endpoint.head(*about)
        return self._heads[about]

    async def perform(self, exchange: Callable[[], Exchange], scope: str | None, *, keeps: bool) -> None:
        """Perform an exchange on a kept connection if there is one; on a fresh one if that had been closed."""
        is_second = False
        kept = exchange() if keeps and len(self._kept) else None
        transport = None if kept is None else self._kept.take(kept, scope)
        if kept is not None and transport is not None:
            sent_at = anyio.current_time()
            try:
                await self._finish(kept, transport, scope, keeps=keeps)
            except EngineUnreachable:
                if kept.is_answered or anyio.current_time() - sent_at > CLOSED_S:
                    raise
            else:
                return
            is_second = True
        fresh = exchange()
        transport = await self._open(fresh)
        try:
            await self._finish(fresh, transport, scope, keeps=keeps)
        except EngineUnreachable as error:
            if not is_second:
                raise
            raise EngineUnreachable(f"{error}; it was sent twice, before that on a kept connection") from error
        finally:
            del fresh  # as in `_finish`

    async def _open(self, exchange: Exchange) -> asyncio.Transport:
        is_open = False
        try:
            with anyio.fail_after(CONNECT_LIMIT_S):
                transport = await self._connect(exchange)
            is_open = True
        except TimeoutError as error:
            raise EngineTimeout("connection", CONNECT_LIMIT_S) from error
        except OSError as error:
            raise connection_error(error, f"cannot connect to {self.endpoint}: ") from error
        finally:
            if not is_open:
                exchange.give_up()
        return transport

    async def _finish(
        self, exchange: Exchange, transport: asyncio.Transport, scope: str | None, *, keeps: bool
    ) -> None:
        """Wait for the end of an answer; keep its connection if the answer is whole and leaves it open."""
        is_kept = False
        try:
            await exchange.finished
            is_kept = keeps and exchange.leaves_open
        except asyncio.CancelledError:
            if isinstance(exchange, RelayExchange):
                exchange.read_rest()
            raise
        finally:
            exchange.stop_gathering()
            if is_kept:
                self._kept.keep(transport, scope)
            else:
                transport.abort()
            del exchange  # a failure keeps this frame, which would keep the exchange and all that it holds

    async def _connect(self, exchange: Exchange) -> asyncio.Transport:
        loop, at = asyncio.get_running_loop(), self.endpoint
        if at.uds is not None:
            return (await loop.create_unix_connection(lambda: exchange, at.uds))[0]
        return (await loop.create_connection(lambda: exchange, at.host, at.port, ssl=self.tls))[0]


def connection_error(error: BaseException, where: str = "") -> EngineError:
    """Return the error behind a failed connection: the engine's, or a lack of resources here."""
    text = f"{where}{str(error) or type(error).__name__}"
    causes = list(_causes(error))
    if any(isinstance(cause, OSError) and cause.errno in _OURS for cause in causes):
        return CannotAsk(text)
    return EngineUnreachable(text, is_refused=any(isinstance(cause, ConnectionRefusedError) for cause in causes))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and all its causes, those of each address tried among them."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        if isinstance(cause, BaseExceptionGroup):
            yield from cause.exceptions
        cause = cause.__cause__ or cause.__context__
