"""The vLLM servers of `benchmarks.cpu_colocation`, and one window of it: warmed up, then measured.

Each server has its worker on one core of its own.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from batchrun.config import SloConfig
from batchrun.daemon.plugin import NUM_RENDERERS
from batchrun.engine import process
from batchrun.engine.command import ManagedSettings
from batchrun.engine.engine import ManagedEngine
from batchrun.errors import EngineError
from batchrun.hints import HINT_NONCE_VARIABLE
from batchrun.simulator.replay import OnlineResult, ReplayTarget, TokenRange, percentile, replay
from batchrun.types import OutcomeKind
from benchmarks.cpu_colocation_rows import Feeder, RowStream
from benchmarks.cpu_meter import KINDS, CpuMeter
from benchmarks.deployment import free_port
from benchmarks.replay import Figures, TraceShape, callers_first, generate_trace, summarize
from benchmarks.text_jobs import MODEL

NUM_BLOCKS = 400
"""5.7 of the sets' documents, in blocks of 128 tokens."""
BLOCK_TOKENS = 128
KV_BYTES_PER_TOKEN = 1_024
"""4 layers, keys and values, 1 head of 32 float32: `engine/tiny_model.py`."""

WORKER_CORE = max(os.sched_getaffinity(0))
"""The core of every server's worker; only one server works at a time."""
OTHER_CORES = os.sched_getaffinity(0) - {WORKER_CORE} or {WORKER_CORE}

COUNTERS = {
    "computed_tokens": "vllm:iteration_tokens_total_sum",
    "preemptions": "vllm:num_preemptions_total",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
}
_SETTLE_LIMIT_S = 60.0
_POLL_S = 0.2
CALL_LIMIT_S = 20.0
"""A call that takes longer has failed; any so slow missed its bounds long before."""
TTFT_BOUND_S = 0.5
LEAST_SINGLE_TOKENS = 0.8
"""Share of tokens that must come one by one where the SLO is fixed."""
LOOSE_TPOT, TIGHT_TPOT = 12.0, 3.0
"""The TPOT bounds that count and that are reported besides: multiples of the online-only TPOT."""


class Server:
    """One real vLLM server with `ColocatedScheduler`. `budget` None: vLLM's own default."""

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        policy: str = "bs",
        budget: int | None = None,
        slo: SloConfig | None = None,
        online_cost: float | None = None,
    ) -> None:
        self.policy, self.budget = policy, budget
        self.nonce = secrets.token_urlsafe(32)
        self.processes: list[psutil.Process] = []
        kv_bytes = NUM_BLOCKS * BLOCK_TOKENS * KV_BYTES_PER_TOKEN
        arguments = [f"--kv-cache-memory-bytes={kv_bytes}", f"--block-size={BLOCK_TOKENS}"]
        arguments += [] if budget is None else [f"--max-num-batched-tokens={budget}"]
        promised: dict[str, object] = {"online_cost": online_cost}
        if slo is not None:
            promised["slo"] = slo.model_dump(exclude_none=True)
        self.engine = ManagedEngine(
            ManagedSettings(
                name=name,
                model=str(folder / MODEL),
                served_model_name=MODEL,
                port=free_port(),
                run_dir=folder / "run",
                log_dir=folder / "log",
                vllm_args=tuple(arguments),
                env={
                    HINT_NONCE_VARIABLE: self.nonce,
                    "VLLM_SERVER_DEV_MODE": "1",
                    "VLLM_CPU_OMP_THREADS_BIND": str(WORKER_CORE),
                },
                scheduler={"policy": policy, **promised},
                num_renderers=NUM_RENDERERS,
            )
        )

    async def start(self) -> None:
        """Start and wait until it answers; all but its worker stays on the other cores.

        Raises EngineError with one line.
        """
        await self.engine.start()
        self.processes = leave_worker_alone(self.engine.settings.record_path)

    async def counters(self) -> dict[str, float]:
        """vLLM's own, by the names of `COUNTERS`. Raises EngineError when the server is gone."""
        page = await self._call("GET", "/metrics")
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return {name: values.get(metric, 0.0) for name, metric in COUNTERS.items()}

    async def settle(self) -> None:
        """Wait until nothing runs, then empty the prefix cache. Raises EngineError."""
        for _ in range(round(_SETTLE_LIMIT_S / _POLL_S)):
            counters = await self.counters()
            if not counters["running"] and not counters["waiting"]:
                await self._call("POST", "/reset_prefix_cache")
                return
            await asyncio.sleep(_POLL_S)
        raise EngineError(f"server {self.engine.name} is not idle after {_SETTLE_LIMIT_S:g} s")

    async def _call(self, method: str, path: str) -> str:
        url, limit = self.engine.settings.base_url + path, aiohttp.ClientTimeout(_SETTLE_LIMIT_S)
        try:
            async with aiohttp.request(method, url, raise_for_status=True, timeout=limit) as reply:
                return await reply.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            log = self.engine.settings.log_path
            raise EngineError(f"server {self.engine.name}: {path}: {error!r}; see {log}") from error


