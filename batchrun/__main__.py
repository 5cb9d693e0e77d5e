"""`python -m batchrun` is the `batchrun` command."""

from __future__ import annotations

from batchrun.cli.main import main

main()
