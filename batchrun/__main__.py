"""`python -m batchrun` is the `batchrun` command."""

from batchrun.cli.main import main

main()
