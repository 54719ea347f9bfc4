"""A PostgreSQL of the cluster's own, on this machine: only its user can connect to it."""

import hashlib
import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from service.errors import ConfigError

PROGRAMS: Final = ("initdb", "pg_ctl")
PACKAGED: Final = Path("/usr/lib/postgresql")  # where Debian puts each version's programs
USERS: Final = ("postgres", "daemon")  # PostgreSQL refuses to run as root
START_S: Final = 60
STOP_S: Final = 60
LIMIT_S: Final = 120  # for a program
MISSING: Final = (
    "a cluster needs PostgreSQL: set store.url or ROUNDHOUSE_STORE_URL, or install its programs (Debian: apt install"
    " postgresql), with which 'cluster up --on here' starts one of its own"
)


class OwnDatabase:
    """The PostgreSQL of a cluster on this machine, with its files in ``data`` and a socket that only its user opens.

    Root's is run by another user and kept in /var/tmp, since that user may not enter root's folders.
    """

    def __init__(self, folder: Path) -> None:
        self._is_root = os.getuid() == 0
        # A socket's name has 107 bytes at most, so it cannot be in any folder.
        name = f"roundhouse-{os.getuid()}-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
        self._home = Path("/var/tmp") / name if self._is_root else folder / "postgres"  # noqa: S108 - made with 0700
        self._sockets = Path("/tmp") / name  # noqa: S108 - likewise
        self._user = _user() if self._is_root else None

    def __repr__(self) -> str:
        return f"<OwnDatabase in {self._home}>"

    @property
    def url(self) -> str:
        """The address for nodes of this machine."""
        user = self._user or pwd.getpwuid(os.getuid()).pw_name
        return f"postgresql:///postgres?host={self._sockets}&user={user}"

    def start(self) -> None:
        """Start it unless it runs; its files are made the first time.

        Raises:
            ConfigError: its programs are not there, or fail.
        """
        initdb, control = _programs()
        for folder in (self._home, self._sockets):
            self._make_private(folder)
        if not (self._data / "PG_VERSION").exists():
            self._run([initdb, "--pgdata", self._data, "--auth", "trust", "--encoding", "UTF8", "--no-locale"])
        if self.is_running(control):
            return
        options = f"-c listen_addresses='' -c unix_socket_directories='{self._sockets}' -c max_connections=500"
        log = self._home / "log"
        self._run([control, "start", "-w", "-t", START_S, "-D", self._data, "-l", log, "-o", options])

    def is_running(self, control: str | None = None) -> bool:
        """Whether it runs."""
        program = control or _programs()[1]
        return self._data.exists() and self._call([program, "status", "-D", self._data]).returncode == 0

    def stop(self) -> None:
        """Stop it; its files stay.

        Raises:
            ConfigError: it does not stop.
        """
        control = _programs()[1]
        if self.is_running(control):
            self._run([control, "stop", "-w", "-t", STOP_S, "-m", "fast", "-D", self._data])
        with suppress(OSError):
            shutil.rmtree(self._sockets)

    @property
    def _data(self) -> Path:
        return self._home / "data"

    def _make_private(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
        owner = os.getuid() if self._user is None else pwd.getpwnam(self._user).pw_uid
        if facts.st_uid not in {os.getuid(), owner} or folder.is_symlink():
            raise ConfigError(f"{folder} belongs to another user; remove it")
        os.chown(folder, owner, -1)
        folder.chmod(0o700)

    def _run(self, command: Sequence[object]) -> None:
        done = self._call(command)
        if done.returncode != 0:
            lines = (done.stdout + done.stderr).strip().splitlines()[-3:]
            raise ConfigError(f"the cluster's PostgreSQL: {' | '.join(lines)}; its files are in {self._home}")

    def _call(self, command: Sequence[object]) -> "subprocess.CompletedProcess[str]":
        words = [str(word) for word in command]
        if self._user is not None:
            words = ["setpriv", f"--reuid={self._user}", "--init-groups", "--", *words]
        with (self._home / "output").open("w+") as output:  # pg_ctl's server would keep a pipe open
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/", timeout=LIMIT_S, check=False
            )
            output.seek(0)
            return subprocess.CompletedProcess(words, done.returncode, output.read(), "")


def is_installed() -> bool:
    """Whether PostgreSQL's programs are on this machine."""
    return all(next(_places(name), None) is not None for name in PROGRAMS)


def _programs() -> tuple[str, str]:
    found = [next(_places(name), None) for name in PROGRAMS]
    if found[0] is None or found[1] is None:
        raise ConfigError(MISSING)
    return found[0], found[1]


def _places(name: str) -> Iterator[str]:
    """Yield where a program is: on the path, or the newest version that Debian has."""
    on_path = shutil.which(name)
    if on_path is not None:
        yield on_path
    versions = [each for each in PACKAGED.glob("*/bin") if (each / name).is_file()]
    yield from (str(each / name) for each in sorted(versions, key=lambda each: each.parent.name, reverse=True))


def _user() -> str:
    for name in USERS:
        with suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise ConfigError(f"PostgreSQL does not run as root, and there is none of the users {', '.join(USERS)}")
