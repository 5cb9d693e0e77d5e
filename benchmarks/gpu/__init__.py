"""Co-location on one GPU, with one command: `python -m benchmarks.gpu` (see README.md)."""
