"""The dial on the virtual engine, whose figures repeat exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
from engine_pairs import engine_of, ours

from batchrun.scheduling.online_cost import EARLY_STEPS
from batchrun.simulator.virtual.engine import VirtualEngine
from batchrun.simulator.virtual.setup import stock_scheduler
from batchrun.vllm_plugin.scheduler import ColocatedScheduler
from batchrun.vllm_plugin.settings import OnlineSlo
from benchmarks.row_feeds import RowSource, callers
from benchmarks.scenarios import CHATS, Order, Scenario, draw_calls, draw_job

TRAFFIC = replace(CHATS, burst_factor=1.0, swing=0.0)
SCENARIO = Scenario("steady", 40.0, TRAFFIC)
LEARNT_S = 10.0
"""By then a cold engine has seen `EARLY_STEPS` steps beside calls."""


def with_rows(settings: Mapping[str, Any]) -> VirtualEngine:
    """An engine that has run calls and rows for the whole scenario."""
    job = RowSource(draw_job(SCENARIO.job, 1, Order.GROUPED), 256)
    calls = callers(draw_calls(SCENARIO, 1), 1)
    engine = engine_of(ColocatedScheduler, [calls, job], settings=settings)
    engine.run_until(SCENARIO.duration_s)
    return engine


def latencies(engine: VirtualEngine) -> tuple[float, float]:
    """The medians of TTFT and TPOT of the calls that came when the engine had learnt."""
    ended = [
        each
        for each in engine.records.values()
        if each.is_online and each.finished_at_s and each.arrival_at_s > LEARNT_S
    ]
    assert len(ended) > 30
    return (
        median(each.token_times_s[0] - each.arrival_at_s for each in ended),
        median(
            (each.token_times_s[-1] - each.token_times_s[0]) / (len(each.token_times_s) - 1)
            for each in ended
        ),
    )


@pytest.fixture(scope="module")
def alone() -> tuple[float, float]:
    """What the calls have on stock vLLM without rows."""
    engine = engine_of(stock_scheduler(2), [callers(draw_calls(SCENARIO, 1), 1)])
    engine.run_until(SCENARIO.duration_s)
    return latencies(engine)


@pytest.mark.parametrize("cost", [1.3, 2.0])
def test_calls_are_at_most_so_many_times_as_slow_as_alone(
    cost: float, alone: tuple[float, float]
) -> None:
    engine = with_rows({"online_cost": cost})
    ttft_s, tpot_s = latencies(engine)

    assert ours(engine).daemon_link.meter.step.num_steps > EARLY_STEPS
    assert ttft_s <= cost * alone[0]
    assert 1 + 0.7 * (cost - 1) <= tpot_s / alone[1] <= cost
    assert engine.totals.num_offline_computed_tokens > 0


def test_an_engine_knows_what_its_calls_would_have_had_alone(alone: tuple[float, float]) -> None:
    engine = with_rows({"online_cost": 1.3})
    seen = ours(engine).daemon_link.telemetry(engine.now_s).cost

    assert seen.online_cost == 1.3
    assert (seen.alone_ttft_p50_s, seen.alone_tpot_p50_s) == pytest.approx(alone, rel=0.1)


def test_auto_bounds_follow_what_calls_would_have_had_alone() -> None:
    engine = with_rows({"slo": "auto"})
    state = ours(engine).state
    seen = ours(engine).daemon_link.telemetry(engine.now_s).cost

    assert seen.alone_ttft_p99_s is not None and seen.alone_tpot_p99_s is not None
    assert state.slo == OnlineSlo(
        ttft_s=2 * seen.alone_ttft_p99_s, tpot_s=2 * seen.alone_tpot_p99_s
    )
