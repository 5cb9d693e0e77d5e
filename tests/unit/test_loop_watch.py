"""The thread that watches the daemon's loop: what it says, and when it ends the process."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from batchrun.server.api.watch import LoopWatch

PROGRAM = """
import asyncio, logging, sys, time
from batchrun.server.api.watch import LoopWatch
logging.basicConfig()
async def main():
    watch = LoopWatch(shown_s=0.2, ended_s=float(sys.argv[2]), look_s=0.05)
    watch.start()
    beating = asyncio.create_task(watch.beat())
    await asyncio.sleep(0.3)
    time.sleep(float(sys.argv[1]))
    while not watch.num_stalls:
        await asyncio.sleep(0.05)
    print("stalls", watch.num_stalls)
asyncio.run(main())
"""


def stand(stand_s: float, ended_s: float) -> subprocess.CompletedProcess[str]:
    """A program whose loop stands for so long, and may for `ended_s`."""
    command = [sys.executable, "-c", PROGRAM, str(stand_s), str(ended_s)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_a_loop_that_stands_and_goes_on_is_told_of() -> None:
    done = stand(3, 100)

    assert (done.returncode, done.stdout) == (0, "stalls 1\n")
    assert "loop has stood for 0 s in <string>:" in done.stderr
    assert "loop turns again" in done.stderr


def test_a_loop_that_goes_on_standing_ends_the_process_with_one_line() -> None:
    done = stand(100, 1)

    assert done.returncode == 4
    last = done.stderr.splitlines()[-1]
    assert last.startswith("batchrun: the daemon's loop stood for") and "<string>:" in last


def test_results_that_wait_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = LoopWatch(shown_s=0.1, ended_s=1e9, look_s=0.01)
    num_asked = 0

    def waits_s(_now_s: float) -> float:
        nonlocal num_asked
        num_asked += 1
        return 5.0

    watch.writer_waits_s = waits_s
    watch.start()
    while num_asked < 5:
        time.sleep(0.01)
    watch.stop()

    assert [record.getMessage() for record in caplog.records if "results" in record.message] == [
        "results have waited for 5 s to be committed"
    ]
