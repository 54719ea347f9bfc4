"""Streams and agents while engines are killed, restarted and the service upgraded: errors, lost and doubled tokens.

Streams of chats, and coding agents if the engines are scripted, ask again and again. Each answer must be whole: the
words of its own question, each once (scripted engines), or as many tokens as were asked for (real ones). The generated
tokens, wasted ones included, are compared with those of the answers.

    python -m bench.studies.breaks [--minutes 60] [--streams 64] [--agents 8] [--sessions FOLDER] [--spares N]
        [--engine scripted|embedded|llama-server|vllm] [--command PROGRAM ...] [--model FILE]
        [--kill-s 30] [--restart-s 300] [--upgrade-s 600]

The folder has recorded sessions of agents; without it each agent makes two calls.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import httpx

from bench.parts.recorded_sessions import read_sessions
from bench.parts.services import VLLM, serving
from tests.conftest import ENGINE_PROGRAM
from tests.harness.ports import find_ports
from tests.harness.service import Service
from tests.harness.upgrades import upgrade
from workers.models.small_model import small_model_path

TOPIC: Final = r"topic\d+-"
MOST: Final = 120  # tokens of an answer
REQUESTS: Final = 32  # least number of a recorded session
CONTEXT: Final = 32_000
LATE_S: Final = 600.0
TOOLS: Final = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
Document = dict[str, Any]


class Step(NamedTuple):
    """A request of an agent ``pause_s`` after its last answer: the new words of its prompt, and the answer."""

    words: str
    answer: Document
    pause_s: float


class Tally:
    """The observations of a run."""

    def __init__(self) -> None:
        self.answers = self.tokens = 0
        self.faults: list[str] = []
        self.breaks: Counter[str] = Counter()
        self.gaps_s: list[float] = []

    def take(self, asked: str, frames: list[Document], tokens: int, expected: str | None) -> str:
        """Check one answer; return its words."""
        errors = [frame["error"] for frame in frames if "error" in frame]
        text = "".join(_deltas_in(frames, "content"))
        choices = [each for frame in frames for each in frame.get("choices", ())]
        finishes = [each["finish_reason"] for each in choices if each.get("finish_reason")]
        usage = [frame["usage"] for frame in frames if frame.get("usage")]
        counted = [each["completion_tokens"] for each in usage]
        is_whole = text == expected if expected is not None else bool(text)
        if errors or len(finishes) != 1 or counted != [tokens] or not is_whole:
            self.faults.append(f"{asked}: {errors} {finishes} {counted} of {tokens}: {text[:60]!r}...{text[-60:]!r}")
        self.answers += 1
        self.tokens += tokens
        return text


def _deltas_in(frames: list[Document], name: str) -> list[Any]:
    choices = (each for frame in frames for each in frame.get("choices", ()))
    return [each["delta"][name] for each in choices if each["delta"].get(name)]


async def ask(client: aiohttp.ClientSession, url: str, body: Document, tally: Tally) -> list[Document]:
    """Ask once over a stream; return its frames."""
    frames, last_at = list[Document](), time.monotonic()
    body = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0, **body}
    async with client.post(f"{url}/v1/chat/completions", json=body) as answer:
        if answer.status != 200:
            return [{"error": f"{answer.status} {await answer.text()}"}]
        async for line in answer.content:
            if line.startswith(b"data: {"):
                frames.append(json.loads(line.removeprefix(b"data: ")))
                tally.gaps_s.append(time.monotonic() - last_at)
                last_at = time.monotonic()
    return frames


async def chat(client: aiohttp.ClientSession, url: str, number: int, tally: Tally, *, is_scripted: bool) -> None:
    """Ask one question in a stream."""
    dice = random.Random(number)
    tokens, asked = dice.randrange(20, MOST), f"topic{number}-"
    question = f"{asked} Write about the sea. " + "word " * dice.randrange(1, 60)
    messages = [{"role": "user", "content": question}]
    expected = " ".join(f"{asked}word{place}" for place in range(tokens)) if is_scripted else None
    body = {"model": "m", "messages": messages, "max_tokens": tokens, "ignore_eos": True}
    frames = await ask(client, url, body, tally)
    tally.take(asked, frames, tokens, expected)


async def agent(client: aiohttp.ClientSession, url: str, number: int, tally: Tally, script: list[Step]) -> None:
    """Work as a coding agent does: answers with calls, their results, and a last answer in words."""
    messages: list[Document] = [{"role": "user", "content": f"topic{number}- {script[0].words}"}]
    for place, (_, wanted, pause_s) in enumerate(script):
        await asyncio.sleep(pause_s)
        frames = await ask(client, url, {"model": "a", "messages": messages, "tools": TOOLS}, tally)
        errors = [frame["error"] for frame in frames if "error" in frame]
        text = "".join(_deltas_in(frames, "content"))
        pieces = [each["function"].get("arguments", "") for calls in _deltas_in(frames, "tool_calls") for each in calls]
        call = next(iter(wanted.get("tool_calls", ())), None)
        if errors or text != wanted["content"] or "".join(pieces) != (call["arguments"] if call else ""):
            tally.faults.append(f"agent {number}: {errors} {text!r} {pieces}")
            return
        tally.answers += 1
        tally.tokens += next(frame["usage"]["completion_tokens"] for frame in frames if frame.get("usage"))
        if call:
            function = {"name": call["name"], "arguments": "".join(pieces)}
            called = {"id": call["id"], "type": "function", "function": function}
            messages.append({"role": "assistant", "content": text, "tool_calls": [called]})
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": script[place + 1].words})


def _call(place: int) -> Document:
    return {"id": f"c{place}", "name": "read", "arguments": json.dumps({"path": "a/b/c.py", "line": place})}


def script_of(options: argparse.Namespace) -> list[Step]:
    """Return an agent's requests: those of a recorded session, or three."""
    asked = [("Mend the fault.", 40, 0.0)] + [("the file", 40, 0.0)] * 2
    if options.sessions is not None:
        (session,) = read_sessions(options.sessions, 1, REQUESTS, CONTEXT)
        prompts = ["", *(each.prompt for each in session)]
        asked = [(each.prompt.removeprefix(prompts[n]), each.answer, each.pause_s) for n, each in enumerate(session)]
    answers = [" ".join(f"step{place}-{word}" for word in range(words)) for place, (_, words, _) in enumerate(asked)]
    calls = [{"tool_calls": [_call(place)]} for place in range(len(asked) - 1)]
    made = [{"content": text, **call} for text, call in zip(answers, [*calls, {}], strict=True)]
    return [Step(words, answer, pause_s) for (words, _, pause_s), answer in zip(asked, made, strict=True)]


