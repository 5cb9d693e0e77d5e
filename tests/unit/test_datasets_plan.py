"""The planned sizes of the samples, against table 1 of the Preble paper."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

from batchrun.samples.dataset import DatasetName, SamplePlan, Shape, Spread, plan_sample
from batchrun.samples.generators import sample_plan

TABLE_1 = [
    ("toolbench", 210_415, 1_835, 0.85, 0.76, 39),
    ("nextqa", 8_564, 9_865, 0.88, 0.99, 8.6),
    ("loogle", 1_951, 23_474, 0.91, 0.94, 18),
]
"""Requests, mean prompt tokens, shared share, key share, requests that share a key portion."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of a sample's prompts, in the table's terms: tokens of each, and means of shares over rows.

    `shared_share` is the part that an earlier row had already (what an unbounded prefix cache would
    hit), `key_share` the part that only the row's group shares.
    """

    prompt_tokens: np.ndarray
    shared_share: float
    key_share: float


def statistics_of(plan: SamplePlan) -> Statistics:
    shared = np.repeat(plan.shared_tokens, plan.group_rows)
    prompt = plan.system_tokens + shared + plan.tail_tokens
    is_first = np.zeros(len(prompt), bool)
    is_first[np.cumsum(plan.group_rows) - plan.group_rows] = True
    has_peers = np.repeat(plan.group_rows > 1, plan.group_rows)
    hit = np.where(is_first, plan.system_tokens, plan.system_tokens + shared)
    key_share = float((shared * has_peers / prompt).mean())
    return Statistics(prompt, float((hit / prompt).mean()), key_share)


def small_plan(num_rows: int, *, seed: int = 1) -> SamplePlan:
    shape = Shape(num_rows, Spread(7, 5, long_tail=True), Spread(100, 30), Spread(20))
    return plan_sample(shape, num_rows=num_rows, seed=seed)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("name", "rows", "tokens", "shared", "key", "peers"), TABLE_1)
def test_full_scale_is_within_five_percent_of_the_table(
    name: DatasetName, rows: int, tokens: int, shared: float, key: float, peers: float, seed: int
) -> None:
    plan = sample_plan(name, scale="full", rows=None, seed=seed)
    statistics = statistics_of(plan)
    assert len(statistics.prompt_tokens) == rows
    assert statistics.prompt_tokens.mean() == pytest.approx(tokens, rel=0.05)
    assert statistics.shared_share == pytest.approx(shared, rel=0.05)
    assert statistics.key_share == pytest.approx(key, rel=0.05)
    assert plan.group_rows.mean() == pytest.approx(peers, rel=0.05)


@pytest.mark.parametrize(
    ("name", "deviation"), [("toolbench", 742), ("nextqa", 5_976), ("loogle", 6_105)]
)
def test_full_scale_prompts_vary_as_in_the_table(name: DatasetName, deviation: int) -> None:
    statistics = statistics_of(sample_plan(name, scale="full", rows=None, seed=1))
    assert statistics.prompt_tokens.std() == pytest.approx(deviation, rel=0.1)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 500, 3_000])
def test_every_row_of_every_group_is_planned_once(num_rows: int) -> None:
    plan = small_plan(num_rows)
    planned = [(row.group, row.number) for row in plan.rows()]
    expected = [(g, i) for g, count in enumerate(plan.group_rows.tolist()) for i in range(count)]
    assert sorted(planned) == expected
    assert len(planned) == num_rows


def test_rows_of_a_group_lie_apart() -> None:
    groups = [row.group for row in small_plan(500).rows()]
    neighbours = sum(left == right for left, right in pairwise(groups))
    assert neighbours < 100


def test_rows_of_a_group_lie_within_one_window() -> None:
    groups = [row.group for row in small_plan(3_000).rows()]
    last_of_first_window = max(at for at, group in enumerate(groups) if group < 128)
    assert {group for group in groups[: last_of_first_window + 1]} == set(range(128))


def test_the_seed_decides_the_plan() -> None:
    assert list(small_plan(50).rows()) == list(small_plan(50).rows())
    assert list(small_plan(50).rows()) != list(small_plan(50, seed=2).rows())
