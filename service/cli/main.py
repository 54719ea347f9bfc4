"""The entry point: probes of engines need no more than this; signals are handled before slow imports begin."""

import gc
import signal
import sys
from types import FrameType

IMPORT_THRESHOLDS = (50_000, 10, 10)


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["probe"] and not {"-h", "--help"} & set(sys.argv):
        from service.cli.engine_probe import main as probe  # noqa: PLC0415 - the imports below cost more than it may

        sys.exit(probe(sys.argv[2:]))
    from service.cli.conventions import Exit  # noqa: PLC0415 - see above

    def leave(_number: int, _frame: FrameType | None) -> None:
        sys.exit(Exit.DONE if "serve" in sys.argv[1:3] else Exit.INTERRUPTED)

    # Imports take half a second, or several seconds on a busy machine. A signal meanwhile just ends the process.
    signal.signal(signal.SIGTERM, leave)
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:  # a shell's background command ignores it, and must go on to
        signal.signal(signal.SIGINT, leave)
    if "serve" in sys.argv[1:3]:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # too early for an upgrade; the default would kill
    if sys.argv[1:] == ["--version"]:  # avoids imports that take a tenth of a second
        from workers.distribution import own_version  # noqa: PLC0415 - likewise

        sys.stdout.write(f"{own_version()}\n")
        return
    # Imported objects stay: collecting garbage among them takes a tenth of the import time.
    gc.set_threshold(*IMPORT_THRESHOLDS)
    from service.cli.app import run_app  # noqa: PLC0415

    signal.signal(signal.SIGINT, interrupt)
    run_app()


if __name__ == "__main__":
    main()
