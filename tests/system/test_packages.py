"""The two distributions, built and installed: the client alone, and Roundhouse, which depends on it."""

import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 600.0
USER_CODE = """
from roundhouse_client import Client, Job, Refused


def names(url: str) -> list[str]:
    with Client(url, api_key="k") as roundhouse:
        jobs: tuple[Job, ...] = roundhouse.list_jobs(limit=3).jobs
        try:
            job = roundhouse.wait_job(jobs[0].id, timeout_s=1.0)
        except Refused as refused:
            return [refused.code]
        return [job.name, *(turn.text for each in roundhouse.read_result(job.id) for turn in each.turns)]
"""
WRONG_CODE = 'from roundhouse_client import Client\n\nClient().get_job(7).mood\nClient().wait_job("x", limit="y")\n'


def run(*command: str | Path, folder: Path | None = None, status: int = 0) -> str:
    """Return a command's output and check its exit status."""
    done = subprocess.run(
        [str(each) for each in command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def built(source: Path, folder: Path) -> Path:
    """Return the wheel of a copy of the tracked files below ``source``, so that none is left among them."""
    copy = folder / "source"
    for name in run("git", "ls-files", "--cached", "--others", "--exclude-standard", folder=source).splitlines():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, copy / name, follow_symlinks=False)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder / "wheels", copy)
    (wheel,) = (folder / "wheels").iterdir()
    return wheel


def installed(wheel: Path, folder: Path, *others: Path) -> Path:
    """Return the programs of a new environment with wheels and their dependencies."""
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / "bin"
    run(
        programs / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel, *others
    )
    return programs


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


def requirements(wheel: Path) -> list[str]:
    return [str(each) for each in metadata(wheel).get_all("Requires-Dist") or []]


@pytest.fixture(scope="module")
def client_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT / "client", tmp_path_factory.mktemp("client"))


@pytest.fixture(scope="module")
def roundhouse_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT, tmp_path_factory.mktemp("roundhouse"))


def test_the_client_is_installed_without_the_service(client_wheel: Path, tmp_path: Path) -> None:
    """It needs httpx alone, and PyYAML for YAML; its types check programs that use it."""
    needed = [each for each in requirements(client_wheel) if "extra ==" not in each]
    assert [each.split(">")[0] for each in needed] == ["httpx"]
    assert [each for each in requirements(client_wheel) if each not in needed] == ['PyYAML>=6.0; extra == "yaml"']
    programs = installed(client_wheel, tmp_path)
    script = "import roundhouse_client as c, sys; print(c.Client('http://here').url, c.AsyncClient, c.TrainerClient)"
    assert "http://here" in run(programs / "python", "-c", script, folder=tmp_path)
    run(programs / "python", "-c", "import service", folder=tmp_path, status=1)
    (tmp_path / "user.py").write_text(USER_CODE)
    (tmp_path / "wrong.py").write_text(WRONG_CODE)
    mypy = (
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--python-executable",
        programs / "python",
        "--cache-dir",
        tmp_path,
    )
    run(*mypy, "user.py", folder=tmp_path)
    told = run(*mypy, "wrong.py", folder=tmp_path, status=1)
    for text in ('incompatible type "int"', 'has no attribute "mood"', 'Unexpected keyword argument "limit"'):
        assert text in told


def test_roundhouse_depends_on_the_client_of_its_version(
    roundhouse_wheel: Path, client_wheel: Path, tmp_path: Path
) -> None:
    """It contains no copy of the client: the client's values are the service's answers."""
    version = metadata(client_wheel)["Version"]
    assert f"roundhouse-client=={version}" in requirements(roundhouse_wheel)
    with zipfile.ZipFile(roundhouse_wheel) as ours, zipfile.ZipFile(client_wheel) as alone:
        assert not [name for name in ours.namelist() if name.startswith("roundhouse_client")]
        assert {"roundhouse_client/py.typed", "roundhouse_client/trainer/trainer_client.py"} <= set(alone.namelist())
    programs = installed(client_wheel, tmp_path, roundhouse_wheel)
    assert "submit" in run(programs / "roundhouse", "--help", folder=tmp_path)
    run(programs / "python", "-c", "import roundhouse_client, service.cli.app", folder=tmp_path)
    refused = run(programs / "roundhouse", "status", "--url", "http://127.0.0.1:9", folder=tmp_path, status=3)
    assert refused == ""


def test_roundhouse_contains_the_dashboard(roundhouse_wheel: Path) -> None:
    """Every file of the page, as in the repository."""
    with zipfile.ZipFile(roundhouse_wheel) as wheel:
        there = [name for name in wheel.namelist() if name.startswith("service/web/static/")]
        carried = {Path(name).name: wheel.read(name) for name in there}
    assert carried == {file.name: file.read_bytes() for file in (ROOT / "service" / "web" / "static").iterdir()}
    assert "index.html" in carried


def test_both_have_one_version(client_wheel: Path, roundhouse_wheel: Path) -> None:
    """A version of one fits the same version of the other."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert [metadata(wheel)["Version"] for wheel in (client_wheel, roundhouse_wheel)] == [told, told]
