"""Rows whose answers are limited by the context alone, beside calls."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from engine_pairs import ours

from batchrun.simulator.cluster import EnginePlan
from batchrun.simulator.offline_jobs import JobShape, OfflineJob
from batchrun.simulator.online import Calls
from batchrun.simulator.simulation import Simulation, SimulationPlan, simulate
from batchrun.simulator.virtual.engine import RequestRecord
from batchrun.simulator.virtual.setup import EngineShape
from benchmarks.row_feeds import drawn_job
from benchmarks.scenarios import CHATS, SCENARIOS, Order, Scenario, a100_8b, draw_calls, draw_job

ANSWERS = (16, 200)


def calls(scenario: Scenario, duration_s: float, seed: int) -> Calls:
    return Calls.of(draw_calls(replace(scenario, duration_s=duration_s), seed))


def served_tokens_per_s(scenario: Scenario, context_tokens: int, *, has_limits: bool) -> float:
    """What a job with these answers is served in 15 s by a cold engine, TTFT of all calls and TPOT
    of 99 % of them within their bounds."""
    assert isinstance(scenario.job, JobShape)
    shape = replace(scenario.job, output_tokens=ANSWERS)
    job: OfflineJob = drawn_job(draw_job(shape, 0, Order.SHUFFLED))
    if not has_limits:
        job = replace(job, context_tokens=context_tokens)
    engine = EnginePlan(EngineShape(max_model_len=context_tokens))
    figures = simulate(SimulationPlan(15.0, calls(scenario, 15.0, 0), [job], engine=engine))

    assert figures.online.ttft_kept == 1.0
    assert figures.online.tpot_p99_s is not None and figures.online.tpot_p99_s <= 0.05
    return figures.offline.served_tokens_per_s


@pytest.mark.parametrize("context_tokens", [32_768, 131_072])
@pytest.mark.parametrize(
    "scenario", [SCENARIOS["echo-sharegpt"], a100_8b()], ids=lambda s: str(s.name)
)
def test_rows_without_max_tokens_are_served_as_those_with_exact_ones(
    scenario: Scenario, context_tokens: int
) -> None:
    unlimited = served_tokens_per_s(scenario, context_tokens, has_limits=False)

    assert unlimited >= 0.9 * served_tokens_per_s(scenario, context_tokens, has_limits=True)


def test_answers_that_outgrow_all_room_cost_rows_and_never_calls() -> None:
    drawn = draw_job(JobShape(40, (40, 200), (1, 1), (1, 1), (700, 1_400)), 0, Order.GROUPED)
    job = replace(drawn_job(drawn), context_tokens=4_096)
    engine = EnginePlan(EngineShape(num_blocks=500, max_model_len=4_096))
    traffic = calls(a100_8b(), 20.0, 3)
    simulation = Simulation(SimulationPlan(math.inf, traffic, [job], engine=engine))
    (virtual,) = simulation.engines.engines
    ended: list[RequestRecord] = []
    virtual.end_listeners.append(ended.append)
    simulation.engines.run_until(math.inf)

    rows = [record for record in ended if not record.is_online]
    assert sum(row.num_preemptions for row in rows) > 0
    assert sum(record.num_preemptions for record in ended if record.is_online) == 0
    answers = [len(row.output_token_ids) for row in rows]
    assert sorted(answers) == sorted(row.num_output_tokens for row in drawn.rows)
    assert {row.finish_reason for row in rows} == {"stop"}
    online = simulation.figures().online
    assert (online.ttft_kept, online.tpot_kept) == (1.0, 1.0)
    assert ours(virtual).state.num_policy_errors == 0


SMALL = (8_192, 537, 12)
FULL = (131_072, 8_600, 6)


@pytest.mark.parametrize(
    "size", [SMALL, pytest.param(FULL, marks=pytest.mark.nightly)], ids=["small", "full"]
)
@pytest.mark.parametrize("policy", ["echo", "bs+e"])
def test_answers_of_5_to_100_percent_of_the_context_all_end(
    size: tuple[int, int, int], policy: str
) -> None:
    """The context is 95 % of the KV: a few such answers outgrow it together, beside calls too."""
    context_tokens, num_blocks, num_rows = size
    shape = JobShape(num_rows, (40, 190), (1, 1), (1, 1), (context_tokens // 20, context_tokens))
    drawn = draw_job(shape, 0, Order.GROUPED)
    most = [context_tokens - drawn.num_prompt_tokens(row) for row in drawn.rows]
    rows = [replace(row, num_output_tokens=min(row.num_output_tokens, limit - 1))
            for row, limit in zip(drawn.rows, most, strict=True)]  # fmt: skip
    drawn = replace(drawn, rows=[replace(rows[0], num_output_tokens=most[0] - 1), *rows[1:]])
    job = replace(drawn_job(drawn), context_tokens=context_tokens)
    engine = EnginePlan(
        EngineShape(num_blocks=num_blocks, max_model_len=context_tokens), policy=policy
    )
    scenario = replace(a100_8b(), online=replace(CHATS, rate_per_s=2.0 * num_blocks / 8_600))
    plan = SimulationPlan(math.inf, calls(scenario, 200.0, 3), [job], engine=engine)
    simulation = Simulation(plan)
    (virtual,) = simulation.engines.engines
    ended: list[RequestRecord] = []
    virtual.end_listeners.append(ended.append)
    simulation.engines.run_until(math.inf)

    answers = [len(record.output_token_ids) for record in ended if not record.is_online]
    assert sorted(answers) == sorted(row.num_output_tokens for row in drawn.rows)
    assert sum(record.num_preemptions for record in ended if record.is_online) == 0
    online = simulation.figures().online
    assert (online.ttft_kept, online.tpot_kept) == (1.0, 1.0)
