"""The entry point: takes signals before anything is imported that takes time."""

import signal
import sys
from types import FrameType
from typing import Final

EXIT_DONE: Final = 0
EXIT_INTERRUPTED: Final = 130


def main() -> None:
    """Run the command line."""
    # Imports take half a second, or several on a busy machine. A SIGTERM meanwhile stops what has not begun.
    signal.signal(signal.SIGTERM, _leave)
    from service.cli.app import run_app  # noqa: PLC0415

    run_app()


def _leave(_number: int, _frame: FrameType | None) -> None:
    sys.exit(EXIT_DONE if "serve" in sys.argv[1:3] else EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