async def _again(until: float, act: Callable[[int], Awaitable[None]], first: int, step: int) -> None:
    number = first
    while time.monotonic() < until:
        await act(number)
        number += step


async def _every(until: float, pause_s: float, act: Callable[[], object]) -> None:
    while time.monotonic() + pause_s < until:
        await asyncio.sleep(pause_s)
        with contextlib.suppress(httpx.TransportError):  # an upgrade is under way
            await asyncio.to_thread(act)


def _kill(service: Service, tally: Tally, dice: random.Random) -> None:
    ready = [each for each in service.get("/v1/workers")["workers"] if each["state"] == "ready" and each["pid"]]
    if ready:
        os.kill(dice.choice(ready)["pid"], signal.SIGKILL)
        tally.breaks["killed"] += 1


def _restart(service: Service, tally: Tally, dice: random.Random) -> None:
    ready = [each for each in service.get("/v1/workers")["workers"] if each["state"] == "ready"]
    if ready and service.http.post(f"/v1/workers/{dice.choice(ready)['id']}/restart").is_success:
        tally.breaks["restarted"] += 1


def _upgrade(service: Service, tally: Tally) -> None:
    try:
        upgrade(service)
    except AssertionError as error:
        tally.breaks[f"upgrade refused: {str(error)[:80]}"] += 1
    else:
        tally.breaks["upgraded"] += 1


