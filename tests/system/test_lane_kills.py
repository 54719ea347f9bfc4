"""Lanes and agents while engines and the service are killed: the slow tests of ``tests/behaviour``."""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from roundhouse.inference.event_log import INFER_DONE, replay
from tests.behaviour.test_inference_engine import is_engine, processes
from tests.behaviour.test_lanes import TALKS, lanes_at, placed, residents, talk, turns_of
from tests.harness.agents import LIMIT, engine, say
from tests.harness.service import Service, serving
from tests.harness.waiting import is_alive, wait_for, wait_until


def test_a_killed_engine_of_a_lane_costs_no_turn(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Five kills while three models talk on two lanes: all turns complete, each once."""
    models = {name: placed(tokens=6, interval=0.02) for name in "abc"}
    with serving(tmp_path, free_ports(1), models, gpus=lanes_at(free_ports(2))) as service:
        job = service.post_job(talk("abc", rounds=3))
        for _ in range(5):
            kill_engine(service)
        assert service.wait_ended(job)["state"] == "completed"
        turns = turns_of(service, job)
        assert {turn["state"] for turn in turns} == {"completed"}
        assert any(len(turn["attempts"]) > 1 for turn in turns)  # some were on an engine that died
        assert len(turns) == 3 * 3 * TALKS


def kill_engine(service: Service) -> None:
    """Kill an engine that has a turn on it."""
    killed: list[int] = []

    def is_killed() -> bool:
        workers = service.get("/v1/workers")["workers"]
        busy = [worker["pid"] for worker in workers if worker["slots"]["in_use"] and worker["state"] == "ready"]
        with suppress(ProcessLookupError):  # it has left since
            for pid in busy[:1]:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
        return bool(killed)

    wait_for(is_killed, "a turn is on a lane")
    wait_for(lambda: not is_alive(killed[0]), "it is dead")


def test_a_job_on_lanes_goes_on_after_the_service_was_killed(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """No engine is left, and no turn is lost."""
    models = {name: placed(tokens=6, interval=0.02) for name in "abc"}
    with serving(tmp_path, free_ports(1), models, gpus=lanes_at(free_ports(2))) as service:
        job = service.post_job(talk("abc"))
        wait_for(lambda: len(residents(service)) == 2, "both lanes have a model")
        engines = service.tree()
        service.kill()
        wait_for(lambda: not any(map(is_alive, engines)), "no engine is left")
        service.start()
        assert service.wait_ended(job)["state"] == "completed"
        assert len(turns_of(service, job)) == 2 * 3 * TALKS


async def test_killed_lanes_recover_and_every_answer_is_given_once(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """Sixteen agents of three checkpoints; engines are killed while they talk."""
    log = tmp_path / "events.jsonl"
    game = engine(free_ports(2), flags={"interval": 0.02, "tokens": 5}, event_log=log)
    told: list[dict[str, Any]] = []
    async with asyncio.timeout(2 * LIMIT), game:
        for number in range(16):
            await game.register_agent(agent_id=f"a{number}", model_ckpt=f"m{number % 3}")

        async def follow() -> None:
            told.extend([event async for event in game.events()])

        following = asyncio.create_task(follow())

        async def play(agent: str) -> list[str]:
            return [await say(game, agent, f"turn {number}") for number in range(4)]

        playing = [asyncio.create_task(play(f"a{number}")) for number in range(16)]
        for _ in range(6):
            given = _given(log)
            await wait_until(lambda: any(map(is_engine, processes())), "an engine is there")
            with suppress(ProcessLookupError, StopIteration):
                os.kill(next(pid for pid in processes() if is_engine(pid)), signal.SIGKILL)
            # An answer ends the pauses before restarts, which grow with each death in a row.
            await wait_until(partial(_goes_on, log, given, playing), "another answer")
        answers = await asyncio.gather(*playing)
    await following
    assert [len(each) for each in answers] == [4] * 16
    assert {len(text.split()) for each in answers for text in each} == {5}
    kinds = {event["event"] for event in told}
    assert {"lane_dead", "agent_disconnected", "swap"} <= kinds
    assert _given(log) == 64


def _given(log: Path) -> int:
    return sum(event["event"] == INFER_DONE and event["outcome"] == "completed" for event in replay(log))


def _goes_on(log: Path, given: int, playing: Sequence[asyncio.Task[list[str]]]) -> bool:
    return _given(log) > given or all(each.done() for each in playing)
