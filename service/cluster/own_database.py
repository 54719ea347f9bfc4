"""A PostgreSQL of the cluster's own, on this machine: only its user can connect to it."""

import hashlib
import os
import pwd
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote

import psutil

from service.errors import ConfigError

PROGRAMS: Final = ("initdb", "pg_ctl")
PACKAGED: Final = Path("/usr/lib/postgresql")  # where Debian puts each version's programs
USERS: Final = ("postgres", "daemon")  # PostgreSQL refuses to run as root
OF_ROOT: Final = Path("/var/lib/roundhouse")
PID_FILE: Final = "postmaster.pid"
PLAIN: Final = re.compile(r"[\w/.+ -]+", re.ASCII)
LIMIT_S: Final = 120  # for a program
MISSING: Final = (
    "a cluster needs PostgreSQL: set store.url or ROUNDHOUSE_STORE_URL, or install its programs (Debian: apt install"
    " postgresql), with which 'cluster up --on here' starts one of its own"
)


class OwnDatabase:
    """The PostgreSQL of a cluster on this machine, with its files in ``data`` and a socket that only its user opens.

    Root's is run by another user and kept in /var/lib, since that user may not enter root's folders.
    """

    def __init__(self, folder: Path) -> None:
        self._is_root = os.getuid() == 0
        # A socket's name has 107 bytes at most, so it cannot be in any folder.
        name = f"roundhouse-{os.getuid()}-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
        self._home = OF_ROOT / name if self._is_root else folder / "postgres"
        self._sockets = Path("/tmp") / name  # noqa: S108 - likewise
        self._user = _user() if self._is_root else None

    def __repr__(self) -> str:
        return f"<OwnDatabase in {self._home}>"

    @property
    def url(self) -> str:
        """The address for nodes of this machine."""
        return f"postgresql:///postgres?host={self._sockets}&user={quote(self._user or _own_name(), safe='')}"

    def start(self) -> None:
        """Start it unless it runs; its files are made the first time.

        Raises:
            ConfigError: its programs are not there, or fail.
        """
        initdb, _ = _programs()
        if not PLAIN.fullmatch(str(self._home)):  # pg_ctl passes it to a shell
            raise ConfigError(
                f"{self._home}: PostgreSQL's files need a folder with a plain name; set store.url instead"
            )
        if self._is_root:
            OF_ROOT.mkdir(mode=0o711, exist_ok=True)
        for folder in (self._home, self._sockets):
            self._make_private(folder)
        if not (self._data / "PG_VERSION").exists():
            self._make(initdb)
        if self.is_running():
            if self._socket.exists():
                return
            self._control("stop", "-m", "fast")  # its socket was removed, so it cannot be reached
            self._make_private(self._sockets)
        (self._data / PID_FILE).unlink(missing_ok=True)  # a process that is not this server may have its number now
        options = f"-c listen_addresses='' -c unix_socket_directories='{self._sockets}' -c max_connections=500"
        self._control("start", "-l", str(self._home / "log"), "-o", options)

    def is_running(self) -> bool:
        """Whether the process that its files name is a PostgreSQL in its folder."""
        try:
            number = int((self._data / PID_FILE).read_text().split("\n")[0])
            return Path(psutil.Process(number).cwd()) == self._data.resolve()
        except (OSError, ValueError, psutil.Error):
            return False

    def stop(self) -> None:
        """Stop it; its files stay.

        Raises:
            ConfigError: it does not stop.
        """
        if self.is_running():
            self._control("stop", "-m", "fast")
        with suppress(OSError):
            shutil.rmtree(self._sockets)

    def _control(self, *words: str) -> None:
        self._run([_programs()[1], *words, "-w", "-t", LIMIT_S // 2, "-D", self._data])

    def _make(self, initdb: str) -> None:
        """Make its files, whole or not at all."""
        half = self._home / "data.new"
        shutil.rmtree(half, ignore_errors=True)
        self._run([initdb, "--pgdata", half, "--auth", "trust", "--encoding", "UTF8", "--no-locale"])
        half.rename(self._data)

    @property
    def _socket(self) -> Path:
        return self._sockets / ".s.PGSQL.5432"

    @property
    def _data(self) -> Path:
        return self._home / "data"

    def _make_private(self, folder: Path) -> None:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        facts = folder.lstat()
        owner = os.getuid() if self._user is None else pwd.getpwnam(self._user).pw_uid
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid not in {os.getuid(), owner}:
            raise ConfigError(f"{folder} belongs to another user; remove it")
        os.chown(folder, owner, -1, follow_symlinks=False)
        folder.chmod(0o700)

    def _run(self, command: Sequence[object]) -> None:
        words = [str(word) for word in command]
        if self._user is not None:
            words = ["setpriv", f"--reuid={self._user}", "--init-groups", "--", *words]
        with tempfile.TemporaryFile("w+") as output:  # the server that pg_ctl starts would keep a pipe open
            try:
                done = subprocess.run(
                    words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/", timeout=LIMIT_S, check=False
                )
            except subprocess.TimeoutExpired as error:
                raise ConfigError(f"the cluster's PostgreSQL: {words[-1]} took over {LIMIT_S} s") from error
            output.seek(0)
            lines = output.read().strip().splitlines()[-3:]
        if done.returncode != 0:
            raise ConfigError(f"the cluster's PostgreSQL: {' | '.join(lines)}; its files are in {self._home}")


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


def _own_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError as error:
        raise ConfigError(f"PostgreSQL needs a name for the user {os.getuid()}; set store.url instead") from error


def _user() -> str:
    for name in USERS:
        with suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise ConfigError(f"PostgreSQL does not run as root, and there is none of the users {', '.join(USERS)}")
