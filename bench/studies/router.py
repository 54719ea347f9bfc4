"""Model swaps beside llama-server's own router: the same requests at the same moments, the same memory.

Six copies of the tiny model, room for two (``--models-max 2`` there, two lanes here), on the real llama-server. Loading
the tiny model takes 0.05 s there and 0.2 s here (a guardian, a proof that the last tree is gone, two measurements),
which is little beside a real one; compared are the number of loads, and whether every request is answered.

    python -m bench.studies.router --llama-server PROGRAM [--requests 200] [--rate 3]
"""

import argparse
import asyncio
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx

from roundhouse import EngineKind, InferenceEngine, WorkerSpec
from roundhouse.inference.failures import InferenceError
from tests.harness.lanes import Arrival, mixes
from workers.engine.embedded.tiny_model import ensure_tiny_model

PORT, MODELS, LANES, TOKENS = 9740, 6, 2, 24
LIMIT_S = 120.0
LOADED = "spawning server instance with name="
Ask = Callable[[str], Awaitable[bool]]


async def play(arrivals: list[Arrival], ask: Ask) -> tuple[int, list[float]]:
    """Ask at the moments of the mix; return the number not answered, and the seconds of the others."""
    began, took, failed = time.monotonic(), list[float](), 0

    async def one(at: float, model: str) -> None:
        nonlocal failed
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        asked_at = time.monotonic()
        if await ask(model):
            took.append(time.monotonic() - asked_at)
        else:
            failed += 1

    async with asyncio.TaskGroup() as tasks:
        for at, model, _ in arrivals:
            tasks.create_task(one(at, model))
    return failed, took


async def ours(program: str, files: list[Path], arrivals: list[Arrival]) -> tuple[int, int, list[float]]:
    """Return Roundhouse's loads, the requests not answered, and the seconds of the others."""
    loads = 0
    engine = InferenceEngine(
        WorkerSpec(engine=EngineKind.LLAMA_SERVER, slots=1, command=(program,), args={"threads": 1}, context=2048),
        max_agents_per_gpu=LANES,
        ports=(PORT, PORT + LANES - 1),
    )
    async with engine:
        for file in files:
            await engine.register_agent(agent_id=file.stem, model_ckpt=file)

        async def count() -> None:
            nonlocal loads
            async for event in engine.events():
                loads += event["event"] == "swap"

        async def ask(model: str) -> bool:
            try:
                await engine.run(model, "Who was out?", step="think", max_tokens=TOKENS, deadline_s=LIMIT_S)
            except InferenceError:
                return False
            return True

        counting = asyncio.create_task(count())
        # One agent's runs are sequential, like requests on one slot.
        failed, took = await play(arrivals, ask)
    await counting
    return loads, failed, took


async def theirs(program: str, files: list[Path], arrivals: list[Arrival]) -> tuple[int, int, list[float]]:
    """Return the same for the router."""
    folder = files[0].parent
    command = [program, "--models-dir", str(folder), "--models-max", str(LANES), "--port", str(PORT)]
    with (folder / "router.log").open("w+") as log:
        server = subprocess.Popen(  # noqa: ASYNC220 - once, before anything is measured
            [*command, "-t", "1", "-np", "1", "-c", "2048"], stdout=log, stderr=log
        )
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORT}", timeout=LIMIT_S, trust_env=False) as http:

                async def ask(model: str) -> bool:
                    messages = [{"role": "user", "content": "Who was out?"}]
                    body = {"model": model, "messages": messages, "max_tokens": TOKENS}
                    try:
                        return (await http.post("/v1/chat/completions", json=body)).is_success
                    except httpx.HTTPError:
                        return False

                while not await _is_there(http):  # noqa: ASYNC110 - a server can only be polled
                    await asyncio.sleep(0.1)
                failed, took = await play(arrivals, ask)
        finally:
            server.terminate()
            server.wait()
        log.seek(0)
        return log.read().count(LOADED), failed, took


async def _is_there(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/v1/models")).is_success
    except httpx.HTTPError:
        return False


def main() -> None:
    """Print a line for each mix and server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", required=True)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=3.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tiny = ensure_tiny_model(folder / "tiny")
        for kind, drawn in mixes(options.requests, MODELS, options.rate, 1):
            arrivals = list(drawn)
            for model in {model for _, model, _ in arrivals}:
                shutil.copy(tiny, folder / f"{model}.gguf")
            for name, way in (("lanes", ours), ("router", theirs)):
                loads, failed, took = asyncio.run(way(options.llama_server, sorted(folder.glob("*.gguf")), arrivals))
                p95 = sorted(took)[len(took) * 95 // 100] if took else 0.0
                print(
                    f"{kind:12} {name:7} {loads:4} loads, {failed:3} not answered; took {statistics.median(took):.2f} s"
                    f" in the middle, {p95:.2f} s at the 95th",
                    flush=True,
                )


if __name__ == "__main__":
    main()
