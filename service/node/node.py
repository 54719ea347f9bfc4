"""One Roundhouse, put together: the only place that knows all its parts."""

import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec
from anyio.abc import TaskGroup

from service.config.schema import Config, StoreConfig, rules_of
from service.config.secrets import child_environment
from service.config.tools import Equipment, open_tools
from service.conversations.document.job_faults import JobRules
from service.conversations.job.states import TurnState
from service.errors import ServiceError, StoreUnavailable
from service.node.adapters import Adapters
from service.node.callers_turns import CallersTurns
from service.node.database_choice import is_shared, open_database
from service.node.followers import JobFollowers
from service.node.intake import Intake
from service.node.job_door import JobDoor
from service.node.jobs import Jobs
from service.node.live_config import LiveConfig, queue_rules
from service.node.passing import Passing
from service.node.prompt_history import PromptHistory
from service.node.rollouts import Rollouts
from service.node.sessions import Sessions
from service.node.status import pools_of
from service.node.store_news import StoreNews, StoreOutlet
from service.node.timelines import Timelines
from service.node.tool_catalog import ToolCatalog, ToolRunnersOfModel
from service.scheduling.core.policies import POLICIES
from service.scheduling.half_keeper import keep_halves
from service.scheduling.scheduler import Scheduler
from service.store.news import Alone, Neighbours, NodeReport, StoreEvent, Tell
from service.store.state_folder import own_folder
from service.store.store import Store, open_store
from service.telemetry.metrics import Metrics
from service.telemetry.past_hour import PastHour
from service.telemetry.telemetry import Telemetry, tracing, watch
from transport.request import Constraint
from workers.devices.device_health import DeviceHealth
from workers.devices.readers import MachineReader
from workers.engine.launch import DIALECTS, takes_tools
from workers.fleet import Fleet
from workers.handover import inherit
from workers.offload.pool import offloading
from workers.policy.adoption import Adoption
from workers.process.handed_over import HeldFleet, HeldServer
from workers.process.identity import ProcessId
from workers.span_board import SpanBoard
from workers.spec import WorkerSpec

if TYPE_CHECKING:
    from service.store.cluster import Cluster
    from service.store.seats import Seats

