"""One window of `benchmarks.cpu_colocation`: a server under load, warmed up, then measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from batchrun.errors import EngineError
from batchrun.simulator.replay import OnlineResult, ReplayTarget, TokenRange, replay
from benchmarks.cpu_colocation_job import Feeder, RowStream
from benchmarks.cpu_colocation_servers import MODEL, Server, Usage, off_worker_core
from benchmarks.replay import (
    Figures,
    Promise,
    TraceShape,
    generate_trace,
    online_figures,
    summarize,
)

CALL_LIMIT_S = 20.0
"""A call that takes longer has failed; any so slow broke its promise long before."""
TTFT_BOUND_S = 0.5
LEAST_SINGLE_TOKENS = 0.8
"""Share of tokens that must come one by one where the promise is fixed."""
LOOSE_TPOT, TIGHT_TPOT = 12.0, 3.0
"""The TPOT bounds that count and that are reported besides: multiples of the online-only TPOT."""

Record = dict[str, object]


@dataclass(frozen=True, slots=True)
class Timing:
    """The length of a window's two parts."""

    warm_up_s: float
    measured_s: float


def trace_shape(timing: Timing) -> TraceShape:
    """Online load: Poisson 3/s, three times that in the first 4 s of every 20 s."""
    return TraceShape(
        duration_s=timing.warm_up_s + timing.measured_s,
        rate_per_s=3.0,
        burst_factor=3.0,
        burst_period_s=20.0,
        burst_length_s=4.0,
        prompt=TokenRange(mu=4.0, sigma=0.8, min_tokens=8, max_tokens=400),
        output=TokenRange(mu=2.8, sigma=0.5, min_tokens=4, max_tokens=40),
    )


async def run_window(
    server: Server, timing: Timing, seed: int, promise: Promise | None, rows: RowStream | None
) -> Record:
    """Drive the server alone with online calls, and with `rows` beside them; one flat record.

    Without a `promise` the window's own calls fix it (`fix_promise`).
    Raises EngineError with one line when the server is lost or answers no row.
    """
    if rows is not None:
        await rows.prepare()
    feeder = None if rows is None else Feeder(server.engine.client, rows)
    with off_worker_core():
        begin_s = time.monotonic()
        trace = generate_trace(trace_shape(timing), seed=seed)
        feeding = None if feeder is None else asyncio.create_task(feeder.run())
        calling = asyncio.create_task(replay(trace, _target(server)))
        try:
            before, after = await _watch(server, timing, feeding)
            oldest_s = None if feeder is None else feeder.oldest_in_flight_s(time.monotonic())
            results = await calling
        finally:
            await _end(feeding)
            await _end(calling)
    await server.settle()
    begin_s += timing.warm_up_s
    measured = [result for result in results if result.arrived_at_s >= timing.warm_up_s]
    return {
        "policy": server.plan.policy,
        "budget": server.plan.budget,
        "seed": seed,
        "online": True,
        "window_s": timing.measured_s,
        **_online(measured, promise or fix_promise(measured)),
        **_offline(feeder, begin_s, timing.measured_s),
        "offline_oldest_in_flight_s": oldest_s,
        **_engine(before, after, timing.measured_s),
    }


def fix_promise(alone: Sequence[OnlineResult]) -> Promise:
    """0.5 s to the first token, and 12 times the median TPOT of calls that had the engine alone.

    Raises EngineError when that cannot be told: no call was answered, or the server was so short
    of CPU that it sent several tokens at once.
    """
    tpot_s = summarize(alone, slo_ttft_s=TTFT_BOUND_S, slo_tpot_s=TTFT_BOUND_S)["tpot_p50_s"]
    if not tpot_s:
        raise EngineError("no online call was answered alone; use a longer --window-s")
    num_gaps = sum(len(result.itl_s) for result in alone)
    if num_gaps < LEAST_SINGLE_TOKENS * sum(result.num_output_tokens - 1 for result in alone):
        raise EngineError(
            "online calls alone got several tokens at once: other programs use the CPU; run this "
            "on a quiet machine"
        )
    return Promise(TTFT_BOUND_S, LOOSE_TPOT * tpot_s)


def _target(server: Server) -> ReplayTarget:
    return ReplayTarget(
        base_url=f"{server.base_url}/v1",
        model=MODEL,
        timeout_s=CALL_LIMIT_S,
        extra_body={"ignore_eos": True},
    )


async def _watch(
    server: Server, timing: Timing, feeding: asyncio.Task[None] | None
) -> tuple[Usage, Usage]:
    """The server's usage at both ends of the measured part."""
    await _sleep(timing.warm_up_s, feeding)
    before = await server.usage()
    await _sleep(timing.measured_s, feeding)
    after = await server.usage()
    await server.check()
    return before, after


async def _sleep(duration_s: float, feeding: asyncio.Task[None] | None) -> None:
    """Sleep, but not past the end of a feeder that failed."""
    if feeding is None:
        await asyncio.sleep(duration_s)
        return
    await asyncio.wait([feeding], timeout=duration_s)
    if feeding.done():
        feeding.result()


async def _end(task: asyncio.Task[None] | asyncio.Task[list[OnlineResult]] | None) -> None:
    if task is not None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _online(results: Sequence[OnlineResult], promise: Promise) -> Figures:
    tight = Promise(promise.ttft_s, promise.tpot_s * TIGHT_TPOT / LOOSE_TPOT)
    return {
        **online_figures(results, promise),
        "slo_attainment_tight": online_figures(results, tight)["slo_attainment"],
        "slo_tpot_tight_bound_s": tight.tpot_s,
    }


def _offline(feeder: Feeder | None, begin_s: float, measured_s: float) -> Figures:
    """Figures of the rows that ended in the measured part; hits are those of first admissions."""
    if feeder is None:
        return {"offline_tokens_per_s": 0.0, "offline_rows": 0, "prefix_hit_rate": None}
    failed = feeder.failed()
    if failed:
        raise EngineError(f"{len(failed)} offline rows failed; the first: {failed[0].error}")
    end_s = begin_s + measured_s
    done = [row for row in feeder.done if begin_s <= row.ended_at_s < end_s]
    prompt = sum(row.outcome.usage.num_prompt_tokens for row in done)
    cached = sum(row.outcome.usage.num_cached_tokens for row in done)
    output = sum(row.outcome.usage.num_output_tokens for row in done)
    return {
        "offline_tokens_per_s": (prompt + output) / measured_s,
        "offline_new_tokens_per_s": (prompt - cached + output) / measured_s,
        "offline_rows_per_s": len(done) / measured_s,
        "offline_rows": len(done),
        "prefix_hit_rate": cached / prompt if prompt else None,
        "offline_longest_row_s": max((r.ended_at_s - r.sent_at_s for r in done), default=None),
    }


def _engine(before: Usage, after: Usage, measured_s: float) -> Figures:
    worker_cpu_s = after.worker_cpu_s - before.worker_cpu_s
    computed = after.counters["computed_tokens"] - before.counters["computed_tokens"]
    return {
        "computed_tokens_per_s": computed / measured_s,
        "preemptions": after.counters["preemptions"] - before.counters["preemptions"],
        "worker_cpu_s": worker_cpu_s,
        "worker_cpu_share": worker_cpu_s / measured_s,
        "engine_core_cpu_s": after.engine_core_cpu_s - before.engine_core_cpu_s,
    }
