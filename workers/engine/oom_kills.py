"""How many processes the kernel's OOM killer has ended where our engines run: its SIGKILL does not say whose it is."""

from pathlib import Path
from typing import Final

ROOT: Final = Path("/")


def kills(root: Path = ROOT) -> int | None:
    """Return the count of our control group, else of the machine; None where the kernel does not tell it.

    Source: the kernel's admin guides, cgroup v2 (memory.events), cgroup v1 memory (memory.oom_control), vmstat.
    """
    files = [*_group_files(root), root / "proc/vmstat"]
    counts = (_count(file) for file in files)
    return next((count for count in counts if count is not None), None)


def _group_files(root: Path) -> list[Path]:
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            files.append(root / "sys/fs/cgroup" / group.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(root / "sys/fs/cgroup/memory" / group.lstrip("/") / "memory.oom_control")
    return files


def _count(file: Path) -> int | None:
    try:
        lines = file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    counts = (line.split() for line in lines if line.startswith("oom_kill "))
    return next((int(words[1]) for words in counts if len(words) > 1 and words[1].isdigit()), None)
