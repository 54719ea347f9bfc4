"""The program behind ``offload``: takes calls one at a time on its standard input, and answers on its output.

A message is its length in ``HEAD`` bytes and a pickle: first the parent's search path, then ``(function, arguments,
limit_s)`` for each call; an answer is ``(is_error, value)``. It ends with its input, with its parent, or after
``IDLE_S`` without a call.
"""

import ctypes
import math
import os
import pickle
import select
import signal
import sys
from contextlib import suppress
from typing import Any, Final

HEAD: Final = 8
IDLE_S: Final = 300.0
GRACE_S: Final = 20.0  # wall-clock time beyond a call's own limit
PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Serve until the input ends."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    source, answers = sys.stdin.fileno(), os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a function, or a process of it, prints is no answer
    sys.stdout = sys.stderr
    path = _receive(source)
    if path is None:
        return
    sys.path = path
    while (asked := _receive(source)) is not None:
        answer = _call(*asked)
        answers.write(len(answer).to_bytes(HEAD, "big") + answer)
        answers.flush()
    if os.getpgrp() == os.getpid():  # functions may have left processes behind
        os.killpg(0, signal.SIGKILL)


def _receive(source: int) -> Any:  # noqa: ANN401 - any pickled value
    head = _exactly(source, HEAD) if select.select([source], [], [], IDLE_S)[0] else b""
    if len(head) < HEAD:
        return None
    try:
        return pickle.loads(_exactly(source, int.from_bytes(head, "big")))  # noqa: S301 - from our parent
    except Exception as error:  # noqa: BLE001 - a function may be in a module that cannot be imported here
        return _raise, (error,), GRACE_S


def _exactly(source: int, size: int) -> bytes:
    """Read ``size`` bytes, or fewer at the end; unbuffered, since the next wait looks at the pipe itself."""
    read = bytearray()
    while len(read) < size and (piece := os.read(source, size - len(read))):
        read += piece
    return bytes(read)


def _call(function: Any, arguments: tuple[Any, ...], limit_s: float) -> bytes:  # noqa: ANN401 - a plain function
    try:
        return pickle.dumps((False, _bounded(function, arguments, limit_s)))
    except BaseException as error:  # noqa: BLE001 - it is the caller's
        if isinstance(error, Exception):  # the others would end the caller's program
            with suppress(Exception):  # the error holds values that cannot be pickled
                return pickle.dumps((True, error))
        return pickle.dumps((True, RuntimeError(f"{type(error).__name__}: {error}")))


def _bounded(function: Any, arguments: tuple[Any, ...], limit_s: float) -> object:  # noqa: ANN401 - as above
    """Run within the limit: beyond it is an error, and far beyond it the process ends."""
    signal.signal(signal.SIGPROF, _outrun)
    signal.setitimer(signal.ITIMER_PROF, limit_s)  # counts this process's own time: pauses of the machine do not count
    signal.alarm(math.ceil(limit_s + GRACE_S))
    try:
        return function(*arguments)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)


def _outrun(_number: int, _frame: object) -> None:
    raise TimeoutError("it takes too long")


def _raise(error: Exception) -> None:
    raise error


if __name__ == "__main__":
    main()
