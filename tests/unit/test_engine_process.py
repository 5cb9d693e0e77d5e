"""Detached children: known again as soon as they are started, and gone when they are ended."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchrun.engine import process
from batchrun.engine.process import ProcessRecord

NUM_CHILDREN = 20


def start_child(folder: Path, number: int) -> ProcessRecord:
    """A child that does nothing for a minute."""
    return process.spawn(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        env={},
        log_path=folder / f"{number}.log",
        record_path=folder / f"{number}.json",
    )


@pytest.fixture
def quick_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a slow disk would hide what is tested."""
    shared_memory = Path("/dev/shm")
    parent = shared_memory if shared_memory.is_dir() else tmp_path
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield Path(folder)


def test_a_child_is_known_the_moment_it_is_started(quick_folder: Path) -> None:
    records = []
    are_known = []
    for number in range(NUM_CHILDREN):
        records.append(start_child(quick_folder, number))
        are_known.append(process.is_alive(records[-1]))
    for record in records:
        process.terminate(record, grace_s=5.0)

    assert are_known == [True] * NUM_CHILDREN
    assert not any(process.is_alive(record) for record in records)
