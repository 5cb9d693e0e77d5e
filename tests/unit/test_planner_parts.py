"""The planner's parts: the search, the pace of a day, fair shares, kinds of engines."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from estimator_builders import write_profile
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from batchrun.daemon.plugin import read_profile
from batchrun.errors import ConfigError, InputError
from batchrun.simulator.cluster import EnginePlan
from batchrun.simulator.offline_jobs import JobShape, JobTerms, job_of_shape
from batchrun.simulator.planner.colocation import JobTokens, TokenCurve, ends_s, fitting
from batchrun.simulator.planner.fleet import Attainment, context_tokens
from batchrun.simulator.planner.kinds import EngineKind, SloTarget, check_kinds, parse_kind
from batchrun.simulator.planner.search import FINE_ENGINES, sizes, smallest

SLO = SloTarget()


@given(st.integers(1, 1_100), st.integers(1, 1_024), st.integers(1, 2_000))
def test_the_search_finds_the_smallest_number_in_few_questions(
    known: int, most: int, first: int
) -> None:
    asked: list[int] = []

    def holds(number: int) -> bool:
        asked.append(number)
        return number >= known

    tried = list(sizes(most))
    assert tried == sorted(set(tried)) and {1, most} <= set(tried)
    assert tried[:FINE_ENGINES] == list(range(1, most + 1))[:FINE_ENGINES]
    assert all(after - before <= before / 16 + 1 for before, after in pairwise(tried))
    assert smallest(holds, most, first) == next((num for num in tried if num >= known), None)
    assert len(asked) == len(set(asked)) <= 2 * math.ceil(math.log2(most + 1)) + 1
    assert max(asked) <= most


@given(st.sets(st.integers(1, 64)), st.sets(st.integers(1, 64)), st.integers(1, 70))
def test_what_holds_wherever_another_does_never_needs_more(
    some: set[int], more: set[int], first: int
) -> None:
    """Even where the answers have gaps: a number may hold and a larger one may not."""
    strict = smallest(within(some | {64}), 64, first)
    lax = smallest(within(some | more | {64}), 64, first)

    assert strict is not None and lax is not None
    assert lax <= strict
    below = [num for num in sizes(64) if num < strict]
    assert strict in some | {64} and not set(below[-1:]) & some


def within(numbers: set[int]) -> Callable[[int], bool]:
    return lambda number: number in numbers


def test_a_pace_is_followed_over_days() -> None:
    pace = TokenCurve.through([6.0, 18.0], [10.0, 30.0], 24.0)

    assert pace.tokens_per_s == pytest.approx(20.0)
    assert pace.done_by(24.0) == pytest.approx(480.0)
    assert pace.done_by(60.0) == pytest.approx(960 + pace.done_by(12.0))
    for tokens in (1.0, 100.0, 480.0, 5_000.0):
        end_s = pace.reached_at_s(9.0, tokens)
        assert pace.done_by(end_s) - pace.done_by(9.0) == pytest.approx(tokens)
    assert TokenCurve.through([1.0], [0.0], 24.0).reached_at_s(3.0, 1.0) == math.inf


def test_jobs_share_the_pace_by_weight_and_the_rest_when_one_has_ended() -> None:
    pace = TokenCurve.through([50.0], [10.0], 100.0)
    heavy, light = JobTokens(300.0, weight=3.0), JobTokens(300.0)

    ends = ends_s([light, heavy], pace, submit_s=7.0)

    assert ends == pytest.approx([67.0, 47.0])
    assert ends_s([JobTokens(0.0), light], pace) == pytest.approx([0.0, 30.0])


def test_a_promise_holds_up_to_the_calls_that_may_miss() -> None:
    slo = SloTarget(target=0.9)

    assert slo.may_miss(100) == 10
    assert attained(10, 0).holds(slo) and attained(0, 10).holds(slo)
    assert not attained(11, 0).holds(slo) and not attained(0, 11).holds(slo)
    assert attained(0, 0).holds(SloTarget(target=1.0))
    assert not attained(1, 0).holds(SloTarget(target=1.0))


def attained(num_ttft_missed: int, num_tpot_missed: int) -> Attainment:
    return Attainment(1, 100, num_ttft_missed, 100, num_tpot_missed, None, None)


@pytest.mark.parametrize(
    ("text", "name", "price", "gpus"),
    [
        ("a100-8b", "a100-8b", None, 1),
        ("a100-8b@1.80", "a100-8b", 1.8, 1),
        ("big=a100-8b@2x4", "big", 2.0, 4),
    ],
)
def test_a_kind_is_read(text: str, name: str, price: float | None, gpus: int) -> None:
    kind = parse_kind(text, SLO, Path())

    assert (kind.name, kind.price, kind.gpus) == (name, price, gpus)
    assert kind.price_per_hour(3) == (None if price is None else 3 * gpus * price)


@pytest.mark.parametrize("text", ["", "a100-8b@", "a100-8b@1x0", "a=b@@1", "a100-8b@-1"])
def test_a_kind_that_cannot_be_read_says_what_it_must_be(text: str) -> None:
    with pytest.raises(InputError, match=r"--profile '.*': must be PROFILE, PROFILE@PRICE"):
        parse_kind(text, SLO, Path())


def test_a_profile_that_is_missing_or_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json: the profile cannot be read"):
        parse_kind("absent.json@1", SLO, tmp_path)
    (tmp_path / "wrong.json").write_text("{")
    with pytest.raises(ConfigError, match=r"wrong\.json: not JSON"):
        parse_kind("wrong.json", SLO, tmp_path)


PAGE = Path(__file__).parents[2] / "docs" / "planner.md"
ROOFLINE = PAGE.read_text().split("```text\nflop_per_s")[1].split("```")[0]


def test_a_kind_may_be_the_manuals_roofline(tmp_path: Path) -> None:
    (tmp_path / "h100.yaml").write_text(f"flop_per_s{ROOFLINE}")
    kind = parse_kind("h100.yaml@3", SLO, tmp_path)

    shape = kind.engine.shape
    assert (kind.name, shape.num_blocks) == ("h100", 25_000)
    assert (shape.token_budget, shape.max_num_seqs) == (8_192, 1_024)
    items = [(500, 500, False)]
    assert kind.engine.law.step_s(items) < 0.7 * EnginePlan().law.step_s(items)
    (tmp_path / "h100.yaml").write_text(f"flop_per_s{ROOFLINE}kv_block: 3\n")
    with pytest.raises(ConfigError, match=r"h100\.yaml:10: kv_block: unknown key"):
        parse_kind("h100.yaml@3", SLO, tmp_path)


def test_a_kind_has_the_limits_of_the_engine_that_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    write_profile(path, block_tokens=16)
    old = parse_kind("engine.json", SLO, tmp_path).engine.shape
    path.write_text(replace(read_profile(path), token_budget=8_192, max_running=1_024).to_json())
    new = parse_kind("engine.json", SLO, tmp_path).engine.shape

    assert (old.token_budget, old.max_num_seqs) == (2_048, 256)
    assert (new.token_budget, new.max_num_seqs) == (8_192, 1_024)


def test_kinds_need_names_of_their_own_and_prices_to_compare() -> None:
    engine = EnginePlan()
    check_kinds([EngineKind("a", engine)])
    check_kinds([EngineKind("a", engine, 1.0), EngineKind("b", engine, 2.0)])
    with pytest.raises(InputError, match="two are called 'a'"):
        check_kinds([EngineKind("a", engine, 1.0), EngineKind("a", engine, 2.0)])
    with pytest.raises(InputError, match="'b' has no price"):
        check_kinds([EngineKind("a", engine, 1.0), EngineKind("b", engine)])


def test_a_context_may_be_longer_than_the_default() -> None:
    kind = parse_kind("a100-8b@1.80", SLO, Path())

    longer = kind.with_context(65_536)

    assert context_tokens(kind.engine) == 32_768
    assert context_tokens(longer.engine) == 65_536
    assert longer.price == kind.price


def test_rows_left_out_are_nobodys_prefix() -> None:
    job = job_of_shape("docs", JobShape(2, (256, 256), (3, 3), output_tokens=(4, 4)), 0, JobTerms())
    job.num_output_tokens[job.order.rows[3]] = 40_000
    kept = fitting(job, EnginePlan())

    assert job.order.shared_chunks.tolist() == [0, 1, 1, 0, 1, 1]
    assert kept.order.shared_chunks.tolist() == [0, 1, 1, 0, 1]
    assert np.array_equal(kept.order.rows, np.delete(job.order.rows, 3))
