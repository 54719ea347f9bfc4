"""The order for the nodes of a cluster: a file that every machine reads, and only its user can read.

It holds the values of variables, so keys and passwords reach nodes by this file alone: they appear on no command line
and in no scheduler's record.
"""

import hashlib
import os
import stat
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from service.errors import ConfigError
from workers.files.atomic import replace_file

FOLDER: Final = "roundhouse-cluster"  # beside the configuration
FILE: Final = "cluster.json"
MOST_BYTES: Final = 1024 * 1024
PRIVATE: Final = 0o600


class ClusterHost(StrEnum):
    """The scheduler, or the way, that places nodes on machines."""

    HERE = "here"
    SSH = "ssh"
    SLURM = "slurm"
    RAY = "ray"
    KUBERNETES = "kubernetes"


class ClusterOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that a cluster's nodes are started with; paths are the same on every machine.

    ``mark`` begins the id of each of its nodes, ``digest`` is the configuration's, ``options`` go to the scheduler's
    program, ``environment`` holds the variables that the configuration reads. ``job`` is the scheduler's name for the
    cluster, once it has one. ``has_database``: the cluster's PostgreSQL runs on this machine and ends with it.
    """

    on: ClusterHost
    mark: str
    config: str
    digest: str
    nodes: int
    most: int
    command: tuple[str, ...]
    host: str
    port: int
    state_dir: str
    drain_s: float
    environment: dict[str, str]
    address: str | None = None
    options: tuple[str, ...] = ()
    job: str | None = None
    has_database: bool = False

    @property
    def store_url(self) -> str:
        """The address of the database."""
        return self.environment["ROUNDHOUSE_STORE_URL"]


def folder_of(config: Path) -> Path:
    """Return the folder of the cluster that runs a configuration."""
    return config.resolve().parent / FOLDER


def digest_of_text(config: Path) -> str:
    """Return the digest of a configuration.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return hashlib.sha256(config.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"{config}: {error.strerror}; it must be at the same path on every machine") from error


def make_private(folder: Path) -> None:
    """Make a folder that only its user can enter, or check that one is.

    Raises:
        ConfigError: it is another user's, or others can write in it, or it cannot be made.
    """
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        facts = folder.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
            raise ConfigError(f"{folder}: a folder of yours is needed there, in which no other user can write")
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; a cluster keeps its order and its logs there") from error


def make_folder(folder: Path) -> None:
    """Make the cluster's folder, which no repository takes in.

    Raises:
        ConfigError: it is another user's, or cannot be made.
    """
    make_private(folder)
    with suppress(FileExistsError):
        handle = os.open(folder / ".gitignore", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, PRIVATE)
        with os.fdopen(handle, "w") as file:
            file.write("*\n")


def write_order(folder: Path, order: ClusterOrder) -> None:
    """Write the order.

    Raises:
        OSError: it cannot be written.
    """
    make_folder(folder)
    replace_file(folder / FILE, msgspec.json.encode(order), PRIVATE)


def read_order(folder: Path) -> ClusterOrder | None:
    """Return the order; None where no cluster is up.

    Raises:
        ConfigError: others can read or write the file, or it is damaged.
    """
    path = folder / FILE
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise ConfigError(f"{path}: not a file; delete it")
            if facts.st_uid != os.getuid():
                raise ConfigError(f"{path}: this cluster is another user's, who alone can use it")
            if stat.S_IMODE(facts.st_mode) & 0o077:
                raise ConfigError(f"{path}: it holds secrets, and others can use it: chmod 600")
            return msgspec.json.decode(file.read(MOST_BYTES), type=ClusterOrder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: not a cluster's order: {error}; end its nodes, and delete the file") from error


def needed_order(folder: Path) -> ClusterOrder:
    """Return the order of a cluster that must be up.

    Raises:
        ConfigError: none is, or its file cannot be used.
    """
    order = read_order(folder)
    if order is None:
        raise ConfigError(f"no cluster is up for this configuration: {folder / FILE} is not there")
    return order
