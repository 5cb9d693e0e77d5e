"""The `batchrun` command."""
