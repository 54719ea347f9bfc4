"""The limits of this program's control groups, from its own up to the root that it can see: versions 1 and 2.

A systemd unit and a Slurm job are groups below the root; a container often sees its own group as the root. ``root`` is
the root of the file system, another one in tests.

Source: the kernel's admin guides, "Control Group v2" and "cgroup-v1"; proc_pid_cgroup(5) and proc_pid_mountinfo(5).
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path("/")
_OCTAL: Final = re.compile(r"\\([0-7]{3})")  # an escaped character in a mount's path, such as a blank
_STAT_LIMIT: Final = "hierarchical_memory_limit"


class GroupMemory(NamedTuple):
    """The memory limit of one group in bytes, and its used memory that cannot be reclaimed."""

    limit: int
    used: int


class _Mount(NamedTuple):
    is_v2: bool
    controllers: frozenset[str]
    top: str  # top of its hierarchy: the mounted group
    point: Path


def memory_limits(root: Path = ROOT) -> list[GroupMemory]:
    """Return the memory of each group that bounds it, its own first."""
    found: list[GroupMemory] = []
    for place, folder in enumerate(group_folders("memory", root)):
        if place and _number(folder / "memory.use_hierarchy") == 0:
            continue  # groups below it charge nothing to it
        stat = _stat(folder / "memory.stat")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        kept = used - stat.get("total_inactive_file", stat.get("inactive_file", 0))  # the rest is cache
        # Above memory.high a group is slowed to a standstill, so memory beyond it does not count.
        limits = [_number(folder / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
        known = [limit for limit in (*limits, stat.get(_STAT_LIMIT)) if limit is not None]
        if known:
            found.append(GroupMemory(limit=min(known), used=max(0, kept)))
    return found


def cores_limit(root: Path = ROOT) -> float | None:
    """Return the smallest limit of cores among the groups; None if none has a limit.

    The affinity of the process already says which cores they are (``cpuset``).
    """
    shares = [share for folder in group_folders("cpu", root) if (share := _cores(folder)) is not None]
    return min(shares, default=None)


def group_folders(controller: str, root: Path = ROOT) -> list[Path]:
    """Return the folders of a controller's groups, its own first; version 1's first if both are mounted."""
    groups = _groups(root)
    found: list[Path] = []
    for mount in sorted(_mounts(root), key=lambda each: each.is_v2):
        if mount.is_v2 or controller in mount.controllers:
            own = groups.get("" if mount.is_v2 else controller, "/")
            found += [folder for folder in _upwards(mount, own) if folder not in found]
    return found


def _groups(root: Path) -> dict[str, str]:
    """Return this process's group per controller of version 1, and that of version 2 under the name ""."""
    found: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, group = ([*line.split(":", 2), "", ""])[:3]
        found |= dict.fromkeys(controllers.split(","), group)
    return found


def _mounts(root: Path) -> list[_Mount]:
    found = [mount for line in _lines(root / "proc/self/mountinfo") if (mount := _mount(line, root)) is not None]
    if found:
        return found
    usual = root / "sys/fs/cgroup"
    names = ("memory", "cpu", "cpu,cpuacct")
    old = [_Mount(False, frozenset(name.split(",")), "/", usual / name) for name in names]
    return [_Mount(True, frozenset(), "/", usual), *old]


def _mount(line: str, root: Path) -> _Mount | None:
    before, _, after = line.partition(" - ")
    place, system = before.split(" "), after.split(" ")
    if system[0] not in {"cgroup", "cgroup2"} or len(place) < 5 or len(system) < 3:  # noqa: PLR2004 - fields of a line
        return None
    top, point = (_OCTAL.sub(lambda found: chr(int(found[1], 8)), each) for each in place[3:5])
    return _Mount(system[0] == "cgroup2", frozenset(system[2].split(",")), top, root / point.lstrip("/"))


def _upwards(mount: _Mount, group: str) -> Iterator[Path]:
    """Yield the folders from a group up to the mount; only the mount's if the group is not below it.

    A container sees its own group as the root, and its path may differ from the mount's.
    """
    top = mount.top.rstrip("/")
    is_below = group == top or group.startswith(f"{top}/")
    parts = [part for part in group[len(top) :].split("/") if part] if is_below and ".." not in group else []
    for count in range(len(parts), -1, -1):
        folder = mount.point.joinpath(*parts[:count])
        if folder.is_dir():
            yield folder


def _cores(folder: Path) -> float | None:
    words = " ".join(_lines(folder / "cpu.max")).split()
    if not words:
        words = [*_lines(folder / "cpu.cfs_quota_us"), *_lines(folder / "cpu.cfs_period_us")]
    is_bound = len(words) == 2 and all(word.strip().isdecimal() for word in words)  # noqa: PLR2004 - quota, period
    quota, period = map(int, words) if is_bound else (0, 0)
    return quota / period if quota > 0 and period > 0 else None


def _stat(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in _lines(file))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}  # noqa: PLR2004


def _number(file: Path) -> int | None:
    text = " ".join(_lines(file)).strip()
    return int(text) if text.isdecimal() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
