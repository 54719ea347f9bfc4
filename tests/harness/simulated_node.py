"""One whole node in one deterministic process: all our code is real, and a seed draws the events.

The loop's time is virtual, connections are in memory, engines are scripted processes of an invented machine, and the
store's thread alternates with the loop. Engines die, hang and refuse; commits fail, some of them after they were done;
jobs are cancelled; the node is stopped and killed, and restarts on its files.

    PYTHONHASHSEED=0 python -m tests.harness.simulated_node SEED [SEED ...]
"""

import argparse
import asyncio
import os
import random
import re
import sqlite3
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any
from unittest.mock import patch

import anyio
import anyio.to_thread

from service.config.schema import Config
from service.config.workers import worker_specs
from service.conversations.job.job import JobId
from service.conversations.job.states import ENDED_JOBS, JobState
from service.errors import ServiceError, StoreUnavailable
from service.node import node as node_module
from service.node.node import Node, open_node
from service.scheduling.core import events
from service.scheduling.core.decide import SchedulingCore
from service.store import writer
from service.store.databases.sqlite import FILE_NAME, WRITER_PRAGMAS, SqliteConnection, SqliteDatabase
from service.store.records import Record
from service.store.store import Store
from tests.harness.neutral_words import digest_of, line_of
from tests.harness.virtual import pass_time
from tests.harness.virtual_loop import Stuck, TakingTurns, VirtualLoop
from tests.harness.virtual_machine import EngineProcess, Machine, ScriptedEngine
from workers.engine import incarnation, start_address
from workers.health import probes
from workers.process import child

