"""Weights of a model whose workers join, leave and are replaced (specification, "Reload" and "Weight versions")."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from tests.faults.test_weights import PROGRAM, _write_checkpoint, is_over, limits_of
from tests.faults.test_worker import ask
from tests.harness.ports import find_ports
from tests.harness.waiting import LIMIT_S, wait_until
from tests.harness.working import QUICK
from workers.fleet import Fleet
from workers.policy.weight_update import UpdateState
from workers.spec import EngineKind, WorkerId, WorkerSpec, WorkerTimeouts
from workers.weights.update import UpdateRequest


def specs_of(folder: Path, port: int, count: int, **changes: object) -> list[WorkerSpec]:
    first = WorkerSpec(
        engine=EngineKind.VLLM,
        id=WorkerId("m-0"),
        name="m",
        model=str(folder / "launched"),
        port=port,
        command=(sys.executable, "-I", "-S", str(PROGRAM)),
        args={"fault-file": str(folder / "fault")},
        timeouts=WorkerTimeouts(start_s=LIMIT_S, stop_grace_s=LIMIT_S),
        restart=QUICK,
        weights=limits_of(),
        **changes,  # type: ignore[arg-type]
    )
    return [replace(first, id=WorkerId(f"m-{number}"), port=port + number) for number in range(count)]


@pytest.mark.system
async def test_workers_that_join_have_the_weights_of_the_model(tmp_path: Path) -> None:
    """More replicas join, then others replace them; the next update includes all present."""
    for name in ("launched", "one", "two"):
        _write_checkpoint(tmp_path / name)
    port = find_ports(3)
    fleet = Fleet(specs_of(tmp_path, port, 2), os.environ, tmp_path / "state")

    async def settled(count: int) -> None:
        is_so: Callable[[], bool] = lambda: not fleet.roster.under_way and len(list(fleet)) == count  # noqa: E731
        await wait_until(is_so, f"there are {count} workers as wanted")

    async def check(text: str, version: int) -> None:
        for worker in fleet:
            assert (await ask(worker))[1] == text
            assert worker.weights is not None
            assert worker.weights.version == version

    with anyio.fail_after(3 * LIMIT_S):
        async with fleet.running():
            await fleet.wait_ready()
            weights = fleet.weights["m"]
            await weights.update(UpdateRequest(checkpoint=str(tmp_path / "one")))
            await is_over(weights)
            fleet.roster.want(specs_of(tmp_path, port, 3))
            await settled(3)
            await check("one", 1)
            fleet.roster.want(specs_of(tmp_path, port, 2, context=8192))
            await settled(2)
            assert fleet.weights["m"] is weights
            await check("one", 1)
            update = await weights.update(UpdateRequest(checkpoint=str(tmp_path / "two")))
            await is_over(weights)
            assert (update.state, len(update.shares)) == (UpdateState.COMPLETED, 2)
            await check("two", 2)
