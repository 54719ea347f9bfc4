"""Recorded tokens of real engines, compared with the same model in torch (specification, "Recorded tokens")."""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest

from tests.engines.subjects import VLLM_ENVIRONMENT
from tests.harness.ports import find_ports
from tests.harness.service import Document, serving

START_S = 240.0
ENDS_S = 600.0
CONVERSATIONS = 20
ROUNDS = 3
CLOSE = 1e-3
PROMPTS = ("Say something.", "Grüße, 你好, 🌍!", "…and then?", "x" * 300)


@dataclass(frozen=True)
class Served:
    """A model of the configuration, and where torch finds its weights."""

    model: Document
    checkpoint: Path
    gguf: str | None


@pytest.fixture(params=["llama-server", "vllm"])
def served(request: pytest.FixtureRequest, tiny_model: Path, checkpoint: Path) -> Served:
    common = {"slots": 4, "context": 4096, "bios": {"template": "$context"}}
    if request.param == "vllm":
        python = request.getfixturevalue("vllm_python")
        model = {
            **common,
            "engine": "vllm",
            "command": [python, "-m", "vllm.entrypoints.openai.api_server"],
            "model": str(checkpoint),
            "args": {"enforce_eager": True, "dtype": "float32"},
            "env": dict(VLLM_ENVIRONMENT),
            "timeouts": {"start_s": START_S},
        }
        return Served(model, checkpoint, None)
    binary = request.config.getoption("--llama-server")
    if binary is None:
        pytest.skip("make test-engines builds the binary and names it")
    model = {
        **common,
        "engine": "llama-server",
        "command": [str(binary)],
        "model": str(tiny_model),
        "port": find_ports(1),
        "args": {"threads": 1, "cache-type-k": "f32", "cache-type-v": "f32", "flash-attn": "off"},
    }
    return Served(model, tiny_model.parent, tiny_model.name)


def gguf_package(folder: Path) -> str:
    """Return a folder with the package that reads GGUF files, for an environment that lacks it."""
    folder.mkdir()
    for part in Path(gguf.__file__).parents[1].glob("gguf*"):
        (folder / part.name).symlink_to(part)
    return str(folder)


def reference(python: str, served: Served, rows: list[Document], folder: Path) -> list[list[float]]:
    """Return what torch computes for each token of the rows' completions."""
    program = Path(__file__).parent / "logprobs.py"
    asked = json.dumps({"checkpoint": str(served.checkpoint), "gguf": served.gguf, "rows": rows})
    environment = {**os.environ, "PYTHONPATH": gguf_package(folder)}
    done = subprocess.run(
        [python, str(program)],
        input=asked,
        capture_output=True,
        text=True,
        timeout=ENDS_S,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def collect(folder: Path, served: Served, conversations: int) -> list[Document]:
    """Return the rows of a job whose agents write noise, cut off by bounds and by stop words."""
    params: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "seed": 1}
    document = {
        "name": "recorded",
        "record": {"tokens": True, "logprobs": True},
        "rounds": ROUNDS,
        "agents": [
            {"id": "a", "model": "m", "params": params},
            {"id": "b", "model": "m", "params": {**params, "stop": ["e", "7"]}},
        ],
        "conversations": [
            {"prompt": PROMPTS[number % len(PROMPTS)], "agents": {"a": {"params": {"seed": number}}}}
            for number in range(conversations)
        ],
    }
    with serving(folder, find_ports(1), {"m": served.model}, limit_s=START_S) as service:
        job_id = service.post_job(document)
        assert service.wait_ended(job_id, ENDS_S)["state"] == "completed"
        answer = service.http.get(f"/v1/jobs/{job_id}/rollouts", params={"partial": True}, timeout=ENDS_S)
        return [json.loads(line) for line in answer.text.splitlines()]


def test_logprobs_are_those_of_the_model(served: Served, vllm_python: str, tmp_path: Path) -> None:
    """Ids are whole in every row; each logprob that the engine gives is the model's at that token."""
    rows = collect(tmp_path, served, CONVERSATIONS)
    assert {row["conversation"] for row in rows} == {f"c{number}" for number in range(CONVERSATIONS)}
    assert {part for row in rows for part in row["partial"]} <= {"logprobs"}
    if served.gguf is None:
        assert not any(row["partial"] for row in rows)
    compared = 0
    for row, computed in zip(rows, reference(vllm_python, served, rows, tmp_path / "gguf"), strict=True):
        for mask, told, value in zip(row["mask"], row["logprobs"], computed, strict=True):
            assert told is None or mask
            if told is not None:
                compared += 1
                assert abs(told - value) < CLOSE, (row["conversation"], told, value)
    assert compared > CONVERSATIONS * ROUNDS * 2
