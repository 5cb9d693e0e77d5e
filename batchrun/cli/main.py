"""The entry point. What it imports first is little, so that Ctrl-C is never a traceback."""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command line; every failure is one line on stderr and an exit code."""
    try:
        from batchrun.cli.commands import call

        exit_code = call()
    except KeyboardInterrupt:
        exit_code = INTERRUPTED
    sys.exit(exit_code)
