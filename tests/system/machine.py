"""A machine for a root: systemd as the first process of its own namespaces and cgroup, which all end with it."""

import os
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness.waiting import wait_for
from tests.system.root import OURS_TO_THE_END, SPACES, Place

SYSTEMD = ("/lib/systemd/systemd", "--unit=multi-user.target", "--log-target=journal")
BOOT_S = 60.0
END_S = 30.0


class Machine:
    """A machine that has booted."""

    def __init__(self, place: Place, init: int) -> None:
        self._place = place
        self._init = init

    def run(self, *argv: str, status: int = 0) -> str:
        """Run a program in it as root; return its output, stripped."""
        done = self._place.inside(self._init, argv)
        assert done.returncode == status, f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout.strip()

    def unit(self, name: str, what: str) -> str:
        """Return a unit's property."""
        return self.run("systemctl", "show", "--property", what, "--value", name)


@contextmanager
def booted(root: Path) -> Iterator[Machine]:
    """Boot ``root`` for a block; skip the test without a cgroup of version 2."""
    cgroup = _own_cgroup()
    place = Place(root=root)
    command = ["sh", "-c", f"echo $$ > {cgroup}/cgroup.procs && exec {shlex.join(_command(place))}"]
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing)
    try:
        init = _first_process(process.pid, root)
        machine = Machine(place, init)
        wait_for(
            lambda: place.inside(init, ["systemctl", "list-jobs"]).stdout == "No jobs running.\n", "it is up", BOOT_S
        )
        yield machine
    finally:
        process.kill()  # and with it all that is in its namespaces
        process.wait(END_S)
        wait_for(lambda: _removed(cgroup), "its cgroups are gone", END_S)


def _command(place: Place) -> list[str]:
    at = shlex.quote(str(place.root))
    lines = [
        "set -e",
        f"mount --bind {at} {at}",  # systemd wants its root to be a mount
        *place.mounts(),
        f"mount -t sysfs -o ro sysfs {at}/sys",
        f"mount -t cgroup2 cgroup2 {at}/sys/fs/cgroup",
        f"mount -t tmpfs tmpfs {at}/tmp",
        shlex.join([sys.executable, "-I", "-S", str(Path(__file__).with_name("loopback.py"))]),
        f"exec chroot {at} env -i container=roundhouse-tests PATH=/usr/sbin:/usr/bin {shlex.join(SYSTEMD)}",
    ]
    spaces = [*SPACES, "--cgroup", "--ipc", "--uts", "--net"]
    return [*OURS_TO_THE_END, *spaces, "--", "sh", "-c", "\n".join(lines)]


def _own_cgroup() -> Path:
    """Make a cgroup below the first hierarchy of version 2; what systemd makes stays below it."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    for _, at, kind, *_ in mounts:
        own = Path(at, f"roundhouse-test-{uuid.uuid4().hex[:8]}")
        if kind == "cgroup2" and os.access(at, os.W_OK):
            try:
                own.mkdir()
            except OSError:
                continue
            return own
    pytest.skip("this machine has no cgroups of version 2 that may be written")


def _removed(cgroup: Path) -> bool:
    """Return whether the cgroup and those below it are gone; one with processes that still end is not."""
    for folder, _, _ in os.walk(cgroup, topdown=False):
        try:
            Path(folder).rmdir()
        except OSError:
            return False
    return not cgroup.exists()


def _first_process(pid: int, root: Path) -> int:
    """Return the machine's first process as we see it, once it runs in its root."""
    found: list[int] = []

    def is_there() -> bool:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        found[:] = [int(child) for child in children]
        return bool(found) and os.path.realpath(f"/proc/{found[0]}/root") == str(root.resolve())

    wait_for(is_there, "it begins to boot", BOOT_S)
    return found[0]
