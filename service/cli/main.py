"""The entry point: handles signals before slow imports begin."""

import gc
import signal
import sys
from types import FrameType
from typing import Final

from service.cli.conventions import Exit
from workers.distribution import own_version

IMPORT_THRESHOLDS: Final = (50_000, 10, 10)


def main() -> None:
    """Run the command line."""
    # Imports take half a second, or several seconds on a busy machine. A signal meanwhile just ends the process.
    signal.signal(signal.SIGTERM, _leave)
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:  # a shell's background command ignores it, and must go on to
        signal.signal(signal.SIGINT, _leave)
    if "serve" in sys.argv[1:3]:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # too early for an upgrade; the default would kill
    if sys.argv[1:] == ["--version"]:  # avoids imports that take a tenth of a second
        sys.stdout.write(f"{own_version()}\n")
        return
    # Imported objects stay: collecting garbage among them takes a tenth of the import time.
    gc.set_threshold(*IMPORT_THRESHOLDS)
    from service.cli.app import run_app  # noqa: PLC0415

    signal.signal(signal.SIGINT, interrupt)
    run_app()


def _leave(_number: int, _frame: FrameType | None) -> None:
    sys.exit(Exit.DONE if "serve" in sys.argv[1:3] else Exit.INTERRUPTED)


if __name__ == "__main__":
    main()
