"""A whole node in this process, on the virtual loop, with one scripted engine of 16 slots and no failures."""

import tempfile
from argparse import Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import TypeVar

import anyio

from service.config.source import LoadedConfig
from service.config.workers import worker_specs
from service.node.node import Node, open_node
from tests.harness.simulated_node import Disk, Plan, TalkingEngine, World, simulated
from tests.harness.virtual_loop import VirtualLoop
from tests.harness.virtual_machine import EngineProcess, Machine

T = TypeVar("T")
QUIET = Plan(
    models=1, replicas=1, slots=16, jobs=0, policy="critical_path", deaths_a_minute=0, breaks="", killers=0, cancels=0,
    bad_commits=0, lives=1, load_s=0, interval_s=0,
)  # fmt: skip


def on_node(scenario: Callable[[Node, LoadedConfig], Awaitable[T]]) -> T:
    """Run a scenario on a node whose engine answers at once."""
    chance = Random(1)  # noqa: S311
    loop = VirtualLoop(chance)

    def make(process: EngineProcess, options: Namespace) -> TalkingEngine:
        return TalkingEngine(process, options, world)

    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(loop, chance, make)
        world = World(1, Path(folder), chance, QUIET, machine, Disk(chance))

        async def run() -> T:
            config = world.config()
            specs = worker_specs(config, world.folder, world.folder)
            async with open_node(config, specs, world.folder) as node, anyio.create_task_group() as tasks:
                await node.intake.claim_first()
                tasks.start_soon(node.intake.run)
                await node.fleet.wait_ready()
                result = await scenario(node, LoadedConfig(config=config, specs=specs))
                await node.shut_down(0, anyio.Event())
                tasks.cancel_scope.cancel()
            return result

        with simulated(world, checks=False):
            return anyio.run(run, backend_options={"loop_factory": lambda: loop})
