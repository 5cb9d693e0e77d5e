"""How much of a core each kind of process takes: what else ran beside a measurement."""

from __future__ import annotations

import os
import time

import psutil

KINDS = (
    ("worker", "VLLM::Worker"),
    ("engine_core", "VLLM::EngineC"),
    ("api_server", "vllm.entrypoints"),
    ("gateway", "batchrun.server.gateway"),
    ("daemon", "batchrun up"),
)
"""The first whose text stands in the command line."""


class CpuShares:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._begin_s = time.monotonic()
        self._before = _cpu_s()

    def since(self) -> dict[str, float]:
        """Cores taken by each kind since then; `client` is this process, `other` all others."""
        wall_s = time.monotonic() - self._begin_s
        shares = dict.fromkeys([*(name for name, _ in KINDS), "client", "other"], 0.0)
        for (pid, kind), cpu_s in _cpu_s().items():
            shares[kind] += (cpu_s - self._before.get((pid, kind), 0.0)) / wall_s
        return shares


def find_process(kind: str) -> psutil.Process:
    """The process of one of the KINDS; ends the program when there is more than one."""
    text = dict(KINDS)[kind]
    found = [p for p in psutil.process_iter() if text in " ".join(p.cmdline())]
    if len(found) != 1:
        pids = ", ".join(str(process.pid) for process in found) or "none"
        raise SystemExit(f"one {kind} is to run on this machine, but there are: {pids}")
    return found[0]


def _cpu_s() -> dict[tuple[int, str], float]:
    seconds: dict[tuple[int, str], float] = {}
    for process in psutil.process_iter():
        try:
            times, command = process.cpu_times(), " ".join(process.cmdline())
        except psutil.Error:
            continue
        if process.pid == os.getpid():
            kind = "client"
        else:
            kind = next((name for name, text in KINDS if text in command), "other")
        seconds[process.pid, kind] = times.user + times.system
    return seconds
