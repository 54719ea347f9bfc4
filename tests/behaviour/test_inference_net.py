"""What callers of ``InferenceEngine`` get is frozen: answers, order, errors, retries, statistics, pins and caches.

The frozen file changes only in a commit of its own: ``RENEW_FROZEN=1 pytest tests/behaviour/test_inference_net.py``.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from roundhouse import InferenceEngine, InferenceFailed, InferenceRequest, replay
from tests.behaviour.test_inference_engine import processes
from tests.harness.adapted import vllm
from tests.harness.agents import LIMIT, engine, say
from tests.harness.frozen import frozen_text
from tests.harness.service import recorded
from tests.harness.waiting import wait_until
from workers.policy.restart import RestartPolicy
from workers.spec import WorkerTimeouts

HOLD = {"hold": r"HOLD=(\S+?)!", "echo": r"SAY=\w+"}


@pytest.fixture(autouse=True)
def _starts_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RestartPolicy, "delay_s", lambda *_: 0.05)


async def ending(run: Awaitable[object]) -> str:
    """Return the answer, or the text of the error."""
    try:
        return repr(await run)
    except InferenceFailed as error:
        return f"{error.reason} {error}"


def frozen(scenario: str, *lines: object) -> None:
    now = "".join(f"{line}\n" for line in lines)
    assert now == frozen_text(f"inference/{scenario}.txt", now)


def starts_and_ends(log: Path) -> list[str]:
    """Return the attempts in the order of the log, with their outcomes."""
    return [f"{each['agent']} {each['lane']} {each.get('outcome', 'starts')}" for each in replay(log)]


async def test_the_timeline_of_the_founding_document_is_frozen(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """Three agents on two slots, each queued again at its end: the turns end as document 004 says."""
    log, game = tmp_path / "log", engine(free_ports(1), count=1, slots=2, flags=HOLD, event_log=tmp_path / "log")
    lines: list[object] = []
    async with asyncio.timeout(LIMIT), game:
        for name in ("A1", "A2", "A3"):
            await game.register_agent(agent_id=name, model_ckpt="town")

        async def play(name: str) -> None:
            for number in range(3):
                await say(game, name, f"HOLD={tmp_path}/{name}T{number}!")

        players = [asyncio.create_task(play(name)) for name in ("A1", "A2", "A3")]
        started = 2
        for ended in ("A1T0", "A2T0", "A3T0", "A1T1", "A3T1", "A2T1", "A1T2", "A3T2", "A2T2"):
            await wait_until(lambda count=started: len(_starts(log)) == count, f"{started} before {ended}")  # type: ignore[misc]
            lines.append(f"{' '.join(_starts(log))}: {game.status().models['town'].waiting} waits, {ended} ends")
            (tmp_path / ended).touch()
            started = min(9, started + 1)
        await asyncio.gather(*players)
    frozen("timeline", *lines)


def _starts(log: Path) -> list[str]:
    return [each["agent"] for each in replay(log) if each["event"] == "EVENT_INFER_START"] if log.exists() else []


async def test_pins_and_caches_are_frozen(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Where checkpoints are loaded first, with and without a hint, and whether engines cache prompts."""
    game = engine(free_ports(3), count=3)
    async with asyncio.timeout(LIMIT), game:
        for number, hint in enumerate((None, 2, None, None, 0, None)):
            await game.register_agent(agent_id=f"a{number}", model_ckpt=f"m{number}", lane_hint=hint)
        pins = {name: model.hint for name, model in game.status().models.items()}
    kept: list[object] = []
    for is_on in (True, False):
        record, before = tmp_path / f"record{is_on}", processes()
        asked = engine(free_ports(1), count=1, flags={"record": str(record)}, prefill_cache=is_on)
        other = vllm(free_ports, tmp_path, count=1, prefill_cache=is_on)
        async with asyncio.timeout(LIMIT), asked, other:
            for each in (asked, other):
                await each.register_agent(agent_id="a", model_ckpt="m")
                await say(each, "a")
            commands = [psutil.Process(pid).cmdline() for pid in processes() - before]
        flags = {flag for command in commands for flag in command if "prefix-caching" in flag}
        kept.append(f"{is_on}: {[each.get('cache_prompt') for each in recorded(record)]} {sorted(flags)}")
    frozen("pins_and_caches", *pins.items(), *kept)


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
async def test_retries_and_their_order_are_frozen(
    policy: Any,  # noqa: ANN401
    tmp_path: Path,
    free_ports: Callable[[int], int],
) -> None:
    """A run whose engine dies keeps its place, before those that came later; its caller gets one answer."""
    flags = {**HOLD, "die-on": "DEADLY", "die-once": str(tmp_path / "died")}
    log, game = tmp_path / "log", engine(free_ports(1), count=1, flags=flags, event_log=tmp_path / "log",
                                         scheduler_policy=policy)  # fmt: skip
    told: list[str] = []
    async with asyncio.timeout(LIMIT), game:

        async def follow() -> None:
            async for news in game.events():
                told.append(f"{news['event']} {news.get('agent', '')}")  # noqa: PERF401 - read as it comes

        following = asyncio.create_task(follow())
        for name in ("a", "b", "c"):
            await game.register_agent(agent_id=name, model_ckpt="m")
        runs = [say(game, "a", f"DEADLY HOLD={tmp_path}/go! SAY=a"), say(game, "b", "SAY=b"), say(game, "c", "SAY=c")]
        tasks = [asyncio.create_task(run) for run in runs]
        await wait_until(lambda: log.exists() and len(starts_and_ends(log)) >= 2, "the first has begun")
        (tmp_path / "go").touch()
        answers = await asyncio.gather(*tasks)
    await following
    frozen(f"retries_{policy}", *answers, *starts_and_ends(log), *told)


