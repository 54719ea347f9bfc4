"""Applies a new configuration to a running node, atomically.

Source: specification, "Reload".
"""

import logging
from collections.abc import AsyncIterable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime

import anyio
import anyio.to_thread

from service.config.reload_plan import ReloadPlan, keep_parts, plan_reload
from service.config.source import LoadedConfig
from service.conversations.callers import shares_of
from service.errors import ConfigError, ConfigRefused, Fault, ReloadNeedsRestart, ShuttingDown
from service.node.live_config import ReloadFailure, queue_rules
from service.node.node import Node, runners_of
from workers.errors import WorkerError

Prepare = Callable[[LoadedConfig], Callable[[], None]]
logger = logging.getLogger(__name__)


class Reloader:
    """Owns the reloads of a node, which run one at a time.

    ``load`` reads the configuration, in a thread. Each of ``followers`` takes a new configuration in two steps: it
    prepares it in a thread, and returns a function that puts it in force in the event loop without waiting.
    """

    def __init__(
        self, node: Node, loaded: LoadedConfig, load: Callable[[], LoadedConfig], followers: Sequence[Prepare] = ()
    ) -> None:
        self._node = node
        self._loaded = loaded
        self._load = load
        self._followers = tuple(followers)
        self._lock = anyio.Lock()

    def __repr__(self) -> str:
        return f"<Reloader of {self._node.live!r}>"

    @property
    def loaded(self) -> LoadedConfig:
        """The configuration in force."""
        return self._loaded

    def follow(self, prepare: Prepare) -> None:
        """Add one more follower of new configurations."""
        self._followers += (prepare,)

    async def reload(self) -> ReloadPlan:
        """Read the configuration and put its changes in force; return these changes.

        New work follows it at once. Workers join, leave or are replaced one after the other.

        Raises:
            ConfigRefused: the file is not usable; nothing has changed.
            ReloadNeedsRestart: something in it cannot change while Roundhouse runs; nothing has changed.
            ShuttingDown: the service is stopping.
        """
        async with self._lock:
            try:
                plan = await self._reload()
            except (ConfigRefused, ReloadNeedsRestart) as error:
                self._node.live.failure = ReloadFailure(at=datetime.now(UTC), detail=str(error))
                raise
            self._node.live.failure = None
            return plan

    async def _reload(self) -> ReloadPlan:
        if self._node.scheduler.pauses.is_closing:
            raise ShuttingDown("the service is stopping, and its next start reads the configuration")
        try:
            new = keep_parts(self._loaded, await anyio.to_thread.run_sync(self._load))
        except (ConfigError, WorkerError, OSError) as error:  # all errors that would end a start
            raise ConfigRefused(_faults_of(str(error))) from error
        plan = plan_reload(self._loaded, new, self._node.adapters.names())
        if plan.refused:
            raise ReloadNeedsRestart(plan.refused)
        commits = [await anyio.to_thread.run_sync(prepare, new) for prepare in self._followers]
        self._put_in_force(new, plan, commits)
        return plan

    def _put_in_force(self, new: LoadedConfig, plan: ReloadPlan, commits: Sequence[Callable[[], None]]) -> None:
        """Change everything at one moment of the event loop; nothing here waits or may fail."""
        node, shares = self._node, shares_of(new.callers.values())
        if shares is not None and node.live.shares is None:
            logger.warning("keys have names now: they have fair shares of the engines from the next start on")
        node.tools.change(new.config, new.specs, node.fleet.roster.wait_gone)
        specs = [replace(spec, state_dir=node.state_dir) for spec in node.tools.equipped(new.specs)]
        node.live.replace(new.config, specs, shares)
        node.catalog.change(runners_of(node.tools))
        node.scheduler.requests.queue.rules = queue_rules(new.config)
        node.fleet.roster.want(specs)
        node.scheduler.requests.end_waiting_for(plan.removed)
        node.fleet.lane_pool.follow(new.config.scheduling.swap)
        for commit in commits:
            commit()
        self._loaded = new
        node.intake.hint(is_work=True)  # there may be jobs for an added model
        logger.info("the configuration is reloaded: %s", _in_words(plan))


def _faults_of(text: str) -> list[Fault]:
    """Return the lines about an unusable configuration, each as a fault."""
    return [Fault(path="", message=line) for line in text.splitlines()]


def _in_words(plan: ReloadPlan) -> str:
    if plan.is_empty:
        return "nothing changes"
    parts = {
        "changed": plan.changed,
        "added": plan.added,
        "removed": plan.removed,
        "resized": plan.resized,
        "restarted": plan.restarted,
    }
    return "; ".join(f"{name} {', '.join(names)}" for name, names in parts.items() if names)


async def reload_on(
    asked: AsyncIterable[None], reloader: Reloader, during: Callable[[], AbstractContextManager[None]]
) -> None:
    """Reload on each request, until cancelled; errors are logged, and the service goes on.

    ``during`` marks a reload in progress, for a block.
    """
    async for _ in asked:
        try:
            with during():
                await reloader.reload()
        except (ConfigRefused, ReloadNeedsRestart, ShuttingDown) as error:
            logger.error("the configuration is not reloaded, and nothing has changed: %s", error)  # noqa: TRY400
