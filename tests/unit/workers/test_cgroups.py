"""The limits of control groups, in trees as systemd, Slurm, Docker and Kubernetes make them in both versions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psutil
import pytest

from workers.devices.cgroups import cores_limit, group_folders, memory_limits
from workers.devices.discovery import MIB, host_free_mib, host_memory_mib, usable_cores
from workers.devices.oom_kills import count_oom_kills
from workers.devices.readers import MachineReader

TOTAL_MIB: Final = psutil.virtual_memory().total // MIB
GIB: Final = 1024 * MIB
ENDLESS: Final = "9223372036854771712"  # how version 1 writes no limit
V2: Final = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1: Final = [
    "32 31 0:28 / /sys/fs/cgroup/memory rw,nosuid shared:10 - cgroup cgroup rw,memory",
    "33 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:11 - cgroup cgroup rw,cpu,cpuacct",
    "34 31 0:30 / /sys/fs/cgroup/systemd rw,nosuid shared:12 - cgroup cgroup rw,xattr,name=systemd",
    "35 31 0:31 / /sys/fs/cgroup/unified rw,nosuid shared:13 - cgroup2 cgroup2 rw",
]
DOCKER_V1: Final = [
    "32 31 0:28 /docker/c0ffee /sys/fs/cgroup/memory ro,nosuid master:10 - cgroup cgroup rw,memory",
    "33 31 0:29 /docker/c0ffee /sys/fs/cgroup/cpu,cpuacct ro,nosuid master:11 - cgroup cgroup rw,cpu,cpuacct",
]
IN_DOCKER: Final = ["9:memory:/docker/c0ffee", "4:cpu,cpuacct:/docker/c0ffee", "1:name=systemd:/docker/c0ffee"]
UNIT: Final = "system.slice/roundhouse.service"
JOB: Final = "slurm/uid_1000/job_7/step_0"


def tree(root: Path, mounts: list[str], groups: list[str], files: Mapping[str, str]) -> Path:
    """Make a file system with the control groups of one process."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text("".join(f"{line}\n" for line in mounts))
    (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in groups))
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("mounts", "groups", "files", "memory_mib", "cores"),
    [
        # a unit with MemoryMax=1G CPUQuota=100%
        ([V2], [f"0::/{UNIT}"], {f"{UNIT}/memory.max": str(GIB), f"{UNIT}/cpu.max": "100000 100000"}, 1024, 1.0),
        # the slice is narrower than the unit, and MemoryHigh narrower than MemoryMax
        (
            [V2],
            [f"0::/{UNIT}"],
            {
                f"{UNIT}/memory.max": str(4 * GIB),
                f"{UNIT}/cpu.max": "max 100000",
                "system.slice/memory.max": "max",
                "system.slice/memory.high": str(2 * GIB),
                "system.slice/cpu.max": "150000 100000",
            },
            2048,
            1.5,
        ),
        # a Slurm job: the limit stands two levels above
        ([V2], ["0::/system.slice/job_7/step_0"], {"system.slice/job_7/memory.max": str(3 * GIB)}, 3072, None),
        # a container sees its own group as the root
        ([V2], ["0::/"], {"memory.max": str(GIB), "cpu.max": "50000 100000"}, 1024, 0.5),
        # a process without a namespace gets the host's path of it, which does not exist there
        ([V2], ["0::/kubepods.slice/pod1/c0ffee"], {"memory.max": str(GIB)}, 1024, None),
        (
            [V2.replace(" / /sys", " /kubepods/c0ffee /sys")],
            ["0::/kubepods/c0ffee"],
            {"memory.max": str(GIB)},
            1024,
            None,
        ),
        ([V2], ["0::/../other"], {"memory.max": str(GIB)}, 1024, None),
        # version 1: a unit, a Slurm job, a container
        (
            V1,
            [f"9:memory:/{UNIT}", f"4:cpu,cpuacct:/{UNIT}", f"1:name=systemd:/{UNIT}", f"0::/{UNIT}"],
            {
                f"memory/{UNIT}/memory.limit_in_bytes": str(GIB),
                "memory/memory.limit_in_bytes": ENDLESS,
                f"cpu,cpuacct/{UNIT}/cpu.cfs_quota_us": "200000",
                f"cpu,cpuacct/{UNIT}/cpu.cfs_period_us": "100000",
                "cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            1024,
            2.0,
        ),
        (
            V1,
            [f"9:memory:/{JOB}", f"4:cpuacct,cpu:/{JOB}"],
            {
                f"memory/{JOB}/memory.limit_in_bytes": ENDLESS,
                "memory/slurm/uid_1000/job_7/memory.limit_in_bytes": str(2 * GIB),
                "memory/slurm/uid_1000/memory.limit_in_bytes": str(8 * GIB),
            },
            2048,
            None,
        ),
        (
            DOCKER_V1,
            IN_DOCKER,
            {
                "memory/memory.limit_in_bytes": str(GIB),
                "cpu,cpuacct/cpu.cfs_quota_us": "100000",
                "cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            1024,
            1.0,
        ),
        # a pod's limit above the container, which sees it in the statistics alone
        (
            DOCKER_V1,
            IN_DOCKER,
            {
                "memory/memory.limit_in_bytes": ENDLESS,
                "memory/memory.stat": f"cache 7\nhierarchical_memory_limit {GIB}",
            },
            1024,
            None,
        ),
        # a group above that charges nothing to itself
        (
            V1,
            ["9:memory:/a/b"],
            {
                "memory/a/b/memory.limit_in_bytes": str(2 * GIB),
                "memory/a/memory.limit_in_bytes": str(GIB),
                "memory/a/memory.use_hierarchy": "0",
            },
            2048,
            None,
        ),
        # nothing bounds it
        (
            [V2],
            ["0::/init.scope"],
            {"init.scope/memory.max": "max", "init.scope/cpu.max": "max 100000"},
            TOTAL_MIB,
            None,
        ),
        (V1, ["9:memory:/"], {"memory/memory.limit_in_bytes": ENDLESS}, TOTAL_MIB, None),
        ([V2], ["0::/a"], {"a/memory.max": str(2 * TOTAL_MIB * MIB)}, TOTAL_MIB, None),
        # files that say nothing
        ([V2], ["0::/a"], {"a/memory.max": "", "a/cpu.max": "1 0"}, TOTAL_MIB, None),
        ([V2], ["", "x", "0::/a"], {"a/memory.max": "lots", "a/cpu.max": "0 100000"}, TOTAL_MIB, None),
        # no table of mounts: the usual places
        ([], [f"0::/{UNIT}"], {f"{UNIT}/memory.max": str(GIB)}, 1024, None),
        ([], ["9:memory:/x"], {"memory/x/memory.limit_in_bytes": str(GIB)}, 1024, None),
        ([], [], {}, TOTAL_MIB, None),
    ],
)
def test_the_smallest_limit_from_the_own_group_up_counts(
    tmp_path: Path, mounts: list[str], groups: list[str], files: dict[str, str], memory_mib: int, cores: float | None
) -> None:
    """Of memory and of cores, in both versions, in a unit, a job or a container."""
    root = tree(tmp_path, mounts, groups, files)
    assert host_memory_mib(root) == min(memory_mib, TOTAL_MIB)
    assert cores_limit(root) == cores


@pytest.mark.parametrize(
    ("quota", "cores"), [("50000", 1), ("100000", 1), ("100001", 2), ("99900000", 16), ("max", 16)]
)
def test_a_part_of_a_core_counts_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    """There are never more cores than the affinity allows."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    assert usable_cores(tree(tmp_path, [V2], ["0::/u"], {"u/cpu.max": f"{quota} 100000"})) == cores


def test_memory_in_use_is_that_of_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the unit's own 1 GiB 824 MiB are left, and of its slice 300 MiB: others there use the rest.

    Cache counts as free.
    """
    files = {
        "s/u/memory.max": str(GIB),
        "s/u/memory.current": str(300 * MIB),
        "s/u/memory.stat": f"anon {200 * MIB}\ninactive_file {100 * MIB}",
        "s/memory.max": str(2 * GIB),
        "s/memory.current": str(1748 * MIB),
    }
    root = tree(tmp_path, [V2], ["0::/s/u"], files)
    assert [(each.limit // MIB, each.used // MIB) for each in memory_limits(root)] == [(1024, 200), (2048, 1748)]
    assert host_free_mib(root) == 300
    monkeypatch.setattr("workers.devices.readers.host_memory_mib", lambda: host_memory_mib(root))
    monkeypatch.setattr("workers.devices.readers.host_free_mib", lambda: host_free_mib(root))
    reader = MachineReader(tmp_path / "no log")
    host = reader.memory()["cpu"]
    reader.close()
    assert (host.total_mib, host.used_mib) == (1024, 724)


def test_a_mount_whose_path_has_a_blank_is_found(tmp_path: Path) -> None:
    """The kernel writes the blank as an octal number."""
    root = tree(tmp_path, [V2.replace("/sys/fs/cgroup", r"/sys/fs/cgroup/my\040own")], ["0::/u"], {"my own/u/x": ""})
    assert group_folders("memory", root) == [root / "sys/fs/cgroup/my own/u", root / "sys/fs/cgroup/my own"]


@pytest.mark.parametrize(
    ("mounts", "groups", "files", "kills"),
    [
        ([V2], [f"0::/{UNIT}"], {f"{UNIT}/memory.events": "oom 3\noom_kill 2"}, 2),
        (V1, [f"9:memory:/{UNIT}"], {f"memory/{UNIT}/memory.oom_control": "under_oom 0\noom_kill 4"}, 4),
        (DOCKER_V1, IN_DOCKER, {"memory/memory.oom_control": "oom_kill_disable 0\noom_kill 1"}, 1),
        ([V2], ["0::/"], {}, 9),  # the machine's count
    ],
)
def test_out_of_memory_kills_are_those_of_the_own_group(
    tmp_path: Path, mounts: list[str], groups: list[str], files: dict[str, str], kills: int
) -> None:
    """In a container of version 1 too, where the group's path differs from the one that the process sees."""
    root = tree(tmp_path, mounts, groups, files)
    (root / "proc/vmstat").write_text("nr_free_pages 7\noom_kill 9\n")
    assert count_oom_kills(root) == kills