REFUSED = {"code": 400, "type": "invalid_request_error", "message": "no"}
TOO_LONG = {"code": 400, "type": "exceed_context_size_error", "message": "too long"}
SHORT = {"timeouts": WorkerTimeouts(refusal_s=0.5)}
FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "poisoned": ({"die-on": "BAD"}, {"count": 2}),
    "rejected": ({"reject": 400, "reject-on": "BAD", "reject-body": json.dumps({"error": REFUSED})}, {}),
    "overflow": ({"reject": 400, "reject-on": "BAD", "reject-body": json.dumps({"error": TOO_LONG})}, {}),
    "refused": ({"reject": 500, "reject-on": "BAD"}, SHORT),
    "later": ({"reject": 503, "reject-on": "BAD", "retry-after": 1}, SHORT),
    "soon": ({"reject": 500, "reject-on": "BAD", "reject-first": 2}, {}),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_failures_are_frozen(fault: str, tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """The text of the error, and whether it is retried.

    The next run works; one that runs out of time gets the reason.
    """
    flags, fields = FAULTS[fault]
    first = free_ports(fields.get("count", 1))
    log, game = tmp_path / "log", engine(first, flags=flags, event_log=tmp_path / "log", **{"count": 1, **fields})
    async with asyncio.timeout(2 * LIMIT), game:
        for name in ("a", "b"):
            await game.register_agent(agent_id=name, model_ckpt="m")
        lines = [await ending(say(game, "a", "BAD"))]
        lines.append(await ending(say(game, "b")))
        lines.append((await ending(say(game, "a", deadline_s=0.0))).partition(":")[0])
    outcomes = [each["outcome"] for each in replay(log) if each["agent"] == "a" and "outcome" in each]
    lines.append(f"{sorted(set(outcomes))} {len(outcomes) if fault in ('poisoned', 'soon', 'later') else 'tries'}")
    frozen(f"failures_{fault}", *(re.sub(rf"{first}|{first + 1}", "PORT", line) for line in lines))


async def test_a_failed_batch_is_frozen(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """The first run that fails ends the others; a batch without a failure has its answers in order."""
    flags, _ = FAULTS["rejected"]
    game = engine(free_ports(1), count=1, flags={**flags, **HOLD})
    words = ("SAY=first", "BAD", f"HOLD={tmp_path}/never!")
    async with asyncio.timeout(LIMIT), game:
        for name in ("a", "b"):
            await game.register_agent(agent_id=name, model_ckpt="m")
        lines = [
            await ending(
                game.batch_run(
                    [
                        InferenceRequest(agent_id=name, prompt=each, step="act", max_tokens=5)
                        for name, each in zip(names, order, strict=True)
                    ]
                )
            )
            for names, order in (("abb", words), ("aba", ("SAY=1", "SAY=2", "SAY=3")))
        ]
        lines.append(f"{game.status().models['m'].waiting} wait")
    frozen("batch", *lines)


async def test_statistics_are_frozen(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """The fields of the event log with their types, and the status; no emulated answer arrives before its time."""
    log = tmp_path / "log"
    flags = {"interval": 0.02, "prefill": 0.05}
    game: InferenceEngine = engine(free_ports(1), count=1, flags=flags, event_log=log, emulate_latency=True)
    async with asyncio.timeout(LIMIT), game:
        await game.register_agent(agent_id="a", model_ckpt="m")
        await game.register_agent(agent_id="b", model_ckpt="m2")
        await asyncio.gather(say(game, "a"), say(game, "b"))
        status = game.status()
    events = list(replay(log))
    kinds = {f"{each['event']} " + " ".join(f"{k}:{type(v).__name__}" for k, v in each.items()) for each in events}
    done = [each for each in events if "outcome" in each]
    assert all(each["latency_ms"] >= each["predicted_ms"] > each["swap_ms"] > 0 for each in done)
    seen = {lane.lane: (lane.device, lane.resident, lane.sick, lane.lacking) for lane in status.lanes}
    models = [(name, each.waiting, each.has_room, each.is_lost, each.hint) for name, each in status.models.items()]
    counted = [(each["agent"], each["tokens_out"], each["tools_ms"], each["outcome"]) for each in done]
    frozen("statistics", *sorted(kinds), *counted, seen, *models, status.last_lanes, status.sick)
