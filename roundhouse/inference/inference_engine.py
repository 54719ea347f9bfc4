"""``InferenceEngine``: agents with checkpoints of their own on the lanes of a machine (specification, of that name).

It owns its lanes, their engines and one queue. What fails is healed below: a run whose engine dies goes on elsewhere,
and its caller waits for one turn longer.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, NotRequired, Self, TypedDict

import anyio
from msgspec import structs

from roundhouse.inference.checkpoints import Checkpoints
from roundhouse.inference.engine_status import EngineStatus, engine_status
from roundhouse.inference.event_log import EventLog
from roundhouse.inference.failures import AgentExists, EngineClosed, InferenceFailed, NoLane, UnknownAgent
from roundhouse.inference.lane_agents import AgentPrompts, LaneAgent, Step, words_of
from roundhouse.inference.lane_news import LaneNews, News
from roundhouse.inference.runs import AgentRuns, Order
from service.config.inventory import lanes_for
from service.errors import ConfigError
from workers.devices.device_health import DeviceHealth
from workers.devices.layout import Lane, Layout, LayoutPolicy
from workers.devices.readers import MachineReader
from workers.engine.start_gate import StartGate
from workers.errors import InvalidSpec, StopTimedOut
from workers.lanes.lane_pool import LanePool, LaneSet
from workers.offload.pool import offloading
from workers.outcome import FailureReason
from workers.policy.params import refuse_params
from workers.process.orphans import patrol
from workers.process.registry import open_registry
from workers.spec import EngineKind, WorkerSpec
from workers.supervised import SupervisedWorker

CLOSING_S: Final = 30.0
logger = logging.getLogger(__name__)


class InferenceRequest(TypedDict):
    """One run of a batch."""

    agent_id: str
    prompt: str
    step: Step
    max_tokens: int
    params: NotRequired[Mapping[str, object]]


class InferenceEngine:
    """Serves agents, each with a checkpoint, from the GPUs of this machine, or from its CPU.

    It starts at the first ``await``, or with ``async with``; ``shutdown`` leaves no process. ``spec`` is what runs on
    each lane: its model, name, id, host, port and lane are set here. ``inventory`` is a file in place of this machine's
    devices. ``system`` stands first in every prompt, so that all agents of a checkpoint share it. ``bios`` is whether
    they read the time, and how to write thoughts, answers and calls; None is where there are tools. With
    ``scheduler_policy`` ``fcfs`` runs start strictly in the order of arrival. A step of an answer is
    ``max_tokens_per_step`` tokens in the predicted time; with ``emulate_latency`` an answer comes no sooner.
    ``event_log`` is a file for timing events.
    """

    def __init__(  # noqa: PLR0913 - all of it is a user's to say
        self,
        spec: WorkerSpec | None = None,
        *,
        max_agents_per_gpu: int = 2,
        max_gpus: int = 8,
        enable_mig: bool = False,
        layout: str = "B",
        ports: tuple[int, int] = (9300, 9399),
        inventory: str | Path | None = None,
        system: str = "",
        bios: bool | None = None,
        max_tokens_per_step: int = 16,
        prefill_cache: bool = True,
        scheduler_policy: Order = "fair",
        emulate_latency: bool = False,
        event_log: str | Path | None = None,
    ) -> None:
        if scheduler_policy not in ("fair", "fcfs"):
            raise ValueError(f"scheduler_policy: {scheduler_policy!r} is none; give 'fair' or 'fcfs'")
        if max_tokens_per_step < 1:
            raise ValueError(f"max_tokens_per_step: {max_tokens_per_step!r} is no number of tokens; give 1 or more")
        if layout not in list(Layout):
            raise ValueError(f"layout: {layout!r} is none; give {' or '.join(repr(str(each)) for each in Layout)}")
        policy = LayoutPolicy(
            layout=Layout(layout),
            max_gpus=max_gpus,
            max_agents_per_gpu=max_agents_per_gpu,
            enable_mig=enable_mig,
            ports=ports,
        )
        spec = spec or WorkerSpec(engine=EngineKind.VLLM, slots=1)
        if not spec.owns_engine:
            raise InvalidSpec("engine: attached has no process of ours, which a lane needs")
        bios_policy = structs.replace(spec.bios, is_on=bool(spec.tools) if bios is None else bios, context="")
        spec = replace(_caching(spec, is_on=prefill_cache), bios=bios_policy, max_tokens_per_step=max_tokens_per_step)
        self._prompts = AgentPrompts(replace(spec, model="-"), system)
        self._base = self._prompts.warmed()
        devices = Path(inventory) if inventory is not None else None
        self.lanes: tuple[Lane, ...] = _lanes(self._base, devices, policy)
        health = DeviceHealth(MachineReader()) if inventory is None else None
        self._agents: dict[str, LaneAgent] = {}
        self._news = LaneNews(self._agents)
        self._pool = LanePool(LaneSet(health), on_swap=self._news.report_swap)
        self._checkpoints = Checkpoints(self._base, self.lanes, self._pool, self._note_change)
        self._log = EventLog(Path(event_log)) if event_log is not None else None
        self._runs = AgentRuns(self._pool, scheduler_policy, self._news, self._log, emulates=emulate_latency)
        self._owner: asyncio.Task[None] | None = None  # any task of the caller's may ask for its tasks
        self._is_up = asyncio.Event()  # the tasks of the owner run, or could not start
        self._starting, self._registering = asyncio.Lock(), asyncio.Lock()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<InferenceEngine agents={len(self._agents)} lanes={len(self.lanes)}>"

    async def __aenter__(self) -> Self:
        """Start."""
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Shut down."""
        await self.shutdown()

    # Agents

    async def register_agent(
        self,
        *,
        agent_id: str,
        model_ckpt: str | Path,
        lane_hint: int | None = None,
        params: Mapping[str, object] | None = None,
        memory_mib: int | None = None,
    ) -> None:
        """Pin an agent to a lane, where its checkpoint is loaded at its first run.

        Of agents of one checkpoint the first one's ``lane_hint`` and ``memory_mib`` count: that is what it needs of a
        device, where its files do not tell. ``params`` are generation parameters of its
        runs, over those of the engine.

        ``model_ckpt`` is a path, ``hf:ORG/REPO`` of a hub, ``roundhouse:small`` or ``roundhouse:tiny``; what has to be
        fetched is fetched here.

        Raises:
            AgentExists: there is one of that id.
            NoLane: there is no place for the checkpoint, or the hint is no lane.
            InvalidSpec: no engine can be started with it, or it is not there.
            ModelUnavailable: it cannot be fetched.
            EngineClosed: it was shut down.
        """
        given = refuse_params(params)
        await self._start()
        async with self._registering:
            if agent_id in self._agents:
                raise AgentExists(agent_id)
            served = await self._checkpoints.serve(str(model_ckpt), lane_hint, memory_mib)
            self._agents[agent_id] = LaneAgent(agent_id, served, given)

    async def resume_lane(self, lane: int) -> None:
        """Use the device of a lane again, which was left alone: somebody has seen to it.

        Raises:
            NoLane: there is no such lane.
        """
        if not 0 <= lane < len(self.lanes):
            raise NoLane(f"lane: {lane} is no lane; there are 0 to {len(self.lanes) - 1}")
        self._pool.lanes.forgive(self.lanes[lane].id)

    def status(self) -> EngineStatus:
        """Describe lanes, models and agents at this moment; nothing is started for it."""
        return engine_status(self._pool, self._runs, self._agents.values())

    # Runs

    async def run(
        self,
        agent_id: str,
        prompt: str,
        *,
        step: Step,
        max_tokens: int,
        deadline_s: float | None = None,
        params: Mapping[str, object] | None = None,
    ) -> str:
        """Return an agent's answer: with its thoughts after ``think``, its words alone after ``act``.

        ``think`` runs no tool; ``plan`` and ``act`` do. ``act`` is "" where the agent waits. Runs of one agent are done
        in their order. ``params`` are generation parameters of this run, over the agent's.

        Raises:
            ValueError: an argument cannot be used; the message names it.
            UnknownAgent: it is not registered.
            InferenceFailed: there is no answer, or none within ``deadline_s`` of the call.
            EngineClosed: it was shut down.
        """
        if max_tokens < 1:
            raise ValueError(f"max_tokens: {max_tokens!r} is no number of tokens; give 1 or more")
        given = refuse_params(params)
        if deadline_s is not None and deadline_s < 0:
            raise ValueError(f"deadline_s: {deadline_s!r} is no time; give 0 or more")
        if step not in ("think", "plan", "act"):
            raise ValueError(f"step: {step!r} is none; give 'think', 'plan' or 'act'")
        await self._start()
        agent = self._agents.get(agent_id)
        if agent is None:
            raise UnknownAgent(agent_id)
        request = self._prompts.request(agent, prompt, step, max_tokens, given)
        try:
            async with asyncio.timeout(deadline_s), agent.turn:
                answer = await self._runs.ask(agent, request, self._base.timeouts.refusal_s)
        except TimeoutError as error:
            model = agent.served.model
            why = f"no answer within {deadline_s or 0:g} s; {model}: {self._pool.lanes.trouble_of(model)}"
            raise InferenceFailed(agent.id, FailureReason.DEADLINE, why) from error
        return words_of(answer, step)

    async def batch_run(self, requests: Sequence[InferenceRequest]) -> list[str]:
        """Return the answers of several runs, in the order of ``requests``; they queue in that order.

        Raises:
            InferenceError: one of them has failed; the others are ended.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self.run(**each)) for each in requests]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in running]

    # Events

    async def events(self) -> AsyncIterator[News]:
        """Yield what happens to lanes and agents until ``shutdown``; a reader that lags loses the oldest."""
        await self._start()
        async for news in self._news.follow():
            yield news

    def _note_change(self, worker: SupervisedWorker) -> None:
        self._pool.note_change(worker)
        self._news.report(worker)
        self._runs.start_runs()

    # Life

    async def shutdown(self) -> None:
        """End all runs and engines; when it returns, no process is left, and all events are on the disk."""
        async with self._starting:
            if self._is_closed:
                return
            self._is_closed = True
            self._pool.close()
            self._runs.close()
            if self._owner is not None:
                async with anyio.create_task_group() as tasks:
                    for worker in (worker for lane in self._pool.lanes for worker in lane):
                        tasks.start_soon(_end_engine, worker)
                self._owner.cancel()
                await asyncio.wait([self._owner], timeout=CLOSING_S)
            self._news.close()
            if self._log is not None:
                await asyncio.to_thread(self._log.close)

    async def _start(self) -> None:
        async with self._starting:
            if self._is_closed or self._runs.is_closed:
                raise EngineClosed(self._runs.because)
            if self._owner is None or self._owner.done():
                self._is_up = asyncio.Event()
                self._owner = asyncio.create_task(self._own_tasks(self._is_up), name="inference engine")
            await self._is_up.wait()
            if self._owner.done():
                await self._owner  # raises why it could not start

    async def _own_tasks(self, is_up: asyncio.Event) -> None:
        try:
            async with (
                offloading(),
                open_registry(self._base.state_dir) as registry,
                anyio.create_task_group() as tasks,
            ):
                gate = StartGate()
                self._checkpoints.start = lambda worker: tasks.start_soon(worker.run, registry, gate)
                tasks.start_soon(patrol)
                await tasks.start(self._pool.run, gate)
                tasks.start_soon(self._pool.look_after_devices)
                is_up.set()
                await anyio.sleep_forever()
        except Exception as error:
            if not is_up.is_set():
                raise
            cause: BaseException = error
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            logger.exception("the inference engine has ended by a defect of Roundhouse")
            self._runs.close(f"the engine has ended by a defect of Roundhouse: {type(cause).__name__}: {cause}")
        finally:
            is_up.set()


def _lanes(spec: WorkerSpec, inventory: Path | None, policy: LayoutPolicy) -> tuple[Lane, ...]:
    try:
        return lanes_for([spec], inventory, Path.cwd(), policy)
    except ConfigError as error:  # it names keys of a configuration file, which are keywords here
        raise ConfigError(str(error).removeprefix("gpus.")) from error


async def _end_engine(worker: SupervisedWorker) -> None:
    with suppress(StopTimedOut):  # its guardian goes on trying, and the log says so
        await worker.end_engine("the engine is shut down")


def _caching(spec: WorkerSpec, *, is_on: bool) -> WorkerSpec:
    """Return a specification of engines that keep prefixes of prompts, or do not, unless its own words say so."""
    if spec.engine is EngineKind.VLLM:
        flag = "enable-prefix-caching" if is_on else "no-enable-prefix-caching"
        return replace(spec, args={flag: True, **spec.args})
    return replace(spec, params={"cache_prompt": is_on, **spec.params})