async def run(service: Service, options: argparse.Namespace, tally: Tally) -> None:
    """Ask and break for the given time."""
    until, dice = time.monotonic() + 60 * options.minutes, random.Random(1)
    is_scripted, url, script = options.engine == "scripted", service.url, script_of(options)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=LATE_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client, asyncio.TaskGroup() as tasks:
        for place in range(options.streams):
            tasks.create_task(
                _again(until, lambda n: chat(client, url, n, tally, is_scripted=is_scripted), place, options.streams)
            )
        for place in range(options.agents if is_scripted else 0):
            tasks.create_task(_again(until, lambda n: agent(client, url, n, tally, script), place, options.agents))
        tasks.create_task(_every(until, options.kill_s, lambda: _kill(service, tally, dice)))
        tasks.create_task(_every(until, options.restart_s, lambda: _restart(service, tally, dice)))
        tasks.create_task(_every(until, options.upgrade_s, lambda: _upgrade(service, tally)))


def models_of(options: argparse.Namespace) -> Document:
    """Return the models: one for chats, and one for agents if the engines are scripted."""
    common = {"spares": options.spares, "restart": {"initial_s": 1, "failures": 100_000, "window_s": 1}}
    if options.engine != "scripted":
        command = {"command": options.command} if options.command else {}
        real = {"engine": options.engine, "model": options.model, "slots": 4, "context": 1024, "repetition": None}
        own = VLLM if options.engine == "vllm" else {"port": find_ports(2)}
        return {"m": {**real, **common, **command, **own}}
    script = options.folder / "script.json"
    script.write_text(json.dumps([step.answer for step in script_of(options)]))
    scripted = {"engine": "llama-server", "command": [sys.executable, "-I", "-S", str(ENGINE_PROGRAM)], "slots": 32}
    flags = {"goes-on": "kept", "tokens": MOST, "interval": 0.05, "load": 1.0}
    chats = {**scripted, **common, "port": find_ports(2), "args": {**flags, "echo": TOPIC}}
    return {"m": chats, "a": {**scripted, **common, "port": find_ports(2), "args": {**flags, "script": str(script)}}}


def main() -> None:
    """Print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--engine", default="scripted")
    parser.add_argument("--command", nargs="+")
    parser.add_argument("--sessions", type=Path)
    parser.add_argument("--model", default=str(small_model_path()))
    parser.add_argument("--spares", type=int, default=1)
    for name, seconds in (("kill", 30.0), ("restart", 300.0), ("upgrade", 600.0)):
        parser.add_argument(f"--{name}-s", type=float, default=seconds)
    options = parser.parse_args()
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        measure(options, tally)


def measure(options: argparse.Namespace, tally: Tally) -> None:
    """Run the service, and print what was seen."""
    with serving(find_ports(1), models_of(options), {"drain_s": 60}) as service:
        asyncio.run(run(service, options, tally))
        time.sleep(2.0)  # the last usage is written once a second
        rows = service.get("/v1/usage")["usage"]
    answered, wasted = (sum(row[name] for row in rows) for name in ("answer_tokens", "wasted_tokens"))
    breaks = sum(tally.breaks.values())
    print(f"{options.minutes:g} minutes, {options.engine}, {options.streams} streams: {tally.answers} answers,"
          f" {tally.tokens} tokens; {dict(tally.breaks)}; {len(tally.faults)} faults")  # fmt: skip
    generated = answered + wasted
    print(f"by the service's usage {answered} tokens of answers and {wasted} more:"
          f" {generated / tally.tokens:.4f} of the answers', {wasted / max(1, breaks):.1f} a break")  # fmt: skip
    print(f"between two frames: p50 {statistics.median(tally.gaps_s):.3f} s, longest {max(tally.gaps_s):.2f} s")
    for fault in tally.faults[:20]:
        print(fault)


if __name__ == "__main__":
    main()