def leave_worker_alone(record_path: Path) -> list[psutil.Process]:
    """Keep all of an engine that runs, but its worker, on the other cores; its processes."""
    record = process.read_record(record_path)
    assert record is not None
    processes = process.find_family(record)
    for each in processes:
        if KINDS["worker"] not in each.name():
            move_off_worker_core(each)
    return processes


def move_off_worker_core(running: psutil.Process) -> None:
    """Keep all threads of a process on the other cores."""
    for thread in running.threads():
        os.sched_setaffinity(thread.id, OTHER_CORES)


@contextmanager
def off_worker_core() -> Iterator[bool]:
    """Keep the calling thread off the workers' core for a while, and before others on its own;
    gives whether the latter is so."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, OTHER_CORES)
    try:
        with callers_first() as is_first:
            yield is_first
    finally:
        os.sched_setaffinity(0, before)


async def run_window(
    server: Server,
    spans_s: tuple[float, float],
    seed: int,
    slo: SloConfig | None = None,
    rows: RowStream | None = None,
) -> Figures:
    """Drive the server alone with online calls, and with `rows` beside them; one flat record.

    `spans_s` are the lengths of the warm-up and of the part that is measured.

    Without an `slo` the window's own calls fix it (`slo_of`).
    Raises EngineError with one line when the server is lost or answers no row.
    """
    warm_up_s, measured_s = spans_s
    feeder = None if rows is None else Feeder(server.engine.client, rows.rows())
    if feeder is not None:
        await feeder.prepare()
    try:
        with off_worker_core() as is_first:
            results, observed = await _observe(server, spans_s, seed, feeder)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    await server.settle()
    measured = [result for result in results if result.arrived_at_s >= warm_up_s]
    slo = slo or slo_of(measured)
    tight_s = slo.tpot_s * TIGHT_TPOT / LOOSE_TPOT
    tight = summarize(measured, slo_ttft_s=slo.ttft_s, slo_tpot_s=tight_s)
    return {
        "policy": server.policy,
        "budget": server.budget,
        "seed": seed,
        "online": True,
        "window_s": measured_s,
        "callers_first": is_first,
        **summarize(measured, slo_ttft_s=slo.ttft_s, slo_tpot_s=slo.tpot_s),
        "slo_attainment_tight": tight["slo_attainment"],
        "slo_tpot_tight_bound_s": tight_s,
        **observed,
    }


async def _observe(
    server: Server, spans_s: tuple[float, float], seed: int, feeder: Feeder | None
) -> tuple[list[OnlineResult], Figures]:
    """All calls, and the figures of rows and engine in the measured part.

    Raises an ExceptionGroup when the server is lost, or the feeder failed.
    """
    warm_up_s, measured_s = spans_s
    # Poisson 3/s, three times that in the first 4 s of every 20 s.
    shape = TraceShape(
        duration_s=warm_up_s + measured_s,
        rate_per_s=3.0,
        burst_factor=3.0,
        burst_period_s=20.0,
        burst_length_s=4.0,
        output=TokenRange(mu=2.8, sigma=0.5, min_tokens=4, max_tokens=40),
    )
    trace = generate_trace(shape, seed=seed)
    target = ReplayTarget(
        f"{server.engine.settings.base_url}/v1",
        MODEL,
        timeout_s=CALL_LIMIT_S,
        extra_body={"ignore_eos": True},
    )
    async with asyncio.TaskGroup() as group:
        feeding = None if feeder is None else group.create_task(feeder.run())
        calling = group.create_task(replay(trace, target))
        await asyncio.sleep(warm_up_s)
        begin_s, meter = time.monotonic(), CpuMeter(lambda: server.processes)
        before = await server.counters()
        await asyncio.sleep(measured_s)
        end_s, cores, after = time.monotonic(), meter.cores(), await server.counters()
        oldest_s = None if feeder is None else end_s - min(feeder.sent_s, default=end_s)
        results = await calling
        if feeding is not None:
            feeding.cancel()
    done = {name: after[name] - before[name] for name in ("computed_tokens", "preemptions")}
    return results, {
        **_offline(feeder, begin_s, measured_s),
        "offline_oldest_in_flight_s": oldest_s,
        "computed_tokens_per_s": done["computed_tokens"] / measured_s,
        "preemptions": done["preemptions"],
        "worker_cpu_s": cores["worker"] * (end_s - begin_s),
        "worker_cpu_share": cores["worker"],
        "engine_core_cpu_s": cores["engine_core"] * (end_s - begin_s),
    }


def slo_of(alone: Sequence[OnlineResult]) -> SloConfig:
    """0.5 s to the first token, and 12 times the median TPOT of calls that had the engine alone.

    Raises EngineError when that is not known: no call was answered, or the server was so short
    of CPU that it sent several tokens at once.
    """
    tpot_s = percentile([r.tpot_s for r in alone if r.tpot_s is not None], 0.5)
    if not tpot_s:
        raise EngineError("no online call was answered alone; use a longer --window-s")
    num_gaps = sum(len(result.itl_s) for result in alone)
    if num_gaps < LEAST_SINGLE_TOKENS * sum(result.num_output_tokens - 1 for result in alone):
        raise EngineError(
            "online calls alone got several tokens at once: other programs use the CPU; run this "
            "on a quiet machine"
        )
    return SloConfig(ttft_s=TTFT_BOUND_S, tpot_s=LOOSE_TPOT * tpot_s)


def _offline(feeder: Feeder | None, begin_s: float, measured_s: float) -> Figures:
    """Figures of the rows that ended in the measured part; hits are those of first admissions."""
    if feeder is None:
        return {"offline_tokens_per_s": 0.0, "offline_rows": 0, "prefix_hit_rate": None}
    failed = [row.error for _, row in feeder.done if row.kind is not OutcomeKind.OK]
    if failed:
        raise EngineError(f"{len(failed)} offline rows failed; the first: {failed[0]}")
    done = [row for at_s, row in feeder.done if begin_s <= at_s < begin_s + measured_s]
    prompt = sum(row.usage.num_prompt_tokens for row in done)
    cached = sum(row.usage.num_cached_tokens for row in done)
    output = sum(row.usage.num_output_tokens for row in done)
    return {
        "offline_tokens_per_s": (prompt + output) / measured_s,
        "offline_new_tokens_per_s": (prompt - cached + output) / measured_s,
        "offline_rows_per_s": len(done) / measured_s,
        "offline_rows": len(done),
        "prefix_hit_rate": cached / prompt if prompt else None,
        "offline_longest_row_s": max((row.duration_s for row in done), default=None),
    }
