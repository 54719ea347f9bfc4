"""A long conversation of three agents in a small context, on the real small model: overflows, caching, windows.

python -m bench.studies.memory [--rounds 200] [--context 4096] [--answer 32] [--view own|shared] [--keep auto]
"""

import argparse
import json
import time
from typing import Any

from bench.parts.services import serving, wait_ended
from tests.harness.ports import find_ports

PORT = find_ports(4)
PAUSE_S = 0.5  # pause between two reads of the job's state
NAMES = ("anna", "bruno", "carla")


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--answer", type=int, default=16)
    parser.add_argument("--view", choices=["own", "shared"], default="own")
    parser.add_argument("--summary", type=int, default=60, help="tokens of a summary at most; 0 for none")
    parser.add_argument("--keep", default='"auto"', help="as JSON")
    options = parser.parse_args()
    model = {
        "engine": "embedded",
        "model": "roundhouse:small",
        "port": PORT + 1,
        "slots": 3,
        "context": options.context,
    }
    params = {"max_tokens": options.answer, "temperature": 0.8, "seed": 7}
    job = {
        "rounds": options.rounds,
        "view": options.view,
        "memory": {
            "keep": json.loads(options.keep),
            "summary": {"by": NAMES[0] if options.view == "shared" else "self", "max_tokens": options.summary}
            if options.summary
            else None,
        },
        "agents": [{"id": name, "model": "m", "system": f"You are {name}. Two sentences.", "params": params}
                   for name in NAMES],
        "conversations": [{"id": "c", "prompt": "The village talks about its well, which has run dry."}],
    }  # fmt: skip
    with serving(PORT, {"m": model}) as service:
        began_at = time.monotonic()
        job_id = service.post_job(job)
        ended = wait_ended(service, job_id, PAUSE_S)
        took_s = time.monotonic() - began_at
        (talk,) = service.get(f"/v1/jobs/{job_id}/result")["conversations"]
    print(f"{options.view}, keep {options.keep}: {told(talk, ended['state'])}, {took_s:.0f} s", flush=True)


def told(talk: dict[str, Any], state: str) -> str:
    """Return the figures of a conversation in words."""
    made = [turn for turn in talk["turns"] if turn["state"] == "completed"]
    turns, summaries = ([turn for turn in made if turn["kind"] == kind] for kind in ("turn", "summary"))
    overflows = sum(turn["reason"] == "context_overflow" for turn in talk["turns"])
    prompts = [turn["usage"]["prompt_tokens"] for turn in made]
    cached = sum(turn["usage"]["cached_tokens"] for turn in made)
    tokens, of_summaries = (
        sum(turn["usage"]["prompt_tokens"] + turn["usage"]["completion_tokens"] for turn in some)
        for some in (made, summaries)
    )
    cuts = {(turn["agent"], turn["memory"]["from_round"]) for turn in turns if turn["memory"]}
    return (
        f"{state}, {len(turns)} turns, {overflows} context_overflow, longest prompt {max(prompts)} tokens, "
        f"{cached / sum(prompts):.3f} of all prompt tokens cached, {len(cuts)} cuts, {len(summaries)} summaries of "
        f"{of_summaries / tokens:.3f} of all tokens"
    )


if __name__ == "__main__":
    main()
