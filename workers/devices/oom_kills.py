"""The kernel's count of processes that it killed for memory."""

from pathlib import Path

from workers.devices.cgroups import ROOT, group_folders


def count_oom_kills(root: Path = ROOT) -> int | None:
    """Count the OOM kills in our control group, else on the machine; None if the kernel reports none.

    Source: the kernel's admin guides, cgroup v2 (memory.events), cgroup v1 memory (memory.oom_control), vmstat.
    """
    own = group_folders("memory", root)
    files = [folder / name for folder in own for name in ("memory.events", "memory.oom_control")]
    counts = (_count(file) for file in (*files, root / "proc/vmstat"))
    return next((count for count in counts if count is not None), None)


def _count(file: Path) -> int | None:
    try:
        lines = file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    counts = (line.split() for line in lines if line.startswith("oom_kill "))
    return next((int(words[1]) for words in counts if len(words) > 1 and words[1].isdigit()), None)
