"""How many cores the processes of a real engine take, by what they are."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

import psutil

KINDS = {
    "worker": "VLLM::Worker",
    "engine_core": "VLLM::EngineC",
    "api_server": "vllm.entrypoints",
    "gateway": "batchrun.server.gateway",
    "daemon": "batchrun up",
}
"""The first whose text stands in the command line."""


class CpuMeter:
    """Counts from when it is made, over `processes`: by default all of the machine."""

    def __init__(
        self, processes: Callable[[], Iterable[psutil.Process]] = psutil.process_iter
    ) -> None:
        self._processes = processes
        self._begin_s = time.monotonic()
        self._before = self._seconds()

    def cores(self) -> dict[str, float]:
        """Cores taken by each kind since then; `client` is this process, `other` all others."""
        wall_s = time.monotonic() - self._begin_s
        cores = dict.fromkeys([*KINDS, "client", "other"], 0.0)
        for (pid, kind), cpu_s in self._seconds().items():
            cores[kind] += (cpu_s - self._before.get((pid, kind), 0.0)) / wall_s
        return cores

    def _seconds(self) -> dict[tuple[int, str], float]:
        seconds: dict[tuple[int, str], float] = {}
        for process in self._processes():
            try:
                times, command = process.cpu_times(), " ".join(process.cmdline())
            except psutil.Error:
                continue
            kind = next((kind for kind, text in KINDS.items() if text in command), "other")
            if process.pid == os.getpid():
                kind = "client"
            seconds[process.pid, kind] = times.user + times.system
        return seconds
