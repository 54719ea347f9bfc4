"""The entry point: takes signals before anything is imported that takes time."""

import gc
import signal
import sys
from types import FrameType
from typing import Final

from service.cli.conventions import Exit

IMPORT_THRESHOLDS: Final = (50_000, 10, 10)


def main() -> None:
    """Run the command line."""
    # Imports take half a second, or several on a busy machine. A signal meanwhile stops what has not begun.
    signal.signal(signal.SIGTERM, _leave)
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:  # a shell's command in the background ignores it, and shall
        signal.signal(signal.SIGINT, _leave)
    if "serve" in sys.argv[1:3]:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # an upgrade that is asked for too early; the default would kill
    # What is imported stays: to look through it for garbage again and again takes a tenth of the time.
    gc.set_threshold(*IMPORT_THRESHOLDS)
    from service.cli.app import run_app  # noqa: PLC0415

    signal.signal(signal.SIGINT, interrupt)
    run_app()


def _leave(_number: int, _frame: FrameType | None) -> None:
    sys.exit(Exit.DONE if "serve" in sys.argv[1:3] else Exit.INTERRUPTED)


if __name__ == "__main__":
    main()