STOPPING: Final = "the service is stopping"
LANDING_S: Final = 2.0
LEAVING_S: Final = 5.0
DETAIL_CHARS: Final = 300
logger = logging.getLogger(__name__)


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A running Roundhouse."""

    fleet: Fleet
    scheduler: Scheduler
    store: Store
    intake: Intake
    door: JobDoor
    jobs: Jobs
    prompts: PromptHistory
    rollouts: Rollouts
    sessions: Sessions
    callers: CallersTurns
    timelines: Timelines
    neighbours: Neighbours
    passing: Passing
    seats: "Seats | None"  # None without an address for other nodes
    metrics: Metrics
    telemetry: Telemetry
    past_hour: PastHour
    adapters: Adapters
    tools: Equipment
    live: LiveConfig
    state_dir: Path
    catalog: ToolCatalog
    lock_fd: int  # holds the state directory
    adoption: Adoption | None  # the fate of engines that were already running
    keep_halves: Callable[[], Coroutine[Any, Any, None]]  # runs until cancelled

    async def unclaimed(self) -> dict[str, str]:
        """Return the reason why conversations wait unclaimed, by each model that they need next."""
        if isinstance(self.neighbours, Alone):
            return {}
        from service.store.databases.membership_shared import unclaimed  # noqa: PLC0415 - a node alone needs none of it

        known = {*self.fleet.models(), *self.neighbours.models()}
        return {
            model: f"{count} conversations: "
            + (f"a slot of {model}, on any node" if model in known else f"a node that has {model}")
            for model, count in (await self.store.read(unclaimed)).items()
        }

    async def shut_down(self, drain_s: float, hurry: anyio.Event) -> None:
        """Admit no new jobs, give turns in flight ``drain_s``, then stop all engines; ``hurry`` ends the wait."""
        self.door.close()
        self.jobs.watch.close()
        self.scheduler.close_nowait()
        self.intake.hint(is_work=True)  # its task ends once the scheduler is closing
        self.fleet.drain_nowait(STOPPING)
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as patience:
                tasks.start_soon(self._hurry, hurry, patience)
                with anyio.move_on_after(drain_s):
                    await self.scheduler.wait_idle()
                    await self.passing.wait_none()
                    for weights in self.fleet.weights.values():
                        await weights.catch_up.wait_kept()
                await self.fleet.stop(STOPPING)
            await self.fleet.stop(STOPPING, at_once=hurry.is_set())
            await self._leave(hurry)
            tasks.cancel_scope.cancel()

    async def _leave(self, hurry: anyio.Event) -> None:
        """Let the last turns end, and release unfinished work, without waiting for a store in trouble."""
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as patience:
                tasks.start_soon(self._hurry, hurry, patience)
                with anyio.move_on_after(LANDING_S):
                    await self.scheduler.wait_idle()
                self.scheduler.close_nowait()  # for requests that wait again after their engines ended
                # Another node may have taken over; then there is nothing to write.
                with anyio.move_on_after(LEAVING_S), suppress(StoreUnavailable):
                    await self.store.leave_claims()
            tasks.cancel_scope.cancel()

    async def _hurry(self, hurry: anyio.Event, patience: anyio.CancelScope) -> None:
        await hurry.wait()
        patience.cancel()


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """Left by an earlier program of this process: the lock of the state directory, engines, servers, children."""

    lock_fd: int | None = None
    fleet: HeldFleet | None = None
    servers: Sequence[HeldServer] = ()
    children: Sequence[ProcessId] = ()


NOTHING_LEFT: Final = Left()


@asynccontextmanager
async def open_node(
    config: Config,
    specs: Sequence[WorkerSpec],
    state_dir: Path,
    shares: Mapping[str | None, float] | None = None,
    left: Left = NOTHING_LEFT,
    named: Collection[str] = (),
) -> AsyncIterator[Node]:
    """Run a Roundhouse for a block, with its store open and its workers starting; the caller starts the intake.

    ``shares`` holds keys' shares by name, None without keys. ``left`` comes from an earlier program of this process.
    ``named`` are environment variables that no engine and no tool server inherits. When the block ends in any way, no
    process of it is left.

    Raises:
        StoreError: the store cannot be opened, or a write failed while the block ran (then in a group).
    """
    live, environment = LiveConfig(config, specs, shares), child_environment(named)
    followers, models = JobFollowers(), live.models
    with (
        own_folder(state_dir, left.lock_fd) as lock_fd,
        open_database(config.store, state_dir, models) as database,
        open_store(database) as store,
    ):
        async with (
            offloading(),
            open_tools(config, specs, left.servers, environment) as tools,
            _own_ends() as own_ends,
            anyio.create_task_group() as tasks,
        ):
            metrics = Metrics(models)
            telemetry = Telemetry(metrics)
            specs = [replace(spec, state_dir=state_dir) for spec in tools.equipped(specs)]

            def count_pools() -> dict[str, int]:
                return asdict(pools_of(scheduler, fleet))

            board = _board(config, left, live)
            fleet = Fleet(
                specs,
                environment,
                state_dir,
                metrics.observe_phase,
                tries_suspects=True,
                count_pools=count_pools,
                swap_rule=config.scheduling.swap,
                health=_health(config, specs),
                spans=board,
            )
            cluster = _cluster(config.store, lambda: _report(store, scheduler, fleet, models))
            seats = _seats(config, board, lambda: _report(store, scheduler, fleet, models), tasks)
            neighbours = cluster or Alone()
            outlet = StoreOutlet(store, models, config.store.lease_s, followers, neighbours, telemetry.record_facts)
            scheduler = Scheduler(
                POLICIES[config.scheduling.policy],
                fleet,
                outlet,
                config.scheduling.group_by,
                live.shares,
                queue=queue_rules(config),
            )
            own_ends.append(scheduler.note_own_end)
            scheduler.requests.subscribe(telemetry.take_request)
            tasks.start_soon(watch(metrics, fleet, scheduler, store, tools.states).run)
            adapters = Adapters(fleet, models)
            intake = Intake(store, scheduler, models, adapters.names, telemetry.note_job, is_shared=cluster is not None)
            news = StoreNews(store, scheduler, intake, followers)
            tell = partial(_tell_both, metrics.take_news, news.forward_event)
            store.subscribe(tell)
            tasks.start_soon(news.run)
            await tasks.start(scheduler.run)
            tasks.start_soon(store.wait_failed)
            if cluster is not None:
                await store.flush()  # the first write makes this node a member
                await tasks.start(cluster.run, tell)
                # A worker that becomes ready has slots for waiting conversations.
                fleet.subscribe(lambda _worker: intake.hint(is_work=True))
            prompts = PromptHistory(
                store, scheduler, adapters.names, partial(_constrain, live), partial(_sends_tools, live)
            )
            versions, rules = partial(_version_of, fleet, adapters), partial(_rules, live, adapters, neighbours)
            door = JobDoor(store, scheduler, intake, rules, catalog := ToolCatalog(runners_of(tools), adapters.names))
            unwanted = [child for child in left.children if child not in tools.adopted.values()]
            adoption = await inherit(fleet, left.fleet, unwanted) if left.fleet is not None else None
            trace = tracing(config.telemetry, telemetry, fleet, scheduler, store.node_id)
            async with trace, fleet.running(), scheduler.leaving():
                yield Node(
                    fleet=fleet,
                    scheduler=scheduler,
                    store=store,
                    intake=intake,
                    door=door,
                    jobs=(jobs := Jobs(store, scheduler, intake, followers, neighbours, rules)),
                    prompts=prompts,
                    rollouts=Rollouts(store, jobs, prompts, scheduler.tokens, versions, lambda: live.config.rollouts),
                    sessions=Sessions(store, scheduler.requests, scheduler.tokens, versions),
                    callers=CallersTurns(store, scheduler, intake, is_shared=cluster is not None),
                    timelines=Timelines(store, scheduler, fleet),
                    neighbours=neighbours,
                    passing=Passing(),
                    seats=seats,
                    metrics=metrics,
                    telemetry=telemetry,
                    past_hour=PastHour(fleet, scheduler),
                    adapters=adapters,
                    tools=tools,
                    live=live,
                    state_dir=state_dir,
                    catalog=catalog,
                    lock_fd=lock_fd,
                    adoption=adoption,
                    keep_halves=partial(keep_halves, scheduler.turns, scheduler.pauses, outlet),
                )
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def _own_ends() -> AsyncIterator[list[Callable[[str], None]]]:
    """Call the functions in the list if the block ends by a defect; faults of the store or the machine do not count."""
    listeners: list[Callable[[str], None]] = []
    try:
        yield listeners
    except Exception as error:
        defects = [each for each in _leaves(error) if not isinstance(each, ServiceError | OSError)]
        if defects:
            for tell in listeners:
                with suppress(Exception):  # the error of the block counts
                    tell(f"the service ended: {type(defects[0]).__name__}: {defects[0]}"[:DETAIL_CHARS])
        raise


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error


def _tell_both(first: Tell, second: Tell, event: StoreEvent) -> None:
    first(event)
    second(event)


def _health(config: Config, specs: Sequence[WorkerSpec]) -> DeviceHealth | None:
    """Return the device monitor of this machine; None without devices, or if a file stands in for them."""
    has_any = any(spec.lane is not None or spec.accelerators for spec in specs)
    return DeviceHealth(MachineReader()) if has_any and config.gpus.inventory is None else None


def runners_of(tools: Equipment) -> dict[str, ToolRunnersOfModel]:
    """Return the tool runners of each model."""
    return {
        model: ToolRunnersOfModel(python=tools.python.get(model), servers=servers)
        for model, servers in tools.servers.items()
    }


def _constrain(live: LiveConfig, model: str, constraint: Constraint) -> Mapping[str, object]:
    """Return the parameters of a constraint; empty for a model that is only on other nodes."""
    spec = live.spec_of(model)
    return (DIALECTS[spec.engine].constrain(constraint) or {}) if spec is not None else {}


def _sends_tools(live: LiveConfig, model: str) -> bool:
    spec = live.spec_of(model)
    return spec is not None and takes_tools(spec)


def _version_of(fleet: Fleet, adapters: Adapters, name: str) -> int | None:
    """Return the version of a model's weights, or of those below an adapter; None if they never change here."""
    weights = fleet.weights.get(adapters.names().get(name, name))
    return None if weights is None else weights.current.version


