"""``InferenceEngine``: agents with checkpoints of their own on the lanes of a machine (specification, of that name).

It owns its lanes, their engines and one queue. What fails is healed below: a run whose engine dies goes on elsewhere,
and its caller waits for one turn longer.
"""

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypedDict

from service.config.inventory import devices_of, lanes_on
from service.conversations.markup import read_markup, without_thinking
from service.inference.allocator import Allocator
from service.inference.event_log import INFER_DONE, INFER_START, EventLog
from service.inference.failures import AgentExists, EngineClosed, InferenceFailed, UnknownAgent
from service.inference.lane_news import LaneNews, News, NewsReaders
from service.inference.patience import Patience
from service.inference.site import Site
from service.inference.turnstile import Order, Seat, Turnstile
from workers.devices.layout import Lane, Layout, LayoutPolicy
from workers.engine.launch import command_for
from workers.engine.launch.vllm import socket_of
from workers.errors import InvalidSpec
from workers.health.diary import Diary
from workers.lanes.lane_pool import LanePool, Swap
from workers.lanes.lane_spec import on_lane
from workers.lanes.memory_need import memory_need
from workers.outcome import Cancelled, Completed, EngineFailed, FailureReason, Outcome, RequestFailed
from workers.requests.answer import Answer
from workers.requests.prompts.bios import BiosFrame, BiosPolicy, seed_words
from workers.requests.request import Request, parse_tools, user_conversation
from workers.spec import EngineKind, Flag, Tools, WorkerId, WorkerSpec
from workers.supervised import SupervisedWorker
from workers.tools.runner import ToolRunner

Step = Literal["think", "plan", "act"]
CLOSED: Final = "the engine was shut down"


class InferenceRequest(TypedDict):
    """One run of a batch."""

    agent_id: str
    prompt: str
    step: Step
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Agent:
    id: str
    model: str
    turn: asyncio.Lock  # its runs are done in their order


