"""The `batchrun` command, also as `python -m batchrun`."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command line. Ctrl-C while it is loaded just ends it, without a traceback."""
    _open_missing_streams()
    if may_interrupt := signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from batchrun.cli.main import main as run

    if may_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _open_missing_streams() -> None:
    """Nothing in place of standard streams that the caller closed: no file gets their numbers."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: PTH123, SIM115


if __name__ == "__main__":
    main()
