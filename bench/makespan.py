"""Makespan / lower bound in real processes over HTTP, beside a user's own code.

The rival is a gather over conversations, a semaphore of the slots, and the openai package, against the same engine with
the same durations. The engine's own log times both, from the first request to the last end.

python -m bench.makespan [--kinds K,..] [--jobs N,..] [--slots N,..] [--policies P,..] [--scale SECONDS] [--skewed]
    [--mixed] [--capacity tokens]
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import httpx

from bench.parts.as_a_user_would import AsAUserWould
from bench.parts.drawn_engine import duration
from bench.parts.services import serving, wait_ended
from service.conversations.job.job import Job, Mode, TurnKey
from service.scheduling.core.policies import POLICIES
from tests.harness.ports import find_ports
from tests.harness.service import Service
from tests.harness.simulation import WAITS, job_of, lower_bound, mixes
from tests.harness.waiting import wait_for

PORT = find_ports(4)
CONVERSATIONS = 24
DRAWN = (sys.executable, "-m", "bench.parts.drawn_engine")
PAUSE_S = 0.2  # pause between two reads of a job's state


def main() -> None:
    """Print a line for each mix and number of slots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default=",".join(WAITS))
    parser.add_argument("--jobs", default="1,6,24")
    parser.add_argument("--slots", default="4,8,32")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--capacity", choices=["slots", "tokens"], default="slots")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--alone", action="store_true", help="leave the rival out")
    parser.add_argument("--skewed", action="store_true", help="only one job of 40 short conversations and 2 long ones")
    parser.add_argument("--mixed", action="store_true", help="only 24 jobs of all kinds and sizes")
    options = parser.parse_args()
    policies = options.policies.split(",")
    ratios: dict[str, list[float]] = {name: [] for name in (*policies, *([] if options.alone else ["openai"]))}
    gaps: list[float] = []
    print(f"{'mix':22s} slots  " + "  ".join(f"{name:>13s}" for name in ratios), flush=True)
    for name, jobs in _mixes(options).items():
        for slots in map(int, options.slots.split(",")):
            runs = {who: _run(jobs, slots, None if who == "openai" else who, options) for who in ratios}
            for who, run in runs.items():
                ratios[who].append(run.ratio)
                # With a third of the conversations on slots, another is always ready.
                gaps += run.gaps if who != "openai" and 3 * slots <= CONVERSATIONS else []
            print(f"{name:22s} {slots:5d}  " + "  ".join(f"{run.ratio:13.3f}" for run in runs.values()), flush=True)
            if "fifo" in runs:
                told = (f"{run.completion / runs['fifo'].completion:13.2f}" for run in runs.values())
                print(f"{'  mean completion / fifo':29s} " + "  ".join(told), flush=True)
    for who, values in ratios.items():
        print(f"{who}: makespan / bound: mean {mean(values):.3f}, worst {max(values):.3f}")
    if gaps:
        gaps.sort()
        p50, p99 = (1000 * gaps[int(share * (len(gaps) - 1))] for share in (0.5, 0.99))
        print(f"end of a turn to the next request on the slot, work ready: p50 {p50:.2f} ms, p99 {p99:.2f} ms, "
              f"of {len(gaps)} (bounds 2 and 10 ms)")  # fmt: skip


