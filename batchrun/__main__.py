"""The `batchrun` command, also as `python -m batchrun`."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line. Ctrl-C while it is loaded just ends it, without a traceback."""
    if may_interrupt := signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from batchrun.cli.main import main as run

    if may_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