PRAGMAS = tuple(each.replace("synchronous=FULL", "synchronous=OFF") for each in WRITER_PRAGMAS)  # no power is lost here
CALM_AT_S = 240.0  # from when on nothing more happens
END_S = 3600.0  # by when all jobs have ended
KILLER = "POISON"
SAID = re.compile(r"agent=(\w+)")
JOB_ID = re.compile(r"\bjob-[0-9a-f]{16}\b")
TOPIC = re.compile(r"topic=(\w+)")
ON_THE_WAY_S = 0.01  # how long an engine may write on after its client has gone
Place = tuple[str, str, int]  # topic, agent, round


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The events of a run."""

    models: int
    replicas: int
    slots: int
    jobs: int
    policy: str
    deaths_a_minute: float  # kills of engines from outside
    breaks: str  # how engines break by themselves, as a flag of the scripted engine
    killers: int  # jobs with a conversation that brings its engine down
    cancels: float  # share of jobs that are cancelled
    bad_commits: float  # share of failed commits in a bad minute
    lives: int  # starts of the node
    load_s: float
    interval_s: float

    @classmethod
    def drawn(cls, chance: Random) -> "Plan":
        def sometimes(value: Any, otherwise: Any) -> Any:  # noqa: ANN401
            return value if chance.random() < 0.4 else otherwise

        return cls(
            models=chance.randint(1, 2),
            replicas=chance.randint(1, 2),
            slots=chance.randint(1, 3),
            jobs=chance.randint(2, 5),
            policy=chance.choice(("fifo", "progress", "critical_path")),
            deaths_a_minute=sometimes(chance.uniform(0.5, 4), 0.0),
            breaks=sometimes(chance.choice(("chance=0.01:hang", "chance=0.05:refuse", "age=40:exit")), ""),
            killers=sometimes(1, 0),
            cancels=sometimes(0.3, 0.0),
            bad_commits=sometimes(0.5, 0.0),
            lives=chance.randint(1, 4),
            load_s=chance.uniform(0, 3),
            interval_s=chance.choice((0.05, 0.2, 1.0)),
        )


class Disk:
    """Decides whether commits succeed: the store sees nothing else of a disk."""

    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self.bad = 0.0  # how many commits of a bad time fail
        self.is_dead = False  # as with the process that wrote there

    def commit(self, really: Callable[[], None]) -> None:
        if self.is_dead:
            raise sqlite3.ProgrammingError("the process was killed")
        is_bad = self._chance.random() < self.bad
        if not is_bad or self._chance.random() < 0.5:
            really()
        if is_bad:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error


class FaultyConnection(SqliteConnection):
    """A connection whose commits are those of a faulty disk."""

    disk: Disk

    def commit(self) -> None:
        self.disk.commit(super().commit)


class FaultyDatabase(SqliteDatabase):
    """The database on that disk."""

    def __init__(self, path: Path, disk: Disk) -> None:
        super().__init__(path)
        self.disk = disk

    def prepare(self) -> None:
        if not self._path.exists():  # digests must not depend on the number of migrations: each commit draws
            SqliteDatabase(self._path).prepare()
        super().prepare()

    def connect_writer(self) -> SqliteConnection:
        made = FaultyConnection(self._path, PRAGMAS, "BEGIN IMMEDIATE")
        made.disk = self.disk
        return made


class TalkingEngine(ScriptedEngine):
    """Gives each turn a unique answer, and keeps complete answers."""

    def __init__(self, process: EngineProcess, options: Namespace, world: "World") -> None:
        super().__init__(process, options)
        self._world = world
        self._said = 0

    async def _stream(self, request: dict[str, Any], writer: asyncio.StreamWriter, slot: dict[str, Any]) -> None:
        place = place_of(request)
        with self._world.asking(place):
            await super()._stream(request, writer, slot)
            self._world.said.setdefault(place, set()).add(" ".join(self._words(request)).replace("  ", " ").strip())

    def _words(self, request: dict[str, Any]) -> list[str]:
        topic, agent, number = place_of(request)
        tokens = 1 + (len(topic) * 7 + len(agent) * 3 + number) % 6
        return [f"{topic}.{agent}.{number}.{self.process.pid}.{each} " for each in range(tokens)]


def place_of(request: dict[str, Any]) -> Place:
    """Return the turn of a request."""
    messages = request["messages"]
    text = " ".join(str(message["content"]) for message in messages)
    topic, agent = TOPIC.search(text), SAID.search(text)
    if topic is None or agent is None:
        return "", "", 0  # a canary
    return topic[1], agent[1], sum(message["role"] == "assistant" for message in messages)


@dataclass(slots=True)
class Posted:
    """One job: its request, and its result."""

    document: dict[str, Any]
    key: str
    is_killer: bool
    id: JobId | None = None
    is_cancelled: bool = False


@dataclass(slots=True)
class World:
    """One run."""

    seed: int
    folder: Path
    chance: Random
    plan: Plan
    machine: Machine
    disk: Disk
    faults: list[str] = field(default_factory=list)
    said: dict[Place, set[str]] = field(default_factory=dict)
    trace: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # events and actions of the core, and records, in neutral words
    counts: Counter[str] = field(default_factory=Counter)
    _asking: Counter[Place] = field(default_factory=Counter)
    jobs: list[Posted] = field(default_factory=list)

    @property
    def now(self) -> float:
        return self.machine.loop.time() - 1000.0

    @property
    def digest(self) -> str:
        """A digest of the core's input and output and of the records; jobs appear as numbers."""
        text = "\n".join(self.lines)
        for number, name in enumerate(dict.fromkeys(JOB_ID.findall(text))):
            text = text.replace(name, f"j{number}")
        return digest_of([text])

    def note(self, what: str) -> None:
        self.trace.append(f"{self.now:9.3f} {what}".replace(str(self.folder), "FOLDER"))

    @contextmanager
    def asking(self, place: Place) -> Iterator[None]:
        """Record a turn that an engine is asked; no other engine may be asked it meanwhile."""
        self._asking[place] += 1
        self.note(f"{place} is asked")
        if place[0] and self._asking[place] > 1:
            self.machine.loop.call_later(ON_THE_WAY_S, self._see_alone, place)
        try:
            yield
        finally:
            self._asking[place] -= 1
            self.note(f"{place} is asked no more")

    def _see_alone(self, place: Place) -> None:
        if self._asking[place] > 1:
            self.faults.append(f"{place} is asked twice at once")

    # Configuration and jobs

    def config(self) -> Config:
        options: dict[str, object] = {"load": self.plan.load_s, "interval": self.plan.interval_s}
        options |= {"die-on": KILLER} | ({"breaks": self.plan.breaks} if self.plan.breaks else {})
        return Config.model_validate(
            {
                "server": {"state_dir": str(self.folder)},
                "scheduling": {"policy": self.plan.policy},
                "models": {
                    f"m{number}": {
                        "engine": "llama-server",
                        "command": [sys.executable],
                        "args": options,
                        "port": 20_000 + 100 * number,
                        "replicas": self.plan.replicas,
                        "slots": self.plan.slots,
                        "restart": {"initial_s": 0.5, "max_s": 5, "failures": 50},
                    }
                    for number in range(self.plan.models)
                },
            }
        )

    def draw_jobs(self) -> None:
        for number in range(self.plan.jobs):
            is_killer = number < self.plan.killers
            agents = self.chance.randint(1, 3)
            mode = "free" if self.chance.random() < 0.2 else "rounds"
            document = {
                "name": f"j{number}",
                "mode": mode,
                "agents": [
                    {
                        "id": f"a{each}",
                        "role": "participant",
                        "model": f"m{self.chance.randrange(self.plan.models)}",
                        "system": f"You are agent=a{each} of topics.",
                        "speak_after_within_round": self._draw_waits(each) if mode == "rounds" else [],
                        "visible_to": self._draw_readers(agents),
                    }
                    for each in range(agents)
                ],
                "conversations": [
                    {
                        "id": f"c{each}",
                        "prompt": f"Talk of topic=j{number}c{each} now." + (KILLER if is_killer and not each else ""),
                        "rounds": self.chance.randint(1, 3),
                    }
                    for each in range(self.chance.randint(1, 4))
                ],
            }
            self.jobs.append(Posted(document=document, key=f"key-{number}", is_killer=is_killer))

    def _draw_waits(self, agent: int) -> list[str]:
        return [f"a{agent - 1}"] if agent and self.chance.random() < 0.5 else []

    def _draw_readers(self, agents: int) -> list[str] | None:
        is_open = self.chance.random() < 0.5
        return None if is_open else [f"a{each}" for each in range(agents) if self.chance.random() < 0.3]

    # What happens

    async def run(self) -> None:
        self.draw_jobs()
        ends = sorted(self.chance.uniform(1, CALM_AT_S) for _ in range(self.plan.lives - 1))
        for until in [*ends, END_S]:
            await self._live(until)
        if self.machine.running:
            self.faults.append(f"{len(self.machine.running)} processes are left")

    async def _live(self, until: float) -> None:
        config = self.config()
        is_last, is_killed = until == END_S, self.chance.random() < 0.5
        specs = worker_specs(config, self.folder, self.folder)
        self.note("a life begins")
        self.counts["lives"] += 1
        self.disk.is_dead, self.disk.bad = False, 0.0
        try:
            async with open_node(config, specs, self.folder) as node, anyio.create_task_group() as tasks:
                await node.intake.claim_first()
                tasks.start_soon(node.intake.run)
                tasks.start_soon(node.callers.run)
                with anyio.move_on_after(until - self.now):
                    async with anyio.create_task_group() as happening:
                        happening.start_soon(self._happen, node)
                        await self._post_all(node)
                        await self._wait_ended(node)
                        happening.cancel_scope.cancel()
                if is_last:
                    await self._audit(node)
                    self.disk.bad = 0.0
                if is_killed and not is_last:
                    self.note("the node is killed")
                    self.disk.is_dead = True
                    for process in self.machine.running:
                        process.kill()
                else:
                    self.note("the node is stopped")
                    await node.shut_down(self.chance.choice((0.0, 5.0)), anyio.Event())
                tasks.cancel_scope.cancel()
        except BaseException as error:
            if not self.disk.is_dead:
                raise
            self.note(f"the dead life ends: {type(error).__name__}")

    async def _post_all(self, node: Node) -> None:
        for job in self.jobs:
            await pass_time(self.chance.uniform(0, 20))
            while True:
                try:
                    stored, _ = await node.door.post(job.document, job.key)
                except StoreUnavailable as error:
                    self.note(f"not taken: {error}")
                    await pass_time(1)
                    continue
                break
            if job.id not in (None, stored.id):
                self.faults.append(f"{job.key} was job {job.id} and is {stored.id}")
            job.id = stored.id
            self.note(f"{job.key} is there")

    async def _happen(self, node: Node) -> None:
        """Apply the drawn events to the node and its engines, until it is calm."""
        while self.now < CALM_AT_S:
            await pass_time(self.chance.expovariate(1.0))
            dice = self.chance.random()
            running = self.machine.running
            if running and dice < self.plan.deaths_a_minute / 60:
                self.note("an engine is killed")
                self.counts["killed engines"] += 1
                self.chance.choice(running).kill()
            if self.chance.random() < 0.05:
                self.disk.bad = 0.0 if self.disk.bad else self.plan.bad_commits
                self.counts["bad times of the disk"] += bool(self.disk.bad)
            open_jobs = [job for job in self.jobs if job.id is not None and not job.is_cancelled]
            if open_jobs and self.chance.random() < self.plan.cancels / 60:
                job = self.chance.choice(open_jobs)
                job.is_cancelled = True  # even if it is not known to be
                self.note(f"{job.key} is cancelled")
                self.counts["cancels"] += 1
                assert job.id is not None
                try:
                    await node.jobs.cancel(job.id)
                except ServiceError as error:
                    self.note(f"not cancelled: {error}")
        self.disk.bad = 0.0
        for process in self.machine.running:
            process.engine.options.breaks = None

    async def _wait_ended(self, node: Node) -> None:
        while True:
            await pass_time(5)
            views = []
            for job in self.jobs:
                assert job.id is not None
                try:
                    views.append(await node.jobs.get(job.id))
                except ServiceError:
                    break
            if len(views) == len(self.jobs) and all(view.stored.state in ENDED_JOBS for view in views):
                return

    # What must hold

    async def _audit(self, node: Node) -> None:
        for job in self.jobs:
            if job.id is None:
                self.faults.append(f"{job.key} was never taken")
                continue
            stored = (await node.jobs.get(job.id)).stored
            self.counts[f"jobs {stored.state}"] += 1
            if stored.state not in ENDED_JOBS:
                self.faults.append(f"{job.key} is {stored.state}")
                continue
            if stored.state is not JobState.COMPLETED and not (job.is_cancelled or job.is_killer):
                self.faults.append(f"{job.key} is {stored.state}")
            for conversation in job.document["conversations"]:
                await self._audit_conversation(node, job, conversation)
        for model in {agent["model"] for job in self.jobs for agent in job.document["agents"]}:
            free, total = node.scheduler.view.free(model), sum(w.slots.total for w in node.fleet.workers_of(model))
            if free > total:
                self.faults.append(f"{model}: {free} slots of {total} are free")

    async def _audit_conversation(self, node: Node, job: Posted, conversation: dict[str, Any]) -> None:
        assert job.id is not None
        told: Any = await node.jobs.transcript(job.id, conversation["id"])
        places = Counter((turn["agent"], turn["round"]) for turn in told["turns"])
        self.counts["turns"] += len(places)
        if doubled := [place for place, count in places.items() if count > 1]:
            self.faults.append(f"{job.key} {conversation['id']}: {doubled} stand twice")
        whole = {(agent["id"], number) for agent in job.document["agents"] for number in range(conversation["rounds"])}
        if places.keys() != whole:
            self.faults.append(f"{job.key} {conversation['id']}: {sorted(whole ^ places.keys())}")
        for turn in told["turns"]:
            self.counts["attempts"] += len(turn["attempts"])
            if turn["state"] == "completed":
                place = conversation["prompt"].split("topic=")[1].split()[0], turn["agent"], turn["round"]
                if turn["text"].strip() not in self.said.get(place, set()):
                    self.faults.append(f"{place} is stored as {turn['text']!r}, and nobody has said that")
            elif turn["state"] == "failed" and KILLER not in conversation["prompt"]:
                self.faults.append(
                    f"{job.key} {conversation['id']} {turn['agent']}: {turn['reason']}: {turn['detail']}"
                )


