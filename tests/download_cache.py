"""Where tests keep what they fetched once."""

from __future__ import annotations

import os
from pathlib import Path


def download_cache() -> Path:
    """`BATCHRUN_TEST_CACHE`, else `batchrun-tests` in the user's cache folder."""
    named = os.environ.get("BATCHRUN_TEST_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchrun-tests"
