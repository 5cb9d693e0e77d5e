"""The lock files: each version is one, and pip takes no other file for it than it had."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = {
    "locks/cpu.txt": 100,
    "batchrun/engine/engine-cpu.txt": 100,
    "locks/ray.txt": 1,
    "locks/rivals.txt": 30,
}
"""With how many packages each has at least, and more."""


@pytest.mark.parametrize(("name", "fewest"), LOCKS.items())
def test_every_locked_version_has_the_hashes_of_its_files(name: str, fewest: int) -> None:
    text = (ROOT / name).read_text("utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]

    assert len(lines) > fewest
    for line in lines:
        found = re.fullmatch(
            r"[\w.-]+(\[[\w,-]+\])?==[\w.]+( +--hash=sha256:[0-9a-f]{64})+ *", line
        )
        assert found is not None, line[:200]
    assert "://" not in text
