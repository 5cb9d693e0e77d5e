"""The occupancy model of the forecast's benchmark, against a plain walk."""

from __future__ import annotations

import math

import numpy as np
import pytest

from batchrun.estimator.forecast import ForecastRule
from batchrun.simulator.traces.trace import Trace
from benchmarks.forecast import Occupancy, equal_constant, measure


def held_by_one(at_s: float, prompt: int, output: int, occupancy: Occupancy, now_s: float) -> int:
    """Blocks that a call holds at an instant."""
    decodes_at_s = at_s + prompt / occupancy.prompt_tokens_per_s
    if not at_s <= now_s < decodes_at_s + output * occupancy.tpot_s:
        return 0
    if now_s < decodes_at_s:
        return -(-prompt // occupancy.block_tokens)
    num_made = math.floor((now_s - decodes_at_s) / occupancy.tpot_s)
    # While it decodes, another block is taken as soon as the last is full.
    num_known = min(prompt + num_made + 1, prompt + output)
    return -(-num_known // occupancy.block_tokens)


def test_every_second_has_the_highest_number_of_blocks_held() -> None:
    rng = np.random.default_rng(0)
    # On a grid of 1/128 s, so that every change can be looked at.
    occupancy = Occupancy(prompt_tokens_per_s=128.0, tpot_s=1 / 32)
    trace = Trace.of(
        np.concatenate([[0, 1], rng.integers(0, 3_000, 20) / 128]),
        rng.integers(1, 300, 22),
        rng.integers(1, 200, 22),
    )
    calls = list(
        zip(trace.arrival_s, trace.num_prompt_tokens, trace.num_output_tokens, strict=True)
    )

    found = occupancy.by_second(trace)

    expected = [
        max(
            sum(held_by_one(*call, occupancy, second + i / 128) for call in calls)
            for i in range(128)
        )
        for second in range(len(found))
    ]
    assert found.tolist() == expected


def test_a_quiet_second_keeps_what_was_held() -> None:
    trace = Trace.of([0, 9], [16, 16], [1, 1])
    found = Occupancy(prompt_tokens_per_s=4.0).by_second(trace)
    assert found[:5].tolist() == [1, 1, 1, 1, 2]
    assert found[5:9].tolist() == [0] * 4


@pytest.mark.parametrize(("covered", "constant"), [(1.0, 9), (0.75, 7), (0.25, 3), (0.0, 0)])
def test_the_constant_covers_as_many_minutes(covered: float, constant: int) -> None:
    assert equal_constant(np.array([9, 3, 7, 5]), covered) == constant


def test_a_steady_load_is_covered_at_the_cost_of_a_constant() -> None:
    record = measure("steady", np.full(1_200, 50), ForecastRule.MINUTE_MAX)
    assert (record["num_minutes"], record["covered"], record["of_constant"]) == (15, 1.0, 1.0)


def test_no_coverage_is_claimed_before_a_forecast_was_made() -> None:
    record = measure("short", np.full(330, 50), ForecastRule.MINUTE_MAX)
    assert (record["num_minutes"], record["covered"], record["of_constant"]) == (0, 0.0, None)
