"""``InferenceEngine``: agents with checkpoints of their own on the lanes of a machine (specification, of that name).

It owns its lanes, their engines and one queue. What fails is healed below: a run whose engine dies goes on elsewhere,
and its caller waits for one turn longer.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NotRequired, Self, TypedDict

import msgspec
from msgspec import structs

from roundhouse.inference.checkpoints import Checkpoints, Served
from roundhouse.inference.engine_status import EngineStatus, engine_status
from roundhouse.inference.event_log import EventLog
from roundhouse.inference.failures import AgentExists, EngineClosed, InferenceFailed, NoLane, UnknownAgent
from roundhouse.inference.lane_news import LaneNews, News, NewsReaders
from roundhouse.inference.runs import AgentRuns, Order, Turnstile
from roundhouse.inference.site import Site
from service.config.inventory import lanes_for
from service.conversations.job.markup import read_markup
from service.conversations.job.wording import wording_of
from transport.answer_bound import laid_over
from workers.devices.device_health import DeviceHealth
from workers.devices.layout import Lane, Layout, LayoutPolicy
from workers.devices.readers import MachineReader
from workers.engine.launch import takes_tools
from workers.lanes.lane_pool import LanePool
from workers.lanes.swap_log import Swap
from workers.outcome import FailureReason
from workers.policy.repetition import RepetitionLimits
from workers.policy.restart import RestartPolicy
from workers.requests.answer import Answer
from workers.requests.bios_words import BiosFrame, BiosPolicy
from workers.requests.prompts.render import ToolBudget, render_messages
from workers.requests.request import Request, parse_tools, user_conversation
from workers.spec import EngineKind, Flag, Tools, WorkerSpec, WorkerTimeouts
from workers.supervised import SupervisedWorker
from workers.tools.calls import ToolLimits
from workers.tools.definition import ToolDefinition
from workers.tools.runner import ToolRunner
from workers.tools.thoughts import without_thoughts

Step = Literal["think", "plan", "act"]


class InferenceRequest(TypedDict):
    """One run of a batch."""

    agent_id: str
    prompt: str
    step: Step
    max_tokens: int
    params: NotRequired[Mapping[str, object]]


class _Agent(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    served: Served
    params: Mapping[str, object]  # generation parameters of all its runs
    turn: asyncio.Lock  # its runs are done in their order


class InferenceEngine:
    """Serves agents, each with a checkpoint, from the GPUs of this machine, or from its CPU.

    It starts at the first ``await``, or with ``async with``; ``shutdown`` leaves no process. ``engine`` is what runs on
    a lane, with ``command``, ``args`` and ``env`` as of a model in the configuration, and ``slots`` requests at once.
    ``inventory`` is a file in place of this machine's devices. ``system`` stands first in every prompt, so that all
    agents of a checkpoint share it. ``bios`` is whether they are told the time, and how to write thoughts, answers and
    calls; None is where there are tools. ``tools`` are OpenAI definitions, which ``tool_runner`` runs. With
    ``scheduler_policy`` ``fcfs`` runs start strictly in the order of arrival. A step of an answer is
    ``max_tokens_per_step`` tokens in what an answer should take; with ``emulate_latency`` it comes no sooner.
    ``event_log`` is a file for timing events. ``state_dir`` is where started processes and incidents are noted.
    ``params`` are generation parameters of all agents; ``timeouts``, ``restart``, ``tool_limits`` and ``repetition``
    are those of a ``WorkerSpec``, None its defaults.
    """

    def __init__(  # noqa: PLR0913 - all of it is a user's to say
        self,
        *,
        max_agents_per_gpu: int = 2,
        max_gpus: int = 8,
        enable_mig: bool = False,
        engine: str = "vllm",
        command: Sequence[str] = (),
        args: Mapping[str, Flag] | None = None,
        env: Mapping[str, str] | None = None,
        inventory: str | Path | None = None,
        layout: str = "B",
        ports: tuple[int, int] = (9300, 9399),
        slots: int = 1,
        context: int = 4096,
        system: str = "",
        bios: bool | None = None,
        tools: Tools = (),
        tool_runner: ToolRunner | None = None,
        max_tokens_per_step: int = 16,
        prefill_cache: bool = True,
        scheduler_policy: Order = "fair",
        emulate_latency: bool = False,
        event_log: str | Path | None = None,
        state_dir: str | Path | None = None,
        params: Mapping[str, object] | None = None,
        timeouts: WorkerTimeouts | None = None,
        restart: RestartPolicy | None = None,
        tool_limits: ToolLimits | None = None,
        repetition: RepetitionLimits | None = None,
    ) -> None:
        if scheduler_policy not in ("fair", "fcfs"):
            raise ValueError(f"scheduler_policy: {scheduler_policy!r} is none; give 'fair' or 'fcfs'")
        if max_tokens_per_step < 1:
            raise ValueError(f"max_tokens_per_step: {max_tokens_per_step!r} is no number of tokens; give 1 or more")
        policy = LayoutPolicy(
            layout=Layout(layout),
            max_gpus=max_gpus,
            max_agents_per_gpu=max_agents_per_gpu,
            enable_mig=enable_mig,
            ports=ports,
        )
        self._state_dir = Path(state_dir) if state_dir is not None else None
        self._base = WorkerSpec(
            engine=EngineKind(engine),
            model="-",
            slots=slots,
            context=context,
            command=tuple(command),
            args={**_cache_flags(EngineKind(engine), is_on=prefill_cache), **(args or {})},
            env=dict(env or {}),
            params={**_cache_params(EngineKind(engine), is_on=prefill_cache), **(params or {})},
            timeouts=timeouts or WorkerTimeouts(),
            restart=restart or RestartPolicy(),
            tool_limits=tool_limits or ToolLimits(),
            repetition=repetition or RepetitionLimits(),
            bios=BiosPolicy(is_on=bool(tools) if bios is None else bios, context=""),
            tool_runner=tool_runner,
            state_dir=self._state_dir,
            max_tokens_per_step=max_tokens_per_step,
        )
        self.lanes: tuple[Lane, ...] = lanes_for(
            [self._base], Path(inventory) if inventory is not None else None, Path.cwd(), policy
        )
        self._system = system
        self._tools = parse_tools(tools)
        self._base = self._warmed()
        self._agents: dict[str, _Agent] = {}
        self._news = LaneNews(self._agents_on)
        self._health = DeviceHealth(MachineReader()) if inventory is None else None
        self._pool = LanePool(on_swap=self._note_swap, health=self._health)
        self._checkpoints = Checkpoints(self._base, self.lanes, self._pool, self._changed)
        self._turnstile = Turnstile(self._pool, scheduler_policy)
        self._log = EventLog(Path(event_log)) if event_log is not None else None
        self._readers = NewsReaders()
        self._runs = AgentRuns(
            self._pool, self._turnstile, self._readers, self._news, self._log, emulates=emulate_latency
        )
        self._site: Site | None = None
        self._starting, self._registering = asyncio.Lock(), asyncio.Lock()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<InferenceEngine agents={len(self._agents)} lanes={len(self.lanes)}>"

    async def __aenter__(self) -> Self:
        """Start."""
        await self._started()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shut down."""
        await self.shutdown()

    def _warmed(self) -> WorkerSpec:
        """Return the base with what all prompts begin with: where there are tools, the BIOS comes first."""
        limits, request = self._base.tool_limits, self._request("", self._tools)
        budget = ToolBudget(iterations=limits.iterations, has_fallback=limits.fallback, stuck=limits.stuck)
        assert request.frame is not None  # noqa: S101 - every request of ours has one
        head = [each for each in render_messages(request, request.frame, budget) if each.role == "system"]
        return replace(
            self._base,
            warm_up="".join(each.content for each in head),
            warm_up_tools=[tool.document for tool in self._tools] if takes_tools(self._base) else [],
        )

    def _request(self, prompt: str, tools: Sequence[ToolDefinition]) -> Request:
        return Request(
            job_name="",
            system=self._system,
            conversation=user_conversation(prompt),
            tools=tuple(tools),
            markup=True,
            is_watched=False,
            # A job's words: what is left of the tool budget stands behind each result, so that the prefix stays.
            frame=BiosFrame(words=wording_of(self._base.bios).bios, context="", now=datetime.now().astimezone()),
        )

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
        site = await self._started()
        async with self._registering:
            if agent_id in self._agents:
                raise AgentExists(agent_id)
            served = await self._checkpoints.serve(site, str(model_ckpt), lane_hint, memory_mib)
            self._agents[agent_id] = _Agent(id=agent_id, served=served, params=params or {}, turn=asyncio.Lock())

    async def resume_lane(self, lane: int) -> None:
        """Use the device of a lane again, which was left alone: somebody has seen to it.

        Raises:
            NoLane: there is no such lane.
        """
        if not 0 <= lane < len(self.lanes):
            raise NoLane(f"lane: {lane} is no lane; there are 0 to {len(self.lanes) - 1}")
        self._pool.forgive(self.lanes[lane].id)

    def status(self) -> EngineStatus:
        """Describe lanes, models and agents at this moment; nothing is started for it."""
        return engine_status(self._pool, self._turnstile, self._runs)

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
            UnknownAgent: it is not registered.
            InferenceFailed: there is no answer, or none within ``deadline_s`` of the call.
            EngineClosed: it was shut down.
        """
        if step not in ("think", "plan", "act"):
            raise ValueError(f"step: {step!r} is none; give 'think', 'plan' or 'act'")
        await self._started()
        agent = self._agents.get(agent_id)
        if agent is None:
            raise UnknownAgent(agent_id)
        request = structs.replace(
            self._request(prompt, () if step == "think" else self._tools),
            job_name=agent_id,
            params=laid_over({**agent.params, **(params or {})}, {"max_tokens": max_tokens}),
            adapter=agent.served.adapter,
        )
        try:
            async with asyncio.timeout(deadline_s), agent.turn:
                answer = await self._runs.ask(agent.id, agent.served.model, request, self._base.timeouts.refusal_s)
        except TimeoutError as error:
            model = agent.served.model
            why = f"no answer within {deadline_s or 0:g} s; {model}: {self._pool.trouble_of(model)}"
            raise InferenceFailed(agent.id, FailureReason.DEADLINE, why) from error
        return _said(answer, step)

    async def batch_run(self, requests: Sequence[InferenceRequest]) -> list[str]:
        """Return the answers of several runs, in the order of ``requests``; they queue in that order.

        Raises:
            InferenceError: one of them has failed; the others are ended.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(
                        self.run(
                            each["agent_id"],
                            each["prompt"],
                            step=each["step"],
                            max_tokens=each["max_tokens"],
                            params=each.get("params"),
                        )
                    )
                    for each in requests
                ]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in running]

    # Events

    async def events(self) -> AsyncIterator[News]:
        """Yield what happens to lanes and agents until ``shutdown``; a reader that lags loses the oldest."""
        await self._started()
        async for news in self._readers.follow():
            yield news

    def _agents_on(self, lane: str, model: str) -> list[str]:
        """List the agents that work on a lane: those that were there last, and those pinned there that were nowhere."""
        return [
            agent.id
            for agent in self._agents.values()
            if agent.served.model == model and (self._runs.last_lane(agent.id) or self._pool.hints.get(model)) == lane
        ]

    def _note_swap(self, swap: Swap) -> None:
        self._readers.tell(
            News(
                event="swap", time=time.time(), lane=swap.lane, model=swap.model, left=swap.left,
                because=swap.because, seconds=swap.seconds,
            )
        )  # fmt: skip

    def _changed(self, worker: SupervisedWorker) -> None:
        self._pool.note_change(worker)
        for news in self._news.news_of(worker):
            self._readers.tell(news)
        self._turnstile.start_runs()

    # Life

    async def shutdown(self) -> None:
        """End all runs and engines; when it returns, no process is left, and all events are on the disk."""
        async with self._starting:
            if self._is_closed:
                return
            self._is_closed = True
            self._pool.close()
            self._runs.close()
            if self._site is not None:
                await self._site.end()
            self._readers.close()
            if self._log is not None:
                await asyncio.to_thread(self._log.close)

    async def _started(self) -> Site:
        async with self._starting:
            if self._is_closed or self._runs.is_closed:
                raise EngineClosed(self._runs.because)
            if self._site is None:
                self._site = await Site.open(self._pool, self._state_dir, self._runs.close)
            return self._site


def _said(answer: Answer, step: Step) -> str:
    if step == "act":
        return read_markup(answer.text).words
    if step == "plan":
        return without_thoughts(answer.text)
    return f"<thinking>{answer.reasoning}</thinking>\n{answer.text}" if answer.reasoning else answer.text


def _cache_flags(engine: EngineKind, *, is_on: bool) -> dict[str, Flag]:
    if engine is not EngineKind.VLLM:
        return {}
    return {"enable-prefix-caching": True} if is_on else {"no-enable-prefix-caching": True}


def _cache_params(engine: EngineKind, *, is_on: bool) -> dict[str, Any]:
    return {} if engine is EngineKind.VLLM else {"cache_prompt": is_on}
