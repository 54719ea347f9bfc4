"""The order for the nodes of a cluster: a file that every machine reads, and only its user can read.

It holds the values of variables, so keys and passwords reach nodes by this file alone: they appear on no command line
and in no scheduler's record.
"""

import hashlib
import os
import stat
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

    ``digest`` is the configuration's, ``options`` go to the scheduler's program, ``environment`` holds the variables
    that the configuration reads. ``job`` is the scheduler's name for the cluster, once it has one. ``has_database``:
    the cluster's PostgreSQL runs on this machine and ends with it.
    """

    on: ClusterHost
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


def make_folder(folder: Path) -> None:
    """Make the cluster's folder, which only its user can enter and no repository takes in.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")


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
        with path.open("rb") as file:
            facts = os.fstat(file.fileno())
            if facts.st_uid != os.getuid() or stat.S_IMODE(facts.st_mode) & 0o077:
                raise ConfigError(f"{path}: it holds secrets, and others can use it: chmod 600, and own it")
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
