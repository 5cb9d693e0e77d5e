"""`status --watch` in a terminal: a screen of its own as large as the window, until Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployment_rig import WAIT_S, DeploymentRig

pytestmark = pytest.mark.nightly

ENTER, LEAVE, SHOW_CURSOR = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"
NUM_ROWS = 400
CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class Window:
    """A terminal of so many lines and columns with `batchrun status --watch` in it."""

    def __init__(self, rig: DeploymentRig, lines: int, columns: int) -> None:
        self._ours, theirs = pty.openpty()
        self.said = b""
        self.resize(lines, columns)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "batchrun", "status", "--watch"],
            cwd=rig.folder,
            env={**_without_a_size(), "BATCHRUN_HOME": str(rig.home), "TERM": "xterm-256color"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)
        os.set_blocking(self._ours, False)

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def until(self, wanted: bytes, *, since: int = 0) -> int:
        """Wait until this was written after so many bytes; the bytes until now."""
        deadline_s = time.monotonic() + WAIT_S
        while wanted not in self.said[since:]:
            assert time.monotonic() < deadline_s, self.said[since:][-2000:]
            self._read()
            time.sleep(0.05)
        return len(self.said)

    def press_ctrl_c(self) -> int:
        """The exit code after Ctrl-C."""
        os.write(self._ours, b"\x03")
        while self.process.poll() is None:
            self._read()
            time.sleep(0.02)
        self._read()
        os.close(self._ours)
        return int(self.process.returncode)

    def _read(self) -> None:
        try:
            self.said += os.read(self._ours, 65_536)
        except OSError:
            return


def _without_a_size() -> dict[str, str]:
    """The environment without the window that readline or a shell noted there."""
    return {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}


def _take_terminal() -> None:
    """The command hears Ctrl-C of its terminal, even where the tests do not."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DeploymentRig]:
    made = DeploymentRig(tmp_path)
    made.use_fake_engine("--latency-s=1", price_per_hour=3600)
    yield made
    made.close()


def width_of(screen: bytes) -> int:
    """Of the longest line."""
    text = CONTROL.sub(b"", screen.rpartition(b"\x1b[H")[2]).decode("utf-8", "replace")
    return max(len(line.rstrip("\r")) for line in text.split("\n"))


def test_it_fills_the_window_follows_its_size_and_leaves_the_terminal_as_it_was(
    rig: DeploymentRig,
) -> None:
    job_id = rig.submit_rows(*(f"question {i}" for i in range(20_000))).encode()
    window = Window(rig, 24, 100)
    seen = window.until(job_id)
    window.until(b"Ctrl-C leaves", since=seen)
    assert window.said.index(ENTER) < window.said.index(job_id)

    window.resize(6, 60)
    os.kill(window.process.pid, signal.SIGWINCH)
    seen = window.until(b"in a taller window", since=seen)
    window.until(b"Ctrl-C leaves", since=seen)
    assert width_of(window.said[seen:]) <= 60

    assert window.press_ctrl_c() == 130
    assert window.said.rindex(LEAVE) > window.said.rindex(job_id)
    assert SHOW_CURSOR in window.said[window.said.rindex(b"Ctrl-C leaves") :]
    assert b"Traceback" not in window.said


def test_what_a_job_has_cost_so_far_is_told_and_kept(rig: DeploymentRig) -> None:
    job_id = rig.submit_rows(*(f"question {i}" for i in range(NUM_ROWS)))
    view = rig.wait_for(job_id, lambda view: view["engine_s"] >= 1)
    assert view["cost"] == pytest.approx(view["engine_s"], abs=0.1)
    spent_s = rig.wait_until_ended(job_id)["engine_s"]

    shown = rig.call("status", job_id).stdout
    rig.ask("down")

    assert "engine-hours, which cost " in shown
    kept = rig.job(job_id)
    assert (kept["cost"], kept["engine_s"]) == (None, pytest.approx(spent_s, abs=0.1))


def test_in_a_pipe_it_prints_what_changes_until_the_job_has_ended(rig: DeploymentRig) -> None:
    job_id = rig.submit_rows(*(f"question {i}" for i in range(NUM_ROWS)))

    done = rig.call("status", job_id, "--watch")

    assert done.returncode == 0
    assert done.stdout.count(f"{job_id}  sample") >= 2
    assert "0 done, 0 failed" in done.stdout and f"{NUM_ROWS} done, 0 failed" in done.stdout
    assert "\x1b" not in done.stdout
