"""A plain Debian root, and programs in it, each in its own mount and PID namespaces, so that none can be left."""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.system.host import apt_options, debian_archive

SUITE = "trixie"
PACKAGES = ("ca-certificates", "netbase", "tzdata", "python3", "python3-venv")  # what python:slim has, as Debian has it
BARE = ("ca-certificates", "netbase", "tzdata")  # what images without a Python have
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
INSTALL = "apt-get update && apt-get install --yes --no-install-recommends mmdebstrap"
PROGRAMS = ("apt-get", "mmdebstrap", "unshare", "nsenter", "setpriv", "chroot", "mount", "tar")
OURS_TO_THE_END = ("setpriv", "--pdeathsig", "KILL")
SPACES = ("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child=SIGKILL")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
STEP_LIMIT_S = 900.0
Bind = tuple[Path, str]


def check_machine() -> None:
    """Fail with the packages to install; skip if no root can be made here."""
    if os.geteuid():
        pytest.skip("a root can be made by root alone")
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.fail(f"there is no {', '.join(missing)}; on Debian: {INSTALL}")
    if subprocess.run([*SPACES, "true"], check=False, capture_output=True, timeout=60).returncode:
        pytest.skip("this machine allows no namespaces")


def base_root(packages: tuple[str, ...] = PACKAGES) -> Path:
    """Return a tar of the suite's smallest root, by default with a Python: from the user's cache, or made."""
    address = debian_archive()
    what = json.dumps([SUITE, packages, address, time.strftime("%Y-%m")])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roundhouse" / "roots"
    tar = cache / f"{SUITE}-{hashlib.sha256(what.encode()).hexdigest()[:16]}.tar"
    if tar.exists():
        return tar
    cache.mkdir(parents=True, exist_ok=True)
    part = tar.with_suffix(f".{os.getpid()}.part.tar")
    gone = " ".join(f'"$1/{name}"' for name in ("etc/apt/auth.conf.d", "etc/resolv.conf", "etc/hostname"))
    command = [
        *OURS_TO_THE_END, *SPACES, "--mount-proc",
        "mmdebstrap", "--mode=root", "--variant=minbase", "--format=tar", f"--include={','.join(packages)}",
        *(f"--aptopt={line}" for line in apt_options()),
        '--setup-hook=mkdir -p "$1/etc/apt/auth.conf.d"; cp -a /etc/apt/auth.conf.d "$1/etc/apt/" || true',
        f'--customize-hook=rm -rf {gone} "$1/etc/apt/apt.conf.d/99mmdebstrap"',
        SUITE, str(part), address,
    ]  # fmt: skip
    try:
        subprocess.run(command, check=True, timeout=STEP_LIMIT_S, stderr=subprocess.DEVNULL)
        part.replace(tar)
    finally:
        part.unlink(missing_ok=True)
    return tar


@dataclass(kw_only=True)
class Place:
    """Where and as which user a program runs in a root, as an image says."""

    root: Path
    user: str = "0"
    directory: str = "/"
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})

    def identity(self) -> tuple[str, str, str]:
        """Return the user's uid, gid and home, from the root's own passwd."""
        for line in (self.root / "etc/passwd").read_text().splitlines():
            name, _, uid, gid, _, home, _ = line.split(":")
            if self.user in {name, uid}:
                return uid, gid, home
        return self.user, "0", "/"

    def command(
        self,
        argv: Sequence[str],
        *,
        more: Mapping[str, str] | None = None,
        binds: Sequence[Bind] = (),
        volumes: Sequence[Bind] = (),
        is_alone: bool = False,
    ) -> list[str]:
        """Return the command that runs ``argv`` as the first process of its namespaces.

        ``binds`` are visible, ``volumes`` are writable; ``is_alone`` has only a loopback of its own, and writes nowhere
        else but to ``/tmp``.
        """
        root = shlex.quote(str(self.root))
        lines = ["set -e", f"mount --bind {root} {root}"]
        lines += [*self.mounts(), *(line for bind in binds for line in self._bind(bind, "ro"))]
        lines += [line for bind in volumes for line in self._bind(bind, "rw")]
        if is_alone:
            lines.append(shlex.join([sys.executable, "-I", "-S", str(Path(__file__).with_name("loopback.py"))]))
            lines += [f"mount -t tmpfs -o mode=1777 tmp {root}/tmp", f"mount -o remount,bind,ro {root}"]
        uid, gid, _ = self.identity()
        # The kernel drops parent-death signals when a process changes its user.
        become = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--init-groups", "--pdeathsig=keep"]
        lines.append("exec " + shlex.join(["chroot", str(self.root), *become, *self._with_settings(argv, more)]))
        network = ["--net"] if is_alone else []
        return [*OURS_TO_THE_END, *SPACES, "--ipc", "--uts", *network, "--", "sh", "-c", "\n".join(lines)]

    def mounts(self) -> list[str]:
        """Return the lines of a shell that mount what any program expects in a root."""
        root = shlex.quote(str(self.root))
        links = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
        return [
            f"mount -t proc -o nosuid,nodev,noexec proc {root}/proc",
            f"mount -t tmpfs -o nosuid,mode=755,size=1m dev {root}/dev",
            *(f": > {root}/dev/{name}; mount --bind /dev/{name} {root}/dev/{name}" for name in DEVICES),
            *(f"ln -s {target} {root}/dev/{name}" for name, target in links.items()),
            f"mkdir -m 1777 {root}/dev/shm; mount -t tmpfs -o mode=1777,size=64m shm {root}/dev/shm",
            f"mount -t tmpfs -o nosuid,nodev,mode=755 run {root}/run",
        ]

    def inside(self, init: int, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a program beside a running one, as ``docker exec`` does; ``init`` is its first process."""
        uid, gid, _ = self.identity()
        enter = ["nsenter", "-t", str(init), "-m", "-p", "-n", "-i", "-u", "--"]
        command = [*enter, "chroot", f"--userspec={uid}:{gid}", str(self.root), *self._with_settings(argv)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, check=False
        )

    def run(self, argv: Sequence[str], more: Mapping[str, str] | None = None, binds: Sequence[Bind] = ()) -> str:
        """Run a program to its end, and return its output."""
        done = subprocess.run(
            self.command(argv, more=more, binds=binds),
            capture_output=True,
            text=True,
            timeout=STEP_LIMIT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert not done.returncode, f"{argv}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def _with_settings(self, argv: Sequence[str], more: Mapping[str, str] | None = None) -> list[str]:
        settings = {**self.environment, **(more or {}), "HOME": self.identity()[2]}
        pairs = [f"{name}={value}" for name, value in settings.items()]
        return ["env", "-i", f"--chdir={self.directory}", *pairs, *argv]

    def _bind(self, bind: Bind, mode: str) -> list[str]:
        path, place = bind
        at = shlex.quote(f"{self.root}{place}")
        make = f"mkdir -p {at}" if path.is_dir() else f'mkdir -p "$(dirname {at})"; [ -e {at} ] || : > {at}'
        return [make, f"mount --bind {shlex.quote(str(path))} {at}", f"mount -o remount,bind,{mode} {at}"]
