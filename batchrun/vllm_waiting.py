"""How vLLM's processes wait for one another on a CPU: in short naps, not spinning.

vLLM's engine and its workers pass messages through shared memory. A reader looks again and again,
with `sched_yield` between two looks (`SpinCondition` in `shm_broadcast.py`), until a second has
passed since its last message, so it takes half a core or more that a CPU engine, its API server and
their callers need. Under Linux 6.18 on 2 cores it also kept other processes off them for up to
100 s. So the CPU engines that batchrun starts nap between two looks, at a cost of about 0.4 ms a
step (`docs/engines.md`). GPU engines have cores to spare, and steps so short that a nap would show.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import time

WAIT_VARIABLE = "BATCHRUN_ENGINE_WAIT"
NAPPING = "nap"

NAP_S = 20e-6
"""Steps of a CPU engine take milliseconds."""

PR_SET_TIMERSLACK = 29
"""Of Linux's `prctl`; the slack is 50 us otherwise, which every nap would take longer."""

log = logging.getLogger(__name__)


def register() -> None:
    """Called by vLLM in each of its processes (entry point `vllm.general_plugins`).

    Does nothing unless the environment says so, nor where this vLLM waits in another way.
    """
    if os.environ.get(WAIT_VARIABLE) != NAPPING:
        return
    from vllm.distributed.device_communicators import shm_broadcast

    if not hasattr(shm_broadcast, "sched_yield"):
        log.warning("this vLLM's processes wait for each other in a way batchrun does not know")
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)
    vars(shm_broadcast)["sched_yield"] = nap


def nap() -> None:
    """In the place of `sched_yield`: leaves the core to others for a while."""
    time.sleep(NAP_S)
