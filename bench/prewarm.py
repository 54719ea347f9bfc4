"""What reading prompts beforehand is worth: time to first token, makespan, and tokens that were read in vain.

On the real llama.cpp (embedded): two services, one with ``scheduling.prewarm`` and one without, asked in turn, one job
at a time. Three agents speak one after the other, each about a document of its conversation of 2,000 tokens. Once half
of the slots are busy (two conversations on four slots), once all are (eight). Then in a simulation, where reading and
writing do not share the cores of one machine.

python -m bench.prewarm [--jobs 12] [--port 9840]
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx
import yaml

from bench.words import wait_for
from service.conversations.job import Job, TurnKey
from service.scheduling.core.capacity.turn_needs import TOKENS_A_CHAR
from tests.harness.simulation import Cache, drawn, job_of, simulate

SLOTS = 4
PROMPT = 2000  # tokens: one a character in the model that is made on the spot
ANSWER = 100
SAID = 300  # tokens of an answer, in the simulation
READ_S = 0.0005  # a token, in the simulation: the document takes a second, as long as an answer
ROUNDHOUSE = str(Path(sys.executable).parent / "roundhouse")
Document = dict[str, Any]


@contextmanager
def serving(port: int, *, prewarm: bool) -> Iterator[httpx.Client]:
    """Run a service with one embedded engine for a block."""
    model = {
        "engine": "embedded", "port": port + 1, "slots": SLOTS, "context": 4096, "args": {"threads": 1},
        "params": {"max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}, "repetition": {"lines": None},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        config = {
            "server": {"port": port, "state_dir": f"{name}/state"},
            "scheduling": {"prewarm": prewarm},
            "models": {"m": model},
        }
        (Path(name) / "config.yaml").write_text(yaml.safe_dump(config))
        with (Path(name) / "log").open("w") as log:
            command = [ROUNDHOUSE, "serve", "--config", f"{name}/config.yaml"]
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600)
            wait_for(client, "/readyz")
            yield client
        finally:
            process.terminate()
            process.wait(30)


def document_job(number: int, conversations: int) -> Document:
    """Return a job whose documents no other job has."""
    chance = Random(number)
    document = [
        "".join(chance.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(PROMPT)) for _ in range(conversations)
    ]
    return {
        "name": f"prewarm-{number}",
        "agents": [
            {
                "id": f"a{agent}", "model": "m", "system": f"You are speaker {agent}.",
                "speak_after_within_round": [f"a{agent - 1}"] if agent else [],
            }
            for agent in range(3)
        ],
        "conversations": [{"prompt": text} for text in document],
    }  # fmt: skip


def run(client: httpx.Client, asked: Document) -> tuple[float, list[tuple[str, float]]]:
    """Run a job; return its seconds, and of each turn its agent and those from when it was ready to its first token."""
    began = time.monotonic()
    name = client.post("/v1/jobs", json=asked).raise_for_status().json()["id"]
    while client.get(f"/v1/jobs/{name}").json()["state"] in ("queued", "running"):
        time.sleep(0.02)
    seconds = time.monotonic() - began
    result = client.get(f"/v1/jobs/{name}/result").json()
    assert {talk["state"] for talk in result["conversations"]} == {"completed"}, result
    return seconds, [(turn["agent"], waited(turn)) for talk in result["conversations"] for turn in talk["turns"]]


def waited(turn: Document) -> float:
    """Return the seconds from when a turn was ready to its first token."""
    return (datetime.fromisoformat(turn["first_token_at"]) - datetime.fromisoformat(turn["queued_at"])).total_seconds()


def read_ahead(client: httpx.Client) -> Mapping[str, float]:
    """Return how many tokens were read beforehand, by what became of them."""
    lines = client.get("/metrics").text.splitlines()
    counts = [line for line in lines if line.startswith("roundhouse_prewarm_tokens_total{")]
    return {line.split('result="')[1].split('"')[0]: float(line.split()[-1]) for line in counts}


def real(jobs: int, port: int) -> None:
    """Print what it is worth on the real engine."""
    with serving(port, prewarm=False) as without, serving(port + 10, prewarm=True) as ahead:
        run(without, document_job(0, 1)), run(ahead, document_job(0, 1))
        for name, conversations in (("half of the slots busy", SLOTS // 2), ("all slots busy", 2 * SLOTS)):
            seconds: tuple[list[float], list[float]] = ([], [])
            first: tuple[list[tuple[str, float]], list[tuple[str, float]]] = ([], [])
            before = read_ahead(ahead)
            for number in range(1, jobs + 1):
                order = ((0, without), (1, ahead)) if number % 2 else ((1, ahead), (0, without))
                for place, client in order:
                    took, turns = run(client, document_job(number * 100 + conversations, conversations))
                    seconds[place].append(took)
                    first[place].extend(turns)
            after = read_ahead(ahead)
            used, wasted = (after.get(kind, 0) - before.get(kind, 0) for kind in ("used", "wasted"))
            for who, agents in (("all turns", "a0 a1 a2"), ("those that wait for another", "a1 a2")):
                waits = [median(each for agent, each in told if agent in agents) for told in first]
                print(f"{name}, {who}: first token {waits[0]:.3f} s without, {waits[1]:.3f} s with"
                      f" ({waits[1] / waits[0]:.2f} x)", flush=True)  # fmt: skip
            ratio = median(b / a for a, b in zip(*seconds, strict=True))
            print(f"{name}: all jobs {sum(seconds[0]):.1f} s and {sum(seconds[1]):.1f} s ({ratio:.3f} x in the median"
                  f" job); {used:.0f} tokens used, {wasted:.0f} in vain ({wasted / max(1.0, used + wasted):.1%})",
                  flush=True)  # fmt: skip


def simulated(seeds: Sequence[int] = range(20)) -> None:
    """Print what it is worth where it shares nothing with the turns that run."""
    for name, conversations, rounds in (
        ("half of the slots busy, one round", 4, 1),
        ("half of the slots busy, four rounds", 4, 4),
        ("all slots busy, four rounds", 24, 4),
    ):
        ratios, wasted = [], []
        for seed in seeds:
            made = [with_documents(job_of("j0", "chain", [rounds] * conversations))]
            spans = [
                simulate(
                    made, 8, "critical_path", drawn(seed),
                    cache=Cache(prompt_tokens, READ_S, is_told=True, answer=SAID), prewarm=prewarm,
                )
                for prewarm in (False, True)
            ]  # fmt: skip
            ratios.append(spans[1].makespan / spans[0].makespan)
            wasted.append(spans[1].wasted)
        print(
            f"simulated, {name}: makespan {median(ratios):.3f} x (at most {max(ratios):.3f} x),"
            f" {max(wasted):.1%} in vain at most",
            flush=True,
        )


def with_documents(job: Job) -> Job:
    """Return a job whose conversations each have a document."""
    document = "x" * round(PROMPT / TOKENS_A_CHAR)
    return replace(job, conversations=tuple(replace(each, prompt=document) for each in job.conversations))


def prompt_tokens(key: TurnKey) -> int:
    """Return how long a prompt is in the simulation: the document, and all that was said before."""
    return PROMPT + SAID * (3 * key.round + int(key.agent_id[1:]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--port", type=int, default=9840)
    given = parser.parse_args()
    simulated()
    real(given.jobs, given.port)