class InferenceEngine:
    """Serves agents, each with a checkpoint, from the GPUs of this machine, or from its CPU.

    It starts at the first ``await``, or with ``async with``; ``shutdown`` leaves no process. ``engine`` is what runs on
    a lane, with ``command``, ``args`` and ``env`` as of a model in the configuration, and ``slots`` requests at once.
    ``inventory`` is a file in place of this machine's devices. ``system`` stands first in every prompt, so that all
    agents of a checkpoint share it. ``tools`` are OpenAI definitions, which ``tool_runner`` runs. With
    ``scheduler_policy`` ``fcfs`` runs start strictly in the order of arrival. ``event_log`` is a file for timing
    events. ``state_dir`` is where started processes and incidents are noted.
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
        tools: Tools = (),
        tool_runner: ToolRunner | None = None,
        prefill_cache: bool = True,
        scheduler_policy: Order = "fair",
        event_log: str | Path | None = None,
        state_dir: str | Path | None = None,
    ) -> None:
        if scheduler_policy not in ("fair", "fcfs"):
            raise ValueError(f"scheduler_policy: {scheduler_policy!r} is none; give 'fair' or 'fcfs'")
        policy = LayoutPolicy(
            layout=Layout(layout),
            max_gpus=max_gpus,
            max_agents_per_gpu=max_agents_per_gpu,
            enable_mig=enable_mig,
            ports=ports,
        )
        self.lanes: tuple[Lane, ...] = lanes_on(
            devices_of(Path(inventory) if inventory is not None else None, Path.cwd()), policy
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
            params=_cache_params(EngineKind(engine), is_on=prefill_cache),
            bios=BiosPolicy(is_on=bool(tools), context=""),
            tool_runner=tool_runner,
            state_dir=self._state_dir,
        )
        self._diaries = [Diary.of(replace(self._base, id=WorkerId(each.id))) for each in self.lanes]
        self._system = system
        self._tools = parse_tools(tools)
        self._allocator = Allocator(self.lanes)
        self._agents: dict[str, _Agent] = {}
        self._models: dict[str, str] = {}  # of checkpoints
        self._news = LaneNews(lambda model: [each.id for each in self._agents.values() if each.model == model])
        self._pool = LanePool(on_swap=self._note_swap)
        self._turnstile = Turnstile(self._pool, scheduler_policy)
        self._log = EventLog(Path(event_log)) if event_log is not None else None
        self._readers = NewsReaders()
        self._site: Site | None = None
        self._starting, self._registering = asyncio.Lock(), asyncio.Lock()
        self._is_closed = False
        self._began = datetime.now().astimezone()

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

    # Agents

    async def register_agent(self, *, agent_id: str, model_ckpt: str | Path, lane_hint: int | None = None) -> None:
        """Pin an agent to a lane, where its checkpoint is loaded at its first run.

        Raises:
            AgentExists: there is one of that id.
            NoLane: there is no place for the checkpoint, or the hint is no lane.
            InvalidSpec: no engine can be started with it.
            EngineClosed: it was shut down.
        """
        site = await self._started()
        checkpoint = str(model_ckpt)
        async with self._registering:
            if agent_id in self._agents:
                raise AgentExists(agent_id)
            name = self._models.get(checkpoint)
            if name is None:
                name = await self._add_model(site, checkpoint, lane_hint)
            else:
                self._allocator.pin(name, None, lane_hint)
            self._agents[agent_id] = _Agent(id=agent_id, model=name, turn=asyncio.Lock())

    async def _add_model(self, site: Site, checkpoint: str, lane_hint: int | None) -> str:
        name = self._name(checkpoint)
        spec = replace(self._base, name=name, model=checkpoint)
        _check(spec)
        need = await asyncio.to_thread(memory_need, spec)
        spec = replace(spec, need_mib=need.taken if need else None)
        workers = [
            SupervisedWorker(on_lane(spec, lane, self._socket(lane)), os.environ, self._changed, diary=diary)
            for lane, diary in zip(self.lanes, self._diaries, strict=True)
        ]
        self._pool.hints[name] = self._allocator.pin(name, need.least if need else None, lane_hint).id
        for worker in workers:
            site.tasks.start_soon(worker.run, site.registry, site.gate)
        self._pool.add(workers)
        self._models[checkpoint] = name
        return name

    def _name(self, checkpoint: str) -> str:
        """Return what a checkpoint is called: its file's or folder's name, with a number where that is taken."""
        stem = Path(checkpoint).name.removesuffix(".gguf") or "model"
        taken = set(self._models.values())
        return stem if stem not in taken else next(name for n in count(2) if (name := f"{stem}-{n}") not in taken)

    def _socket(self, lane: Lane) -> Path | None:
        if self._base.engine is not EngineKind.VLLM or self._state_dir is None:
            return None
        return socket_of(self._state_dir.resolve() / "sockets", WorkerId(lane.id))

    # Runs

    async def run(self, agent_id: str, prompt: str, *, step: Step, max_tokens: int) -> str:
        """Return what an agent answers: its thoughts too where it is to ``think``, what it says aloud where to ``act``.

        ``think`` runs no tool; ``plan`` and ``act`` do. ``act`` is "" where the agent waits. Runs of one agent are done
        in their order.

        Raises:
            UnknownAgent: it is not registered.
            InferenceFailed: there is no answer.
            EngineClosed: it was shut down.
        """
        if step not in ("think", "plan", "act"):
            raise ValueError(f"step: {step!r} is none; give 'think', 'plan' or 'act'")
        await self._started()
        agent = self._agents.get(agent_id)
        if agent is None:
            raise UnknownAgent(agent_id)
        request = Request(
            job_name=agent_id,
            system=self._system,
            conversation=user_conversation(prompt),
            params={"max_tokens": max_tokens},
            tools=() if step == "think" else self._tools,
            markup=True,
            is_watched=False,
            frame=BiosFrame(words=seed_words(self._base.bios), context="", now=self._began),
        )
        async with agent.turn:
            answer = await self._ask(agent, request)
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
                        self.run(each["agent_id"], each["prompt"], step=each["step"], max_tokens=each["max_tokens"])
                    )
                    for each in requests
                ]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in running]

    async def _ask(self, agent: _Agent, request: Request) -> Answer:
        place: int | None = None
        last, patience = "", Patience()
        while not self._is_closed:
            place, seat = await self._turnstile.enter(agent.model, again=place)
            if last and seat.worker.spec.id != last:
                self._readers.tell(self._news.moved(agent.id, last, seat.worker))
            last = seat.worker.spec.id
            answer, outcome = await self._attempt(agent, request, seat)
            match outcome:
                case Completed():
                    return answer
                case EngineFailed():
                    pause_s = patience.pause_s(outcome, time.monotonic(), self._base.timeouts.refusal_s)
                    if pause_s is None:
                        reason = FailureReason.POISONED if outcome.brought_down else outcome.reason
                        raise InferenceFailed(agent.id, reason, outcome.detail)
                    await asyncio.sleep(pause_s)
                case RequestFailed():
                    raise InferenceFailed(agent.id, outcome.reason, outcome.detail)
                case Cancelled():
                    break  # by the shutdown
        raise EngineClosed(CLOSED)

    async def _attempt(self, agent: _Agent, request: Request, seat: Seat) -> tuple[Answer, Outcome]:
        answer = Answer(time.monotonic)
        worker, began = seat.worker, time.monotonic()
        gpu = _device(worker)
        self._write(INFER_START, agent=agent.id, gpu=gpu, prompt_len=len(request.conversation[0].content))
        try:
            with seat.lease:
                outcome = await worker.perform(request, answer)
        finally:
            self._turnstile.look()
        self._write(
            INFER_DONE,
            agent=agent.id,
            gpu=gpu,
            tokens_out=answer.output_tokens,
            latency_ms=round((time.monotonic() - began) * 1000, 3),
            outcome=type(outcome).__name__.lower(),
        )
        return answer, outcome

    # Events

    async def events(self) -> AsyncIterator[News]:
        """Yield what happens to lanes and agents until ``shutdown``; a reader that lags loses the oldest."""
        await self._started()
        async for news in self._readers.follow():
            yield news

    def _write(self, event: str, **about: object) -> None:
        if self._log is not None:
            self._log.write({"event": event, "time": time.time(), **about})

    def _note_swap(self, swap: Swap) -> None:
        self._readers.tell(
            News(
                event="swap", time=time.time(), lane=swap.lane, model=swap.model, left=swap.left,
                because=swap.because, seconds=swap.seconds,
            )
        )  # fmt: skip

    def _changed(self, worker: SupervisedWorker) -> None:
        self._pool.take_change(worker)
        for news in self._news.take_change(worker):
            self._readers.tell(news)
        self._turnstile.look()

    # Life

    async def shutdown(self) -> None:
        """End all runs and engines; when it returns, no process is left, and all events are on the disk."""
        async with self._starting:
            if self._is_closed:
                return
            self._is_closed = True
            self._pool.close()
            self._turnstile.fail_all(lambda: EngineClosed(CLOSED))
            if self._site is not None:
                await self._site.end()
            self._readers.close()
            if self._log is not None:
                await asyncio.to_thread(self._log.close)

    async def _started(self) -> Site:
        async with self._starting:
            if self._is_closed:
                raise EngineClosed(CLOSED)
            if self._site is None:
                self._site = await Site.open(self._pool, self._state_dir)
            return self._site


def _check(spec: WorkerSpec) -> None:
    """Return if the program and the file of an engine are there, as far as that can be told.

    Raises:
        InvalidSpec: they are not.
    """
    program = command_for(spec, os.environ).argv[0]
    if shutil.which(program) is None:
        raise InvalidSpec(f"command: no such program: {program!r}")
    checkpoint = Path(str(spec.model))
    is_path = checkpoint.is_absolute() or checkpoint.suffix == ".gguf"  # else it may be the id of a repository
    if is_path and not spec.command and not checkpoint.exists():
        raise InvalidSpec(f"model_ckpt: there is no {checkpoint}")


def _said(answer: Answer, step: Step) -> str:
    if step == "act":
        return read_markup(answer.text).words
    if step == "plan":
        return without_thinking(answer.text)
    return f"<thinking>{answer.reasoning}</thinking>\n{answer.text}" if answer.reasoning else answer.text


def _device(worker: SupervisedWorker) -> str:
    return worker.spec.lane.device.uuid if worker.spec.lane is not None else ""


def _cache_flags(engine: EngineKind, *, is_on: bool) -> dict[str, Flag]:
    if engine is not EngineKind.VLLM:
        return {}
    return {"enable-prefix-caching": True} if is_on else {"no-enable-prefix-caching": True}


def _cache_params(engine: EngineKind, *, is_on: bool) -> dict[str, Any]:
    return {} if engine is EngineKind.VLLM else {"cache_prompt": is_on}
