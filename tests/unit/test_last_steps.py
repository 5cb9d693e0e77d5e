"""What a dead engine leaves of its last steps: whole steps, the newest three, whoever killed it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchrun.wire import NUM_SLOTS, NUM_STEPS, LastSteps, make_label, read_last_steps

ROWS_A_STEP = 200
WRITER = f"""
import sys
from pathlib import Path
from batchrun.wire import LastSteps, make_label
steps = LastSteps(Path(sys.argv[1]), {ROWS_A_STEP})
for step in range(10**9):
    steps.note([make_label("job_a", step * {ROWS_A_STEP} + i) for i in range({ROWS_A_STEP})])
    if step == {NUM_SLOTS}:
        print("going", flush=True)
"""


def note(steps: LastSteps, *rows: int, job: str = "job_a") -> None:
    steps.note([make_label(job, row) for row in rows])


def rows_of(path: Path) -> set[int]:
    return {row for _, row in read_last_steps(path)}


def test_the_rows_of_the_last_three_steps_are_told(tmp_path: Path) -> None:
    steps = LastSteps(tmp_path / "e.steps", 4)
    for step in range(10):
        note(steps, step, step + 100)
        newest = range(max(step - NUM_STEPS + 1, 0), step + 1)
        assert rows_of(tmp_path / "e.steps") == {r + more for r in newest for more in (0, 100)}


def test_steps_without_rows_count(tmp_path: Path) -> None:
    steps = LastSteps(tmp_path / "e.steps", 4)
    note(steps, 1)
    for left in ({1}, {1}, set()):
        note(steps)
        assert rows_of(tmp_path / "e.steps") == left


def test_jobs_are_told_apart(tmp_path: Path) -> None:
    steps = LastSteps(tmp_path / "e.steps", 4)
    note(steps, 7, job="job_a")
    note(steps, 7, job="job with a space")
    assert read_last_steps(tmp_path / "e.steps") == {("job_a", 7), ("job with a space", 7)}


def test_no_file_a_short_one_or_noise_tells_nothing(tmp_path: Path) -> None:
    path = tmp_path / "e.steps"
    assert read_last_steps(path) == frozenset()
    for content in (b"", b"x", b"\xff" * 1000, b"\x01" * 64):
        path.write_bytes(content)
        assert read_last_steps(path) == frozenset()


def test_all_of_the_file_is_on_the_disk_before_the_first_step(tmp_path: Path) -> None:
    LastSteps(tmp_path / "e.steps", 64)
    file = (tmp_path / "e.steps").stat()
    assert file.st_size > 64
    assert 512 * file.st_blocks >= file.st_size


def test_an_engine_that_starts_anew_leaves_the_old_one_alone(tmp_path: Path) -> None:
    old = LastSteps(tmp_path / "e.steps", 4)
    note(old, 1)
    new = LastSteps(tmp_path / "e.steps", 4)
    note(old, 2)
    assert rows_of(tmp_path / "e.steps") == set()
    note(new, 3)
    assert rows_of(tmp_path / "e.steps") == {3}


@pytest.mark.parametrize("attempt", range(8))
def test_a_kill_at_any_instant_leaves_three_whole_steps(tmp_path: Path, attempt: int) -> None:
    path = tmp_path / "e.steps"
    with subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None and engine.stdout.readline() == b"going\n"
        time.sleep(0.001 * attempt)
        engine.kill()
    rows = rows_of(path)
    first = min(rows)
    assert first % ROWS_A_STEP == 0
    assert rows == set(range(first, first + NUM_STEPS * ROWS_A_STEP))