def _rules(live: LiveConfig, adapters: Adapters, neighbours: Neighbours) -> JobRules:
    return rules_of(live.config, adapters.names(), neighbours.known_models())


def _cluster(config: StoreConfig, report: Callable[[], NodeReport]) -> "Cluster | None":
    if not is_shared(config):
        return None
    from service.store.cluster import Cluster  # noqa: PLC0415 - it imports psycopg

    return Cluster(config.url, config.lease_s, report)


def _board(config: Config, left: Left, live: LiveConfig) -> SpanBoard | None:
    """Return the place for spans; None for a node that others cannot reach."""
    if not is_shared(config.store) or config.server.address is None:
        return None
    held = left.fleet
    mark = os.environ.get("ROUNDHOUSE_CLUSTER", "")  # set where a cluster has started this node
    seat = (held.seat if held is not None else None) or mark + secrets.token_hex(8)
    board = SpanBoard(seat, config.server.address, config.store.lease_s)
    board.inherited |= {each.id for each in (held.workers if held is not None else ()) if each.engine.generation}
    live.leads = partial(_leads, live, board)
    return board


def _leads(live: LiveConfig, board: SpanBoard, model: str) -> bool:
    return any(board.leads(f"{model}-{index}") for index in range(live.config.models[model].replicas))


def _seats(
    config: Config, board: SpanBoard | None, report: Callable[[], NodeReport], tasks: TaskGroup
) -> "Seats | None":
    if board is None:
        return None
    from service.store.seats import Seats  # noqa: PLC0415 - it imports psycopg

    seats = Seats(config.store.url, board, config.server.port, report)
    tasks.start_soon(seats.run)
    return seats


def _report(store: Store, scheduler: Scheduler, fleet: Fleet, served: Collection[str]) -> NodeReport:
    view, adapters = scheduler.view, fleet.adapters
    is_leaving = scheduler.pauses.is_closing
    models = [model for model in fleet.models() if model in served and not (is_leaving or fleet.is_lost(model))]
    counts = {job_id: view.of_job(job_id) for job_id in view.jobs() if job_id not in scheduler.requests}
    return NodeReport(
        node_id=store.node_id,
        models=[*models, *(name for model in models if model in adapters for name in adapters[model].names)],
        counts={name: (count[TurnState.READY], count[TurnState.IN_FLIGHT]) for name, count in counts.items()},
    )
