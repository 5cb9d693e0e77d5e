"""Input files as numbered rows, and rows as request bodies."""
