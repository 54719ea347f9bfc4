"""The image, step by step in a plain Debian root: its engine works, and its health check reports it."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness.waiting import wait_for
from tests.system.dockerfile import Image
from tests.system.machine import booted
from tests.system.root import BARE, PACKAGES, Place, base_root, check_machine

SOURCE = Path(__file__).parents[2]
START_S = 120.0
UNIT = "etc/systemd/system/roundhouse.service"
JOB = {
    "agents": [{"id": "a", "model": "tiny", "params": {"max_tokens": 24}}],
    "conversations": [{"id": "q1", "prompt": "Hello?"}],
}
ASK = """
import json, sys, time, urllib.request
def ask(path, body=None):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request("http://127.0.0.1:8080/v1/jobs" + path, body, headers)
    return json.load(urllib.request.urlopen(request, timeout=30))
job = ask("", sys.argv[1].encode())["id"]
until = time.monotonic() + 60
while ask("/" + job)["state"] in ("queued", "running") and time.monotonic() < until:
    time.sleep(0.2)
print(json.dumps(ask("/" + job + "/result")))
"""


def unpack(base: str, root: Path) -> None:
    """Make a root as bare as a base image."""
    tar = base_root(PACKAGES if base.startswith("python:") else BARE)
    command = ["tar", "-xf", str(tar), "-C", str(root), "--numeric-owner", "--xattrs", "--exclude=./dev/*"]
    subprocess.run(command, check=True, timeout=300)
    assert not list(root.rglob("libgomp.so*")), "the root is to be as bare as the image's base"
    (root / "etc/resolv.conf").touch()


@contextmanager
def built(**arguments: str) -> Iterator[Image]:
    check_machine()
    with tempfile.TemporaryDirectory(prefix="roundhouse-image-") as name:
        Path(name).chmod(0o755)
        made = Image(Path(name), SOURCE, unpack, arguments)
        made.build()
        yield made


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    with built() as made:
        yield made


class Container:
    """The image's entrypoint as the first process of its namespaces; its log is a file."""

    def __init__(self, image: Image, folder: Path) -> None:
        self._image = image
        self._log = folder / "log"
        volumes = [(_volume(image, place, folder), place) for place in image.volumes]
        argv = [*image.entrypoint, *image.command]
        with self._log.open("wb") as log:
            command = image.place.command(argv, volumes=volumes, is_alone=True)
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        wait_for(self._find_init, "it has begun")

    def _find_init(self) -> bool:
        """Find the process inside, since unshare itself ignores SIGTERM."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        self.init = int(children[0]) if children else 0
        return bool(self.init) and os.path.realpath(f"/proc/{self.init}/root") == str(self._image.place.root.resolve())

    def log(self) -> str:
        return self._log.read_text()

    def inside(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return self._image.place.inside(self.init, argv)

    def health(self) -> subprocess.CompletedProcess[str]:
        return self.inside(*self._image.health)


def _volume(image: Image, place: str, folder: Path) -> Path:
    """Make a volume as container engines do: it begins as a copy of the folder in its place, with owner and mode."""
    there, volume = image.place.root / place.lstrip("/"), folder / "volume"
    shutil.copytree(there, volume)
    os.chown(volume, there.stat().st_uid, there.stat().st_gid)
    return volume


@contextmanager
def running(image: Image, folder: Path) -> Iterator[Container]:
    container = Container(image, folder)
    try:
        yield container
    finally:
        container.process.kill()  # and with it all that is in its namespaces
        container.process.wait(30)


def test_the_image_serves_and_ends_on_sigterm(image: Image, tmp_path: Path) -> None:
    """As uid 10001, on a read-only root, under an init that reaps; with the tiny model that it makes itself."""
    with running(image, tmp_path) as container:
        assert container.health().returncode == 1, "it is not ready at once"
        wait_for(lambda: container.health().returncode == 0, "it is healthy", START_S)
        assert container.inside("id", "-u").stdout == "10001\n"
        assert container.inside("cat", "/proc/1/comm").stdout == "tini\n"
        assert "Read-only file system" in container.inside("touch", "/var/tmp/x").stderr
        done = container.inside("python", "-c", ASK, json.dumps(JOB))
        (talk,) = json.loads(done.stdout)["conversations"]
        assert (talk["state"], talk["turns"][0]["state"]) == ("completed", "completed"), container.log()
        os.kill(container.init, signal.SIGTERM)
        assert container.process.wait(60) == 0, container.log()


def test_build_tools_are_not_in_the_image(image: Image) -> None:
    """The second stage has only what runs: no source, and its user may change only the state."""
    assert not (image.place.root / "source").exists()
    theirs = [path for path in image.place.root.rglob("*") if path.lstat().st_uid == int(image.place.identity()[0])]
    assert theirs == [image.place.root / "state"]


def test_a_base_without_a_python_gets_one() -> None:
    """For example llama.cpp's server image, whose engine is a separate program."""
    with built(BASE="ghcr.io/ggml-org/llama.cpp:server") as made:
        told = made.place.run([*made.entrypoint, "version"])
        assert told.strip() == tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]["version"]
        made.place.run(["python", "-c", "import gguf, pynvml, service.cli.commands.engine_commands"])


