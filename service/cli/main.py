"""The entry point: takes signals before anything is imported that takes time."""

import gc
import signal
import sys
from types import FrameType
from typing import Final

from service.cli.conventions import Exit
from workers.distribution import former_version, own_version

IMPORT_THRESHOLDS: Final = (50_000, 10, 10)
FORMER: Final = """Roundhouse {former} is installed beside this one, under its former name and with the same files. Run:
  pip uninstall roundhouse
  pip install --force-reinstall --no-deps roundhouse-llm roundhouse-client   # in a clone: ./client .
"""


def main() -> None:
    """Run the command line."""
    # Imports take half a second, or several on a busy machine. A signal meanwhile stops what has not begun.
    signal.signal(signal.SIGTERM, _leave)
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:  # a shell's command in the background ignores it, and shall
        signal.signal(signal.SIGINT, _leave)
    if "serve" in sys.argv[1:3]:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # an upgrade that is asked for too early; the default would kill
    if (former := former_version()) is not None:
        sys.stderr.write(FORMER.format(former=former))
        sys.exit(Exit.USAGE)
    if sys.argv[1:] == ["--version"]:  # what else there is takes a tenth of a second to import
        sys.stdout.write(f"{own_version()}\n")
        return
    # What is imported stays: to look through it for garbage again and again takes a tenth of the time.
    gc.set_threshold(*IMPORT_THRESHOLDS)
    from service.cli.app import run_app  # noqa: PLC0415

    signal.signal(signal.SIGINT, interrupt)
    run_app()


def _leave(_number: int, _frame: FrameType | None) -> None:
    sys.exit(Exit.DONE if "serve" in sys.argv[1:3] else Exit.INTERRUPTED)


if __name__ == "__main__":
    main()