def _mixes(options: argparse.Namespace) -> dict[str, list[Job]]:
    if options.mixed:
        return {"mixed, 24 jobs": mixes()["mixed, 24 jobs"]}
    if options.skewed:
        return {"skewed": [job_of("j0", "moderator", [2] * 40 + [12] * 2)]}
    return {
        f"{kind}, {jobs} jobs": [
            job_of(f"j{number}", kind, [options.rounds] * (CONVERSATIONS // jobs)) for number in range(jobs)
        ]
        for kind in options.kinds.split(",")
        for jobs in map(int, options.jobs.split(","))
    }


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a workload: makespan / bound, mean seconds to a job's end, and gaps while work was ready."""

    ratio: float
    completion: float
    gaps: list[float]


def _run(jobs: Sequence[Job], slots: int, policy: str | None, options: argparse.Namespace) -> Run:
    """Run a workload once."""
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "log"
        if policy is None:
            with _engine(log, slots, options):
                asyncio.run(AsAUserWould(f"http://127.0.0.1:{PORT + 1}/v1", slots).run(jobs))
        else:
            with drawn_service(log, slots, policy, options) as service:
                run_all(service, [_document(job) for job in jobs])
        entries = [json.loads(line) for line in log.read_text().splitlines()]
    began_at = min(entry["came"] for entry in entries)
    makespan = max(entry["end"] for entry in entries) - began_at
    ends = {entry["turn"][0]: entry["end"] - began_at for entry in sorted(entries, key=lambda each: each["end"])}

    def seconds(key: TurnKey) -> float:
        return duration(options.seed, options.scale, key.job_id, key.conversation_id, key.agent_id, key.round)

    assert len(entries) == sum(job.total_turns for job in jobs)
    return Run(
        ratio=makespan / lower_bound(jobs, slots, seconds), completion=mean(ends.values()), gaps=_gaps(entries, slots)
    )


def _gaps(entries: Sequence[Mapping[str, Any]], slots: int) -> list[float]:
    """Return the times that slots were empty while all others were taken: from each end to the next start."""
    ends = sorted(entry["end"] for entry in entries)
    starts = sorted(entry["came"] for entry in entries)[slots:]
    gaps = [start - end for end, start in zip(ends, starts, strict=False)]
    # Only the first half counts: later starts wait for other turns, not for the scheduler.
    return [gap for gap in gaps[: len(gaps) // 2] if gap < 0.05]


@contextmanager
def _engine(log: Path, slots: int, options: argparse.Namespace) -> Iterator[None]:
    flags = ["--parallel", str(slots), "--log", str(log), "--seed", str(options.seed), "--scale", str(options.scale)]
    with subprocess.Popen([*DRAWN, "--port", str(PORT + 1), *flags]) as engine:
        try:
            wait_for(_is_there, "the engine is there")
            yield
        finally:
            engine.kill()


def _is_there() -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{PORT + 1}/v1/models", trust_env=False).is_success
    except httpx.TransportError:
        return False


@contextmanager
def drawn_service(log: Path, slots: int, policy: str, options: argparse.Namespace) -> Iterator[Service]:
    """Run a service with the drawn engine, which logs its turns in ``folder``, for a block."""
    args = {"log": str(log), "seed": options.seed, "scale": options.scale}
    model = {
        "engine": "llama-server", "command": list(DRAWN), "args": args,
        "port": PORT + 1, "slots": slots, "capacity": options.capacity,
        "env": {"PYTHONPATH": str(Path(__file__).parents[1])},  # engines start in the folder of their configuration
    }  # fmt: skip
    with serving(PORT, {"m": model}, scheduling={"policy": policy}) as service:
        yield service


def run_all(service: Service, documents: Sequence[dict[str, Any]]) -> None:
    """Post jobs, and return once all have ended."""
    for job_id in [service.post_job(each) for each in documents]:
        wait_ended(service, job_id, PAUSE_S)


def _document(job: Job) -> dict[str, Any]:
    agents = [
        {"id": agent.id, "model": "m"}
        | ({} if job.mode is Mode.FREE else {"speak_after_within_round": sorted(agent.waits_for)})
        for agent in job.agents
    ]
    talks = [
        {"id": talk.id, "prompt": f"TOPIC-{job.id}-{talk.id}", "rounds": talk.rounds} for talk in job.conversations
    ]
    words = {"cue": "(Round $round of $rounds)"}  # the engine recognises the turn by it
    return {"name": job.id, "mode": job.mode.value, "agents": agents, "conversations": talks, "prompts": words}


if __name__ == "__main__":
    main()
