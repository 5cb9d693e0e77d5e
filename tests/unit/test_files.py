"""Small files that are written whole: what a kill leaves, and what the next write does."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest

from batchrun.failpoints import VARIABLE
from batchrun.files import write_atomically

PROGRAM = """
import sys
from pathlib import Path
from batchrun.files import write_atomically
write_atomically(Path(sys.argv[1]), b"new")
"""


def test_a_writer_killed_before_the_rename_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_atomically(path, b"old")

    killed = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)],
        env={**os.environ, VARIABLE: "file.rename.before=kill"},
        check=False,
    )

    assert killed.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 2


def test_the_next_write_removes_what_a_killed_writer_left(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    (tmp_path / ".record.json.1a2b.part").write_bytes(b"half")
    running = tmp_path / ".record.json.3c4d.part"
    with running.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write_atomically(path, b"new", mode=0o600)

    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(tmp_path.iterdir()) == sorted([path, running])


def test_what_a_killed_writer_left_on_nfs_is_removed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def lock_as_nfs(file: BinaryIO, kind: int) -> None:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "not open for writing")
        flock(file, kind)

    monkeypatch.setattr(fcntl, "flock", lock_as_nfs)
    (tmp_path / ".record.json.1a2b.part").write_bytes(b"half")

    write_atomically(tmp_path / "record.json", b"new")

    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_a_name_of_the_greatest_length_is_written_and_what_a_killed_writer_left_removed(
    tmp_path: Path,
) -> None:
    path = tmp_path / ("x" * 250 + ".json")
    killed = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)],
        env={**os.environ, VARIABLE: "file.rename.before=kill"},
        check=False,
    )
    left = list(tmp_path.iterdir())

    write_atomically(path, b"new")

    assert (killed.returncode, len(left)) == (-signal.SIGKILL, 1)
    assert (list(tmp_path.iterdir()), path.read_bytes()) == ([path], b"new")