@contextmanager
def simulated(world: World, *, checks: bool = True) -> Iterator[None]:
    """Run the service with the invented machine, disk and virtual time for a block; check its core on request."""
    loop, chance = world.machine.loop, world.chance

    async def run_here(function: Callable[..., Any], *arguments: object, **_: object) -> Any:  # noqa: ANN401
        await anyio.lowlevel.checkpoint()
        return function(*arguments)

    @contextmanager
    def open_faulty(*_: object) -> Iterator[FaultyDatabase]:
        database = FaultyDatabase(world.folder / FILE_NAME, world.disk)
        database.prepare()
        yield database

    turns = TakingTurns(loop, lambda: chance.uniform(0.0005, 0.01))
    replaced: Sequence[tuple[ModuleType | type, str, object]] = (
        (time, "monotonic", loop.time),
        (anyio.to_thread, "run_sync", run_here),
        (writer, "threading", turns),
        (writer, "queue", turns),
        (node_module, "open_database", open_faulty),
        (child, "GuardianLink", world.machine.guardian_type()),
        (probes, "look_at_tree", world.machine.look_at_tree),
        (start_address, "_port_fault", world.machine.port_fault),
        (incarnation, "count_oom_kills", lambda: 0),
        (random, "_urandom", chance.randbytes),  # what ids and keys are made of
        (SchedulingCore, "handle", checking(world) if checks else SchedulingCore.handle),
        (Store, "append_nowait", recording(world) if checks else Store.append_nowait),
    )
    with ExitStack() as stack:
        for owner, name, instead in replaced:
            stack.enter_context(patch.object(owner, name, instead))
        yield


