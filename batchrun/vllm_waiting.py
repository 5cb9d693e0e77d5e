"""How vLLM's processes wait for one another on a CPU: in short naps, not spinning.

vLLM's engine and its workers pass messages through shared memory. A reader looks again and again,
with `sched_yield` between two looks (`SpinCondition` in `shm_broadcast.py`), until a second has
passed since its last message; while an engine works that never happens. The spinning process takes
0.75 of a core that a CPU engine, its API server and their callers need, and Linux 6.18, whose
scheduler loses count of the time of processes that yield to each other, then kept others off the
cores for up to 100 s.

So the CPU engines that batchrun starts nap between two looks. GPU engines have cores to spare, and
steps so short that a nap would show; they are left alone.
"""

from __future__ import annotations

import logging
import os
import time

WAIT_VARIABLE = "BATCHRUN_ENGINE_WAIT"
NAPPING = "nap"

NAP_S = 20e-6
"""Linux adds about 50 us to it. Steps of a CPU engine take milliseconds."""

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
    vars(shm_broadcast)["sched_yield"] = nap


def nap() -> None:
    """In the place of `sched_yield`: leaves the core to others for about 70 us."""
    time.sleep(NAP_S)
