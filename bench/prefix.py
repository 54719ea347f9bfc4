"""How much of what an engine could reuse it reuses: cached tokens against those of each agent's previous turn.

On the real llama.cpp (embedded), while conversations fit the slots, and at three times as many.

python -m bench.prefix
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from tests.harness.ports import find_ports

PORT = find_ports(4)
SLOTS = 4
ROUNDHOUSE = str(Path(sys.executable).parent / "roundhouse")
SYSTEM = "You are a careful person who thinks about every matter at length and says so in simple words."


def main() -> None:
    """Print a line for each number of conversations and shape."""
    for policy in ("critical_path", "progress", "fifo"):
        for conversations, bound in ((SLOTS, 0.95), (3 * SLOTS, 0.8)):
            for agents in (1, 3):
                share = reuse(conversations // agents if agents > 1 else conversations, agents, policy)
                print(f"{policy:14s} {conversations:2d} prompts on {SLOTS} slots, {agents} agents a conversation:"
                      f" {share:.3f} of the reusable tokens (bound {bound})", flush=True)  # fmt: skip


def reuse(conversations: int, agents: int, policy: str) -> float:
    """Return reused / reusable tokens of one job."""
    model = {
        "engine": "embedded", "port": PORT, "slots": SLOTS, "context": 4096,
        "params": {"max_tokens": 48, "temperature": 0},
    }  # fmt: skip
    job = {
        "name": "reuse",
        "rounds": 6,
        "agents": [{"id": f"a{number}", "model": "m", "system": f"{SYSTEM} ({number})"} for number in range(agents)],
        "conversations": [
            {"prompt": f"Topic {number}: should towns ban cars from street {number}, and who pays for it?"}
            for number in range(max(1, conversations))
        ],
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = {
            "server": {"state_dir": str(folder / "state")}, "scheduling": {"policy": policy}, "models": {"m": model}
        }  # fmt: skip
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
        command = [ROUNDHOUSE, "run", "job.yaml", "--config", "config.yaml", "--output", "out"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        transcripts = [json.loads(file.read_text()) for file in (folder / "out/reuse/transcripts").glob("*.json")]
    reused = reusable = 0
    for transcript in transcripts:
        known: dict[str, int] = {}
        for turn in transcript["turns"]:
            usage, agent = turn["usage"], turn["agent"]
            if agent in known:
                reusable += known[agent]
                reused += min(usage["cached_tokens"] or 0, known[agent])
            known[agent] = usage["prompt_tokens"] + usage["completion_tokens"]
    return reused / reusable


if __name__ == "__main__":
    main()
