"""Dockerfile, compose files and scripts: checked by their own tools, and consistent with what they name."""

import json
import re
import shlex
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.cluster.slurm import BATCH
from service.config.load import load_config
from service.config.schema import Config
from tests.system import deploy_tools

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = sorted(DEPLOY.glob("compose*.yaml"))
CI = ROOT / ".ci" / "run"
SECRETS = {"ROUNDHOUSE_API_KEYS": "a-key-of-mine", "POSTGRES_PASSWORD": "word"}


def check(*command: str, status: int = 0) -> str:
    """Return a checker's output and check its exit status."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def conforms(file: Path, status: int = 0) -> str:
    """Check a compose file against the schema of compose files."""
    return check(
        deploy_tools.checker("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(file), status=status
    )


def test_the_dockerfile_has_no_fault() -> None:
    """Exceptions have their reason beside them."""
    assert check(deploy_tools.checker("hadolint"), str(ROOT / "Dockerfile")) == ""


def test_the_build_context_has_all_copied_files_and_no_secrets() -> None:
    """.dockerignore leaves out all files that the Dockerfile does not copy, and secrets and environments stay out."""
    dockerfile = (ROOT / "Dockerfile").read_text()
    let_in = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [
        source
        for words in re.findall(r"^COPY (?!--from)(.+)$", dockerfile, re.MULTILINE)
        for source in shlex.split(words)[:-1]
    ]
    assert sorted(copied) == sorted(let_in)
    assert all((ROOT / source).exists() for source in copied)


@pytest.mark.parametrize("name", ["run", "slurm.sh"])
def test_scripts_have_no_fault(name: str, tmp_path: Path) -> None:
    """Shellcheck finds none, also in the batch script that ``cluster`` writes."""
    script = CI if name == "run" else tmp_path / name
    if script != CI:
        script.write_text(
            BATCH.format(
                name="n", nodes=2, grace_s=90, command="roundhouse cluster node", stop="roundhouse cluster stop"
            )
        )
    assert check(deploy_tools.checker("shellcheck"), str(script)) == ""


@pytest.mark.parametrize("file", COMPOSE, ids=lambda file: file.name)
def test_compose_files_are_valid(file: Path, tmp_path: Path) -> None:
    """The check finds a single wrong word in a service."""
    conforms(file)
    document = yaml.safe_load(file.read_text())
    next(iter(document["services"].values()))["imagee"] = "x"
    (tmp_path / "wrong.yaml").write_text(json.dumps(document))
    assert "imagee" in conforms(tmp_path / "wrong.yaml", status=1)


def services_of(file: Path) -> dict[str, Any]:
    """Return the services of a compose file that run Roundhouse."""
    services = yaml.safe_load(file.read_text())["services"]
    return {name: each for name, each in services.items() if "build" in each}


@pytest.mark.parametrize("file", COMPOSE, ids=lambda file: file.name)
def test_services_of_compose_files_can_be_started(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration is valid and mounted where it is expected; a public listener requires a key."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    services = services_of(file)
    assert services
    for service in services.values():
        mounts = dict(volume.split(":")[:2] for volume in service["volumes"])
        (config,) = (place for place, inside in mounts.items() if inside == "/etc/roundhouse.yaml")
        effective = load_config(file.parent / config, {"host": service["environment"]["ROUNDHOUSE_HOST"]})
        assert effective.server.api_keys
        assert "/state" in mounts.values()
        patience = re.fullmatch(r"(\d+)s", service["stop_grace_period"])
        assert patience is not None
        assert int(patience[1]) >= longest_stop_s(effective)


def longest_stop_s(config: Config) -> float:
    """Return how long a stop may take."""
    return config.server.drain_s + max(model.timeouts.stop_grace_s for model in config.models.values())


@pytest.mark.parametrize("file", COMPOSE, ids=lambda file: file.name)
def test_services_of_compose_files_have_few_rights(file: Path) -> None:
    """No capability, no way to get one, and no key or password in the file itself."""
    for service in services_of(file).values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "privileged" not in service
    for name in SECRETS:
        for value in re.findall(rf"{name}: (.*)", file.read_text()):
            assert fnmatch(value, f"${{{name}:?*}}")
