"""The orchestrator of ``deploy/compose.yaml``, run as its container would run it, against a service with a key."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.harness.service import scripted_model, serving
from tests.harness.waiting import LIMIT_S

COMPOSE = Path(__file__).parents[2] / "deploy" / "compose.yaml"
KEY = "a-key-of-your-own"


@pytest.mark.system
def test_the_orchestrator_prints_the_conversation(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Users copy their first program from it; its model is that of the mounted configuration."""
    orchestrator = yaml.safe_load(COMPOSE.read_text())["services"]["orchestrator"]
    mounted = yaml.safe_load((COMPOSE.parent / "roundhouse.yaml").read_text())
    assert orchestrator["entrypoint"] == ["python", "-c"]
    (program,) = orchestrator["command"]
    assert "$" not in program, "compose would read it"
    models = {name: scripted_model(free_ports(1), tokens=3) for name in mounted["models"]}
    with serving(tmp_path, free_ports(1), models, {"api_keys": [KEY, "second"]}) as service:
        environment = {"ROUNDHOUSE_URL": service.url, "ROUNDHOUSE_API_KEYS": f"{KEY},second"}
        assert set(environment) == set(orchestrator["environment"])
        told = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
    (conversation,) = json.loads(told.stdout)["conversations"]
    assert (conversation["state"], conversation["turns"][0]["text"].split()) == (
        "completed",
        ["word0", "word1", "word2"],
    )
