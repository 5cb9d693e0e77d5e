"""Rows whose answers are limited by the context alone, beside calls."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from engine_pairs import engine_of, online_source, ours

from batchrun.simulator.virtual.engine import TrafficSource
from batchrun.simulator.virtual.feeder import DAEMON_WINDOW, JobFeeder, OnlineSource
from batchrun.simulator.virtual.run import Slo, summarize
from batchrun.simulator.virtual.scenarios import (
    JobShape,
    Order,
    Scenario,
    a100_8b,
    draw_calls,
    draw_job,
    echo_sharegpt,
    planned_order,
)
from batchrun.vllm_plugin.scheduler import ColocatedScheduler

ANSWERS = (16, 200)


def served_tokens_per_s(scenario: Scenario, context_tokens: int, *, has_limits: bool) -> float:
    """What a job with these answers is served in 15 s, all promises kept."""
    assert isinstance(scenario.job, JobShape)
    shape = replace(scenario.job, output_tokens=ANSWERS)
    scenario = replace(scenario, duration_s=15.0)
    job = planned_order(draw_job(shape, 0, Order.SHUFFLED))
    unlimited = None if has_limits else context_tokens
    feeder = JobFeeder(job, window=DAEMON_WINDOW, context_tokens=unlimited)
    sources: list[TrafficSource] = [OnlineSource(draw_calls(scenario, 0), 0), feeder]
    engine = engine_of(ColocatedScheduler, sources, max_model_len=context_tokens)
    engine.run_until(scenario.duration_s)

    figures = summarize(engine, Slo(1.0, 0.05))
    assert (figures["slo_ttft"], figures["slo_tpot"]) == (1.0, 1.0)
    served = figures["offline_tokens_per_s"]
    assert isinstance(served, float)
    return served


@pytest.mark.parametrize("context_tokens", [32_768, 131_072])
@pytest.mark.parametrize("scenario", [echo_sharegpt(), a100_8b()], ids=lambda s: str(s.name))
def test_rows_without_max_tokens_are_served_as_those_with_exact_ones(
    scenario: Scenario, context_tokens: int
) -> None:
    unlimited = served_tokens_per_s(scenario, context_tokens, has_limits=False)

    assert unlimited >= 0.9 * served_tokens_per_s(scenario, context_tokens, has_limits=True)


def test_answers_that_outgrow_all_room_cost_rows_and_never_calls() -> None:
    job = draw_job(JobShape(40, (40, 200), (1, 1), (1, 1), (700, 1_400)), 0, Order.GROUPED)
    feeder = JobFeeder(job, window=None, context_tokens=4_096)
    engine = engine_of(
        ColocatedScheduler, [online_source(20.0, 3), feeder], num_blocks=500, max_model_len=4_096
    )
    engine.run_until(math.inf)

    records = engine.records.values()
    rows = [record for record in records if not record.is_online]
    calls = [record for record in records if record.is_online]
    assert sum(row.num_preemptions for row in rows) > 0
    assert sum(call.num_preemptions for call in calls) == 0
    answers = [len(row.output_token_ids) for row in rows]
    assert sorted(answers) == sorted(row.num_output_tokens for row in job.rows)
    assert {row.finish_reason for row in rows} == {"stop"}
    figures = summarize(engine, Slo(1.0, 0.05))
    assert (figures["slo_ttft"], figures["slo_tpot"]) == (1.0, 1.0)
    assert ours(engine).state.num_policy_errors == 0
