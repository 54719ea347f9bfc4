"""Replaces the program of the service while its engines stay: one upgrade at a time, with the result of the last.

An upgrade is requested, a child with the new code agrees, turns under way end or run again, clients' requests are
answered, and in one step without any wait the whole state is recorded and handed over. Any failure before that step is
undone, and this program goes on.
"""

import logging
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final, Protocol

import anyio
import msgspec

from service import __version__
from service.errors import ServiceError, StoreUnavailable, UpgradeRefused
from service.node.node import Node
from service.scheduling.work import Pause
from service.upgrade.check import ask_child, facts_of
from service.upgrade.handover import Inherited, replace_program
from service.upgrade.verdict import Facts, UpgradeVerdict
from workers.handover import hand_over_engines, unsettled
from workers.notifier import Notifier
from workers.outcome import CancelReason
from workers.process.handed_over import Handover, HeldStream

INTERRUPT_S: Final = 10.0  # time for interrupted attempts to end
SETTLE_S: Final = 15.0  # least time for work that only this program can finish
POLL_S: Final = 0.02
ANSWER_S: Final = 2.0  # time to answer open requests while new ones are accepted
QUIET_S: Final = 0.2  # time to answer them once none are accepted; then they are cut off
STORE_S: Final = 10.0  # time for the last writes to be durable
PAUSED: Final = "the service is being upgraded in place"
logger = logging.getLogger(__name__)


class UpgradePhase(StrEnum):
    """The phase of an upgrade."""

    IDLE = "idle"  # no upgrade
    CHECKING = "checking"  # a child with the new code checks the facts
    DRAINING = "draining"  # turns under way end
    LEAVING = "leaving"  # clients get their last answers


class RestingServer(Protocol):
    """The HTTP server as an upgrade needs it."""

    async def wait_answered(self, limit_s: float) -> None:
        """Return at a moment when all requests are answered, or at the limit."""

    async def quiesce(self, limit_s: float) -> None:
        """Accept nothing new, and return when all requests are answered, or at the limit."""

    def note_followers(self) -> None:
        """Mark requests that others follow on their connections."""

    def resting(self) -> list[int]:
        """Return the descriptors of connections without an open request."""

    def held_streams(self) -> list[HeldStream]:
        """Return the connections whose streams the next program goes on with."""

    async def resume(self) -> None:
        """Accept requests again."""


class UpgradeEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an upgrade: ``detail`` is why it was refused, None where it was done.

    ``seconds`` is how long no program served. ``kept`` are workers whose engines stayed, ``ended`` others, with the
    reason. ``kept_servers`` and ``ended_servers`` are MCP servers over stdio, as MODEL/SERVER.
    """

    at: datetime
    roundhouse: str  # the version that left, or stayed
    detail: str | None = None
    seconds: float | None = None
    kept: Sequence[str] = ()
    ended: Mapping[str, str] = msgspec.field(default_factory=dict)
    kept_servers: Sequence[str] = ()
    ended_servers: Mapping[str, str] = msgspec.field(default_factory=dict)


class Upgrader:
    """``run`` must be running; it owns the upgrade that is under way."""

    def __init__(
        self,
        node: Node,
        listener_fd: int,
        inherited: Inherited | None = None,
        fingerprint: Callable[[], str] = lambda: "",
    ) -> None:
        self._node = node
        self._fingerprint = fingerprint  # digest of the code and files that the next program would read
        self._listener_fd = listener_fd
        self.phase = UpgradePhase.IDLE
        self.last: UpgradeEnd | None = None
        self._agreed: list[UpgradeVerdict] = []
        self._looked_at: tuple[str, Facts] | None = None  # fingerprint and facts that the new code agreed to
        self._asked = Notifier()
        self._argv = (sys.executable, *sys.orig_argv[1:])
        self.upgrades = 0
        if inherited is not None:
            self._note_arrival(inherited.handover)

    def __repr__(self) -> str:
        return f"<Upgrader {self.phase} upgrades={self.upgrades}>"

    def _note_arrival(self, left: Handover) -> None:
        """Record and log the upgrade that started this program."""
        adoption, seconds = self._node.adoption, time.monotonic() - left.at
        kept, ended = (adoption.kept, adoption.ended) if adoption is not None else ((), {})
        self.upgrades = left.upgrades
        self.last = UpgradeEnd(
            at=datetime.now(UTC),
            roundhouse=left.roundhouse,
            seconds=seconds,
            kept=kept,
            ended=dict(ended),
            kept_servers=tuple(self._node.tools.adopted),
            ended_servers=dict(self._node.tools.ended),
        )
        text = "upgraded in place from %s to %s in %.2f s; engines kept: %s; ended: %s"
        shown = ", ".join(kept) or "none", ", ".join(ended) or "none"
        logger.info(text, left.roundhouse, __version__, seconds, *shown)

    async def ask(self) -> UpgradeVerdict:
        """Ask the new code, and begin the upgrade if it agrees; return its verdict.

        Raises:
            UpgradeRefused: it does not agree, or another upgrade is under way; nothing has changed.
        """
        if self.phase is not UpgradePhase.IDLE:
            raise UpgradeRefused("another upgrade is under way")
        self.phase = UpgradePhase.CHECKING
        try:
            verdict = await self._check()
        except BaseException as error:
            self.phase = UpgradePhase.IDLE
            if isinstance(error, UpgradeRefused):
                self._note_refusal(str(error))
            raise
        self.phase = UpgradePhase.DRAINING
        self._agreed.append(verdict)
        self._asked.notify()
        return verdict

    async def ask_by_signal(self) -> None:
        """Do the same for a signal; a refusal is only logged."""
        try:
            await self.ask()
        except UpgradeRefused:
            return  # already logged

    async def run(self, front: RestingServer) -> None:
        """Perform agreed upgrades until cancelled; one that succeeds ends this program."""
        while True:
            await self._asked.wait_until(lambda: bool(self._agreed))
            verdict = self._agreed.pop()
            try:
                await self._perform(verdict, front)
            except ServiceError as error:
                self._note_refusal(str(error))
            except Exception as error:
                logger.exception("an upgrade in place: a defect of Roundhouse")
                self._note_refusal(f"{type(error).__name__}: {error}")
            finally:
                self.phase = UpgradePhase.IDLE

    def _note_refusal(self, detail: str) -> None:
        logger.warning("the upgrade in place is refused, and %s goes on: %s", __version__, detail)
        self.last = UpgradeEnd(at=datetime.now(UTC), roundhouse=__version__, detail=detail)

    async def _check(self) -> UpgradeVerdict:
        trouble = self._node.store.trouble
        if trouble is not None:
            raise UpgradeRefused(f"the store is in trouble: {trouble}")
        looked_at = self._now()
        verdict = await ask_child(self._argv, looked_at[1])
        if verdict.refusals:
            raise UpgradeRefused("; ".join(verdict.refusals))
        self._looked_at = looked_at
        return verdict

    def _now(self) -> tuple[str, Facts]:
        return self._fingerprint(), facts_of(self._node.live.config, self._node.fleet)

    async def _perform(self, verdict: UpgradeVerdict, front: RestingServer) -> None:
        """Hand over to the next program; this ends only with an error.

        Raises:
            UpgradeRefused: it cannot be done now; this program goes on.
        """
        logger.info(
            "upgrading in place to %s; turns under way have %g s",
            verdict.roundhouse,
            self._node.live.config.server.drain_s,
        )
        async with self._paused():
            await self._drain()
            # Slots are idle now, and a check takes a second: the new code checks again only if anything changed.
            if self._now() != self._looked_at:
                await self._check()
            self.phase = UpgradePhase.LEAVING
            async with self._quiet(front):
                await self._write_all()
                self._refuse_changes()
                async with self._without_claims():
                    self._refuse_changes()
                    # From here to the exec nothing waits, so the recorded state stays true.
                    self._replace(front)

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        scheduler = self._node.scheduler
        scheduler.pauses.pause(Pause.UPGRADE, PAUSED)
        try:
            yield
        finally:
            scheduler.pauses.unpause(Pause.UPGRADE)

    async def _drain(self) -> None:
        """Wait until no turn is in flight, and no work is under way that only this program can finish."""
        drain_s, scheduler, fleet = self._node.live.config.server.drain_s, self._node.scheduler, self._node.fleet
        with anyio.move_on_after(drain_s):
            await scheduler.wait_idle()
        with anyio.move_on_after(max(drain_s, SETTLE_S)):
            while unsettled(fleet) is not None:  # noqa: ASYNC110 - many owners, and seldom any work
                await anyio.sleep(POLL_S)
        if (detail := unsettled(fleet)) is not None:
            raise UpgradeRefused(detail)
        scheduler.works.interrupt_all(CancelReason.UPGRADE)
        with anyio.move_on_after(INTERRUPT_S):
            await scheduler.wait_idle()
            return
        raise UpgradeRefused(f"turns that were cut off have not ended within {INTERRUPT_S:g} s")

    @asynccontextmanager
    async def _quiet(self, front: RestingServer) -> AsyncIterator[None]:
        """Answer clients' requests, then accept none for a block; new ones wait in their sockets."""
        followers, requests = self._node.jobs.watch, self._node.scheduler.requests
        followers.close()

        async def refuse() -> None:
            """Refuse those that cannot be handed over, also later ones: the exec would close their connections."""
            while True:
                front.note_followers()
                requests.close(PAUSED, keeps=True)
                await anyio.sleep(POLL_S)

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(refuse)
                await front.wait_answered(ANSWER_S)
                await front.quiesce(QUIET_S)
                tasks.cancel_scope.cancel()
            yield
        finally:
            followers.open()
            requests.open()
            with anyio.CancelScope(shield=True):
                await front.resume()

    async def _write_all(self) -> None:
        with self._store_in_time():
            await self._node.store.flush()

    @contextmanager
    def _store_in_time(self) -> Iterator[None]:
        try:
            with anyio.fail_after(STORE_S):
                yield
        except (TimeoutError, StoreUnavailable) as error:
            raise UpgradeRefused(f"the store is in trouble: {self._node.store.trouble or error}") from error

    def _refuse_changes(self) -> None:
        """Refuse the upgrade if the next program would find other things than were checked."""
        if self._looked_at is None or self._fingerprint() != self._looked_at[0]:
            raise UpgradeRefused("the configuration or the code was changed after it was looked at; ask again")
        if shutil.which(self._argv[0]) is None:
            raise UpgradeRefused(f"{self._argv[0]} cannot be run: it is not there, or no program")
        if (detail := unsettled(self._node.fleet)) is not None:
            raise UpgradeRefused(detail)

    @asynccontextmanager
    async def _without_claims(self) -> AsyncIterator[None]:
        """Release this node's claims for a block that ends this program; claim again if it fails.

        No requests are accepted meanwhile, so restarted work has no client.
        """
        try:
            with self._store_in_time():
                await self._node.store.leave_claims()
            yield
        except BaseException:
            # Shielded, since a stop may come now. A store in trouble performs the calls later, in order.
            with anyio.move_on_after(STORE_S, shield=True):
                await self._node.intake.start_over()
            raise

    def _replace(self, front: RestingServer) -> None:
        try:
            handover = Handover(
                roundhouse=__version__,
                upgrades=self.upgrades + 1,
                at=time.monotonic(),
                listener_fd=self._listener_fd,
                lock_fd=self._node.lock_fd,
                connections=front.resting(),
                streams=front.held_streams(),
                fleet=hand_over_engines(self._node.fleet),
                servers=self._node.tools.hand_over_servers(),
            )
            replace_program(handover, self._argv, os.environ)
        except OSError as error:
            raise UpgradeRefused(f"{self._argv[0]} cannot be run: {error}") from error
