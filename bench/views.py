"""What ``view: shared`` costs beside ``view: own``: prompt tokens that an engine reads, and the makespan.

Four agents speak one after the other over six rounds, on one embedded engine that runs the small model and whose cache
holds them; every answer has the same length.

python -m bench.views
"""

import json
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path

import yaml

PORT = 9930
ROUNDHOUSE = str(Path(sys.executable).parent / "roundhouse")
NAMES = ("ana", "ben", "cid", "dee")
ROUNDS = 6
LENGTH = 40  # tokens of an answer
PAIRS = 2
BOUNDS = (0.45, 0.85)  # of tokens read, of the makespan


def run(view: str) -> tuple[int, float]:
    """Return the tokens that were read and not cached, and the makespan in seconds."""
    params = {"max_tokens": LENGTH, "ignore_eos": True, "temperature": 0.3, "seed": 5}
    model = {
        "engine": "embedded", "model": "roundhouse:small", "port": PORT, "slots": len(NAMES), "context": 8192,
        "args": {"threads": 2}, "params": params,
    }  # fmt: skip
    agents = [
        {"id": name, "model": "m", "system": "Argue in one short sentence.", "speak_after_within_round": NAMES[:place]}
        for place, name in enumerate(NAMES)
    ]
    prompt = "Should towns ban cars from their centres, and who pays for it?"
    job = {
        "name": view,
        "rounds": ROUNDS,
        "view": view,
        "agents": agents,
        "conversations": [{"id": "c", "prompt": prompt}],
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(
            yaml.safe_dump({"server": {"state_dir": str(folder / "state")}, "models": {"m": model}})
        )
        (folder / "job.json").write_text(json.dumps(job))
        command = [ROUNDHOUSE, "run", "job.json", "--config", "config.yaml", "--output", "out"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        turns = json.loads((folder / "out" / view / "transcripts" / "c.json").read_text())["turns"]
    read = sum(turn["usage"]["prompt_tokens"] - (turn["usage"]["cached_tokens"] or 0) for turn in turns)
    began = min(datetime.fromisoformat(turn["started_at"]) for turn in turns)
    return read, (max(datetime.fromisoformat(turn["finished_at"]) for turn in turns) - began).total_seconds()


def main() -> None:
    """Print a line for each pair."""
    for _ in range(PAIRS):
        (own, own_s), (shared, shared_s) = run("own"), run("shared")
        print(
            f"tokens read: own {own}, shared {shared}, {shared / own:.2f} x (bound {BOUNDS[0]});"
            f" makespan: own {own_s:.1f} s, shared {shared_s:.1f} s, {shared_s / own_s:.2f} x (bound {BOUNDS[1]})",
            flush=True,
        )


if __name__ == "__main__":
    main()
