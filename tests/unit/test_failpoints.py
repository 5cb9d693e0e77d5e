"""Failpoints do nothing unless the environment asks for it, and then what it asks for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from batchrun.failpoints import NAMES, VARIABLE, failpoint, parse_actions

WRITE = """\
from pathlib import Path
from batchrun.files import atomic_file
with atomic_file(Path("out")) as file:
    file.write(b"whole")
"""


def run(program: str, folder: Path, actions: str) -> subprocess.CompletedProcess[str]:
    """A few lines of Python in a process whose failpoints are these."""
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=os.environ | {VARIABLE: actions},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", NAMES)
def test_without_the_variable_nothing_happens(name: str) -> None:
    failpoint(name)


def test_a_process_can_end_itself_just_before_a_rename(tmp_path: Path) -> None:
    done = run(WRITE, tmp_path, "output.rename.before=kill")

    assert done.returncode == -signal.SIGKILL
    assert [path.suffix for path in tmp_path.iterdir()] == [".part"]


def test_a_process_can_end_itself_just_after_a_rename(tmp_path: Path) -> None:
    done = run(WRITE, tmp_path, "output.rename.after=kill")

    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "out").read_bytes() == b"whole"


def test_a_full_disk_can_be_played(tmp_path: Path) -> None:
    done = run(WRITE, tmp_path, "output.rename.before=raise")

    assert "StoreFullError: out: no room to write the results" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_nobody_to_ask_lets_a_process_go_on(tmp_path: Path) -> None:
    done = run(WRITE, tmp_path, f"*=ask:{tmp_path}/nobody")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out").read_bytes() == b"whole"


def test_the_clock_is_moved_by_what_the_file_says(tmp_path: Path) -> None:
    (tmp_path / "clock").write_text("-7200")
    program = "import batchrun.failpoints, time; print(time.time() - time.clock_gettime(0))"

    done = run(program, tmp_path, f"clock={tmp_path}/clock")

    assert float(done.stdout) == pytest.approx(-7200, abs=60)


@pytest.mark.parametrize("actions", ["nowhere=kill", "store.commit.before=explode"])
def test_what_does_not_exist_is_refused(actions: str) -> None:
    with pytest.raises(ValueError, match="no such"):
        parse_actions(actions)
