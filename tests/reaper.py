"""Ends what a test run leaves behind, however the run ends.

Daemons, gateways and engines outlive those who start them. Each process that a run starts, directly
or not, has `RUN_VARIABLE` in its environment. A helper process waits until the run's end of a pipe
closes, which a `kill -9` of the run does too, and then kills all that still have it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable

import psutil

RUN_VARIABLE = "TEST_RUN_OF_BATCHRUN"
"""Not BATCHRUN_...: an engine does not get those."""
ROUNDS = 50
"""A process that is killed may have started another just before."""
PAUSE_S = 0.1


def begin_run() -> Callable[[], None]:
    """Mark all processes that this one starts from now on; returns what ends them and waits."""
    run = uuid.uuid4().hex
    os.environ[RUN_VARIABLE] = run
    helper = subprocess.Popen(
        [sys.executable, __file__, run], stdin=subprocess.PIPE, start_new_session=True
    )

    def end() -> None:
        os.environ.pop(RUN_VARIABLE, None)
        helper.communicate()

    return end


def processes_of(run: str) -> list[psutil.Process]:
    """All living processes of a run, but this one."""
    return [
        process
        for process in psutil.process_iter()
        if process.pid != os.getpid() and _belongs(process, run)
    ]


def _belongs(process: psutil.Process, run: str) -> bool:
    try:
        is_dead = process.status() == psutil.STATUS_ZOMBIE
        return not is_dead and process.environ().get(RUN_VARIABLE) == run
    except (psutil.Error, OSError):
        return False


def kill_all(run: str) -> None:
    """Kill every process of a run, and those that they start meanwhile."""
    for _ in range(ROUNDS):
        left = processes_of(run)
        if not left:
            return
        for process in left:
            try:
                process.kill()
            except psutil.Error:
                continue
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    kill_all(sys.argv[1])