@pytest.fixture(scope="module")
def installed(image: Image) -> Place:
    """The image's root as a machine with Roundhouse installed as docs/how-to/systemd.md says."""
    image.place.user, user = "0", image.place.user
    image.install("systemd", "procps", "dbus")
    image.place.user = user
    root = image.place.root
    shutil.copyfile(SOURCE / "deploy" / "roundhouse.service", root / UNIT)
    (root / "opt/roundhouse/.venv/bin").mkdir(parents=True)
    (root / "opt/roundhouse/.venv/bin/roundhouse").symlink_to("/opt/roundhouse/bin/roundhouse")
    (root / "opt/roundhouse/docs/how-to").mkdir(parents=True)
    shutil.copyfile(SOURCE / "docs/how-to/systemd.md", root / "opt/roundhouse/docs/how-to/systemd.md")
    (root / "etc/roundhouse.yaml").write_text("models: {tiny: {engine: embedded}}\n")
    return Place(root=root)


def test_the_unit_is_valid_and_hardened(installed: Place) -> None:
    """Systemd reads it without a warning, and rates its exposure at 2.0 of 10 or less."""
    run = installed.run
    assert run(["sh", "-c", "systemd-analyze verify --man=no roundhouse.service 2>&1"]) == ""
    run(["systemd-analyze", "security", "--offline=true", "--threshold=20", "roundhouse.service"])


def test_systemd_keeps_the_service(installed: Place) -> None:
    """On a booted machine the service runs a job within its restrictions, is ended when it hangs, and restarts.

    Its stop is clean and leaves no process.
    """
    more = (installed.root / UNIT).with_suffix(".service.d")
    more.mkdir()
    (more / "soon.conf").write_text("[Service]\nWatchdogSec=6\n")
    with booted(installed.root) as machine:
        machine.run("systemctl", "start", "roundhouse")
        assert machine.unit("roundhouse", "StatusText") == "serving at http://127.0.0.1:8080"
        assert '"state": "completed"' in machine.run("/opt/roundhouse/bin/python", "-c", ASK, json.dumps(JOB))
        first = machine.unit("roundhouse", "MainPID")
        told = machine.run("cat", f"/proc/{first}/status").replace("\t", " ")
        for line in ("NoNewPrivs: 1", "Seccomp: 2", "CapBnd: 0000000000000000"):
            assert line in told
        machine.run("kill", "-STOP", first)
        wait_for(lambda: machine.unit("roundhouse", "NRestarts") == "1", "the watchdog has bitten", START_S)
        wait_for(lambda: machine.unit("roundhouse", "ActiveState") == "active", "it serves again", START_S)
        assert "Fatal Python error: Aborted" in machine.run("journalctl", "--unit=roundhouse", "--output=cat")
        assert '"state": "completed"' in machine.run("/opt/roundhouse/bin/python", "-c", ASK, json.dumps(JOB))
        machine.run("systemctl", "stop", "roundhouse")
        ended = (machine.unit("roundhouse", "Result"), machine.unit("roundhouse", "ExecMainStatus"))
        assert ended == ("success", "0")
        machine.run("pgrep", "--uid", "roundhouse", status=1)


def test_without_a_running_engine_the_image_is_unhealthy(image: Image, tmp_path: Path) -> None:
    """The service runs without an engine: the health check names the model that has no worker."""
    image.place.user, user = "0", image.place.user
    image.place.run(["dpkg", "--purge", "libgomp1"])
    image.place.user = user
    with running(image, tmp_path) as container:
        wait_for(lambda: "libgomp.so.1" in container.log(), "the engine has failed", START_S)
        told = container.health()
        assert (told.returncode, "no ready worker for: tiny" in told.stderr) == (1, True), told
