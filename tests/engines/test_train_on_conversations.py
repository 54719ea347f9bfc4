"""The page *Train on conversations*, as its readers follow it: a reward that rises, in TRL and vLLM as they are."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.harness.ports import find_ports
from tests.harness.service import serving

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "train-on-conversations.md"
LIMIT_S = 600.0
START_S = 240.0


@pytest.fixture(scope="session")
def trl_python(request: pytest.FixtureRequest) -> str:
    python: str | None = request.config.getoption("--trl-python")
    if python is None:
        pytest.skip("make test-engines sets up TRL and names it")
    return python


def run(python: str, program: Path) -> str:
    """Run a program of the page in the trainer's environment; return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHONPATH": str(ROOT / "client"), "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(
        [python, program.name],
        cwd=program.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


@pytest.mark.long
def test_a_reward_rises(tmp_path: Path, trl_python: str, vllm_python: str) -> None:
    """All programs of the page: a model is made, engines speak, TRL trains, engines get the weights each step."""
    text = PAGE.read_text(encoding="utf-8")
    make, reward, train = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (configuration,) = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    port = find_ports(1)
    for name, program in (("make_policy", make), ("judges", reward), ("train", train.replace("8080", str(port)))):
        (tmp_path / f"{name}.py").write_text(program)
    run(trl_python, tmp_path / "make_policy.py")
    config = yaml.safe_load(configuration)
    policy = config["models"]["policy"]
    policy["command"] = [vllm_python, *policy["command"][1:]]
    policy["model"] = str(tmp_path / policy["model"])
    policy["timeouts"] = {"start_s": START_S}
    with serving(tmp_path, port, config["models"], limit_s=START_S, rollouts=config["rollouts"]) as service:
        said = run(trl_python, tmp_path / "train.py")
        (name,) = [each["id"] for each in service.get("/v1/jobs?limit=1")["jobs"]]
        (talk, *_) = service.get(f"/v1/jobs/{name}/result")["conversations"]
    (found,) = re.findall(r"last five steps: ([\d.]+) ([\d.]+)", said)
    first, last = map(float, found)
    assert last > first + 0.3, said
    assert talk["turns"][0]["weight_version"] == 29
