"""The examples for verl and SkyRL, against the classes in their wheels: the packages themselves need a GPU's stack."""

import abc
import ast
import asyncio
import importlib.util
import json
import logging
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pydantic
import pytest

from tests.harness.service import Document, Service, serving
from tests.harness.waiting import wait_for

EXAMPLES = Path(__file__).parents[2] / "examples"
START_S = 60.0
JOB = {
    "name": "trained",
    "rounds": 2,
    "agents": [
        {"id": "pupil", "model": "tiny", "params": {"max_tokens": 6}},
        {"id": "partner", "model": "tiny", "params": {"max_tokens": 4}, "record": {"tokens": False}},
    ],
    "record": {"tokens": True, "logprobs": True},
    "reward": {"python": "judges:length"},
}
REWARD = "def length(transcript):\n    return float(len(transcript['turns'][0]['text']))\n"
PROMPTS = [[{"role": "system", "content": "Be kind."}, {"role": "user", "content": f"Say {word}."}] for word in "abc"]


@pytest.fixture(scope="module")
def packages(request: pytest.FixtureRequest) -> Path:
    """Return the folder with the packages of both, without their dependencies."""
    python = request.config.getoption("--trainers-python")
    if python is None:
        pytest.skip("make test-engines sets up the packages and names their environment")
    (folder,) = Path(python).parents[1].glob("lib/python*/site-packages")
    return folder


@pytest.fixture(scope="module")
def service(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    from tests.harness.ports import find_ports  # noqa: PLC0415 - a module's fixture cannot take the function's

    folder = tmp_path_factory.mktemp("trainers")
    (folder / "judges.py").write_text(REWARD)
    model = {"engine": "embedded", "model": str(tiny_model), "context": 4096, "slots": 4, "args": {"threads": 1}}
    port = find_ports(2)
    models = {"tiny": {**model, "port": port + 1}}
    with serving(folder, port, models, limit_s=START_S, rollouts={"rewards": ["judges:length"]}) as running:
        wait_for(lambda: running.get("/v1/workers/tiny-0")["state"] == "ready", "the engine is ready", START_S)
        yield running


def defined(file: Path, names: Sequence[str], known: dict[str, Any]) -> dict[str, Any]:
    """Return the classes and functions of a file by name; annotations of what is not there are not read."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    wanted = [node for node in tree.body if getattr(node, "name", None) in names]
    assert [node.name for node in wanted] == [*names]  # type: ignore[attr-defined]
    future = ast.ImportFrom(module="__future__", names=[ast.alias("annotations")], level=0)
    code = compile(ast.fix_missing_locations(ast.Module([future, *wanted], [])), str(file), "exec")
    space = {"__name__": file.stem, **vars(typing), **known}
    exec(code, space)  # noqa: S102 - the packages' own code
    return {name: space[name] for name in names}


def example(name: str, module: str, members: dict[str, Any], patch: pytest.MonkeyPatch) -> ModuleType:
    """Load an example, for which ``module`` has these members."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        made = ModuleType(".".join(parts[:end]))
        made.__dict__.update(members if end == len(parts) else {"__path__": []})
        patch.setitem(sys.modules, made.__name__, made)
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_verl_takes_the_rollout_of_a_sample(
    packages: Path, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own classes check the types; its sampling parameters reach the engine."""
    names = ("AgentLoopMetrics", "AgentLoopOutput", "AgentLoopBase", "register")
    registry: dict[str, Any] = {}
    known = {
        "BaseModel": pydantic.BaseModel,
        "ABC": abc.ABC,
        "abstractmethod": abc.abstractmethod,
        "create_continuous_token_builder": lambda *_given, **_named: None,
        "get_event_loop": asyncio.get_running_loop,
        "_agent_loop_registry": registry,
    }
    file = packages / "verl" / "experimental" / "agent_loop" / "agent_loop.py"
    classes = defined(file, names, known)
    classes["AgentLoopOutput"].model_rebuild(_types_namespace={**vars(typing), **classes})
    loaded = example("verl_agent_loop", "verl.experimental.agent_loop.agent_loop", classes, monkeypatch)
    assert list(registry) == ["roundhouse"]
    (tmp_path / "job.yaml").write_text(json.dumps({**JOB, "conversations": [{"id": "c", "prompt": "x"}]}))
    rollout = SimpleNamespace(prompt_length=4000, response_length=4000)
    configs = SimpleNamespace(config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)))
    given = {"trainer_config": configs, "data_config": SimpleNamespace(config={}), "dataset_cls": None}
    given |= dict.fromkeys(("server_manager", "tokenizer", "processor"))

    async def sample(prompt: list[dict[str, str]]) -> Any:  # noqa: ANN401 - a class of the wheel
        loop = loaded.RoundhouseLoop(**given, url=service.url, job=str(tmp_path / "job.yaml"), agent="pupil")
        return await loop.run({"temperature": 0.5, "top_p": 0.9, "logprobs": True}, raw_prompt=np.array(prompt))

    output = asyncio.run(sample(PROMPTS[0]))
    assert len(output.response_ids) == len(output.response_mask) == len(output.response_logprobs)
    assert (sum(output.response_mask), output.num_turns) == (12, 4)
    assert output.reward_score is not None
    assert output.extra_fields.keys() == {"min_global_steps", "max_global_steps", "reward_extra_info"}
    (job_id,) = [each["id"] for each in service.get("/v1/jobs?limit=1")["jobs"]]
    agent = service.get(f"/v1/jobs/{job_id}/document")["agents"][0]
    assert agent["params"] == {"max_tokens": 6, "temperature": 0.5, "top_p": 0.9}
    rollout.response_length = 3
    with pytest.raises(ValueError, match="response_length"):
        asyncio.run(sample(PROMPTS[1]))


def test_skyrl_takes_the_rollouts_of_a_batch(packages: Path, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own check of a generator's output passes; all of its columns are there, in the order of the prompts."""
    base = packages / "skyrl" / "train" / "generators" / "base.py"
    names = ("TrajectoryID", "GeneratorInput", "GeneratorOutput", "GeneratorInterface")
    known = {"ABC": abc.ABC, "abstractmethod": abc.abstractmethod, "dataclass": dataclass}
    classes = defined(base, names, known)
    loaded = example("skyrl_generator", "skyrl.train.generators.base", classes, monkeypatch)
    ids = [classes["TrajectoryID"](instance_id=str(number), repetition_id=0) for number in range(len(PROMPTS))]
    batch: Document = {"prompts": PROMPTS, "trajectory_ids": ids}
    generator = loaded.RoundhouseGenerator(service.url, JOB, "pupil", {"temperature": 0.0})
    output = asyncio.run(generator.generate(batch))
    assert output.keys() == classes["GeneratorOutput"].__annotations__.keys()
    checks = packages / "skyrl" / "train" / "utils" / "trainer_utils.py"
    found = defined(checks, ["validate_generator_output"], {"np": np, "logger": logging.getLogger()})
    validate: Callable[..., None] = found["validate_generator_output"]
    validate(len(PROMPTS), output)
    assert [sum(mask) for mask in output["loss_masks"]] == [12, 12, 12]
    assert all(isinstance(reward, float) for reward in output["rewards"])
    assert output["trajectory_ids"] == ids