def checking(world: World) -> Callable[..., list[events.Action]]:
    """Return a ``SchedulingCore.handle`` that checks the core's tables after each call."""
    handle = SchedulingCore.handle

    def handle_and_check(core: SchedulingCore, *told: events.Event) -> list[events.Action]:
        actions = handle(core, *told)
        world.counts["events"] += len(told)
        world.faults += [f"{fault}, after {told}" for fault in core.check() if fault]
        world.lines += [f"> {line_of(each)}" for each in told] + [f"< {line_of(each)}" for each in actions]
        if told or actions:
            world.note(f"{[type(each).__name__ for each in told]} -> {[type(each).__name__ for each in actions]}")
        return actions

    return handle_and_check


def recording(world: World) -> Callable[..., None]:
    """Return a ``Store.append_nowait`` that keeps the records."""
    append = Store.append_nowait

    def note_and_append(store: Store, told: Sequence[Record], on_durable: Callable[[], None]) -> None:
        world.lines += [f"= {line_of(each)}" for each in told]
        append(store, told, on_durable)

    return note_and_append


def simulate(seed: int) -> World:
    """Run a seed's events; the result's ``faults`` are empty if all went well."""
    chance = Random(seed)  # noqa: S311
    random.seed(seed)
    loop = VirtualLoop(chance)
    machine = Machine(loop, chance, lambda process, options: TalkingEngine(process, options, world))
    with tempfile.TemporaryDirectory() as folder:
        world = World(seed, Path(folder), chance, Plan.drawn(chance), machine, Disk(chance))
        with simulated(world):
            try:
                anyio.run(world.run, backend_options={"loop_factory": lambda: loop})
            except (Exception, Stuck) as error:  # noqa: BLE001 - it is told with the seed, and with what came before
                world.faults.append("".join(traceback.format_exception(error)))
    return world


def main() -> None:
    """Run seeds, and print those that fail."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--trace", action="store_true", help="print all that has happened")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        sys.exit("set PYTHONHASHSEED=0: the order in sets of names is drawn otherwise")
    failed = 0
    for seed in options.seeds:
        began = time.perf_counter()
        world = simulate(seed)
        print(
            seed,
            world.digest,
            f"{time.perf_counter() - began:.2f} s",
            f"{world.now:.0f} s",
            dict(world.counts),
            world.plan,
        )
        if options.trace:
            print("\n".join(world.trace))
        for fault in world.faults[:20]:
            print(f"  seed {seed}: {fault}")
        failed += bool(world.faults)
    sys.exit(failed)


if __name__ == "__main__":
    main()
