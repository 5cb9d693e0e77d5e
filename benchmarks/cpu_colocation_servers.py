"""The vLLM servers of `benchmarks.cpu_colocation`: each with its worker on one core of its own."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from batchrun.engine import process
from batchrun.engine.command import ManagedSettings
from batchrun.engine.engine import ManagedEngine
from batchrun.errors import EngineError
from batchrun.hints import HINT_NONCE_VARIABLE
from benchmarks.ports import free_port

MODEL = "tiny"
BLOCK_TOKENS = 128
KV_BYTES_PER_TOKEN = 1_024
"""4 layers, keys and values, 1 head of 32 float32: `engine/tiny_model.py`."""

WORKER_CORE = max(os.sched_getaffinity(0))
"""The core of every server's worker; only one server works at a time."""
OTHER_CORES = os.sched_getaffinity(0) - {WORKER_CORE}

_PROCESS_NAMES = ("VLLM::Worker", "VLLM::EngineCore")
_COUNTERS = {
    "computed_tokens": "vllm:iteration_tokens_total_sum",
    "preemptions": "vllm:num_preemptions_total",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
}
_SETTLE_LIMIT_S = 60.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """How one server differs from the others. `budget` None: vLLM's own default."""

    name: str
    policy: str
    budget: int | None = None
    slo: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """What a server had used since its start: CPU seconds by process, and vLLM's counters."""

    worker_cpu_s: float
    engine_core_cpu_s: float
    counters: Mapping[str, float]


class Server:
    """One real vLLM server with `ColocatedScheduler`, in a folder of its own."""

    def __init__(self, plan: ServerPlan, folder: Path, model: Path, num_blocks: int) -> None:
        self.plan = plan
        self.nonce = secrets.token_urlsafe(32)
        scheduler: dict[str, object] = {"policy": plan.policy}
        if plan.slo is not None:
            scheduler["slo"] = dict(plan.slo)
        kv_bytes = num_blocks * BLOCK_TOKENS * KV_BYTES_PER_TOKEN
        budget = () if plan.budget is None else (f"--max-num-batched-tokens={plan.budget}",)
        self.engine = ManagedEngine(
            ManagedSettings(
                name=plan.name,
                model=str(model),
                served_model_name=MODEL,
                port=free_port(),
                run_dir=folder / "run",
                log_dir=folder / "log",
                vllm_args=(
                    f"--kv-cache-memory-bytes={kv_bytes}",
                    f"--block-size={BLOCK_TOKENS}",
                    *budget,
                ),
                env={
                    HINT_NONCE_VARIABLE: self.nonce,
                    "VLLM_SERVER_DEV_MODE": "1",
                    "VLLM_CPU_OMP_THREADS_BIND": str(WORKER_CORE),
                },
                scheduler=scheduler,
            )
        )
        self._processes: list[psutil.Process] = []

    @property
    def base_url(self) -> str:
        """The server's address."""
        return self.engine.settings.base_url

    async def start(self) -> None:
        """Start and wait until it answers. Raises EngineError with one line."""
        await self.engine.start()
        record = process.read_record(self.engine.settings.record_path)
        assert record is not None
        self._processes = process.find_family(record)
        _keep_off_worker_core(self._processes)

    async def stop(self) -> None:
        """End the server with its processes."""
        await self.engine.stop()

    async def check(self) -> None:
        """Raises EngineError with one line when the server does not answer any more."""
        if not await self.engine.client.is_healthy():
            raise EngineError(
                f"server {self.plan.name} does not answer; see {self.engine.settings.log_path}"
            )

    async def usage(self) -> Usage:
        """CPU seconds and counters so far. Raises EngineError when the server is gone."""
        try:
            worker_s, core_s = (_cpu_s(self._processes, name) for name in _PROCESS_NAMES)
        except psutil.NoSuchProcess as error:
            await self.check()
            raise EngineError(f"server {self.plan.name}: {error}") from error
        return Usage(worker_s, core_s, await self._counters())

    async def settle(self) -> None:
        """Wait until nothing runs, then empty the prefix cache. Raises EngineError."""
        deadline_s = asyncio.get_running_loop().time() + _SETTLE_LIMIT_S
        while asyncio.get_running_loop().time() < deadline_s:
            counters = await self._counters()
            if not counters["running"] and not counters["waiting"]:
                await self._call("POST", "/reset_prefix_cache")
                return
            await asyncio.sleep(_POLL_S)
        raise EngineError(f"server {self.plan.name} is not idle after {_SETTLE_LIMIT_S:g} s")

    async def _counters(self) -> dict[str, float]:
        text = await self._call("GET", "/metrics")
        return {key: _sum_of(metric, text) for key, metric in _COUNTERS.items()}

    async def _call(self, method: str, path: str) -> str:
        timeout = aiohttp.ClientTimeout(total=_SETTLE_LIMIT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(method, self.base_url + path) as reply,
            ):
                reply.raise_for_status()
                return await reply.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            line = f"server {self.plan.name}: {method} {path}: {error or type(error).__name__}"
            raise EngineError(f"{line}; see {self.engine.settings.log_path}") from error


@contextmanager
def off_worker_core() -> Iterator[None]:
    """Keep the calling thread off the workers' core for a while."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, OTHER_CORES or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


async def start_all(servers: list[Server]) -> None:
    """Start servers together. Raises the first EngineError."""
    await asyncio.gather(*(server.start() for server in servers))


def _sum_of(metric: str, text: str) -> float:
    pattern = rf"^{re.escape(metric)}(?:{{[^}}]*}})? (\S+)$"
    return sum(float(value) for value in re.findall(pattern, text, re.MULTILINE))


def _cpu_s(processes: list[psutil.Process], name: str) -> float:
    chosen = [each for each in processes if each.name().startswith(name)]
    return sum(each.cpu_times().user + each.cpu_times().system for each in chosen)


def _keep_off_worker_core(processes: list[psutil.Process]) -> None:
    """Everything but the workers stays on the other cores, if there are any."""
    if not OTHER_CORES:
        return
    for each in processes:
        if not each.name().startswith(_PROCESS_NAMES[0]):
            for thread in each.threads():
                os.sched_setaffinity(thread.id, OTHER_CORES)
