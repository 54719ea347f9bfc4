"""Runs a program under the system calls that a systemd unit allows: ``confined.py UNIT PROGRAM ARGUMENT...``.

What systemd does before it starts a service, for where systemd does not run: the lines ``SystemCallFilter=`` are read
in their order, sets are those that ``systemd-analyze syscall-filter`` lists, and all else fails with EPERM.
"""

import ctypes
import errno
import os
import subprocess
import sys
from pathlib import Path

ALLOW, ERRNO = 0x7FFF0000, 0x00050000
ANALYZE = ("systemd-analyze", "syscall-filter")
PTRACE_TRACEME = 0


def main() -> None:
    """Load the filter, and become the program."""
    unit, *command = sys.argv[1:]
    load(allowed_by(Path(unit).read_text()))
    if not ctypes.CDLL(None).ptrace(PTRACE_TRACEME, 0, 0, 0):  # which anybody may, and the unit forbids
        sys.exit("the filter does not hold")
    os.execvp(command[0], command)  # noqa: S606


def allowed_by(unit: str) -> set[str]:
    """Return the names of the calls that a unit allows."""
    allowed = expand("@default")
    for line in unit.splitlines():
        name, _, value = line.partition("=")
        if name == "SystemCallFilter":
            named = {call for word in value.lstrip("~").split() for call in expand(word)}
            allowed = allowed - named if value.startswith("~") else allowed | named
    return allowed


def expand(word: str) -> set[str]:
    """Return the calls of a set, or the one that is named."""
    if not word.startswith("@"):
        return {word}
    listed = subprocess.run([*ANALYZE, word], check=True, capture_output=True, text=True)
    words = [line.strip() for line in listed.stdout.splitlines()[1:]]
    return {call for each in words if each and not each.startswith("#") for call in expand(each)}


def load(calls: set[str]) -> None:
    """Have the kernel refuse all other calls of this process and those that it starts."""
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ERRNO | errno.EPERM))
    for call in sorted(calls):
        number = library.seccomp_syscall_resolve_name(call.encode())
        if number >= 0:  # others are of other machines
            assert not library.seccomp_rule_add(context, ALLOW, number, 0), call
    assert not library.seccomp_load(context)


if __name__ == "__main__":
    main()
