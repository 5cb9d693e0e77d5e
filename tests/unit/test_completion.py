"""When jobs will be done: the pace that was seen, its doubt, and shares between jobs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrun.pool.deadlines import JobWork, claimed_parts, tokens_ahead
from batchrun.pool.fair_share import JobTurns, Turn
from batchrun.pool.job_shares import Owner
from batchrun.pool.pace import (
    COARSE_S,
    FINE_S,
    NUM_FINE,
    PRIOR_SD,
    Completions,
    LastRows,
    PaceForecast,
    PaceHistory,
)
from batchrun.pool.row_times import LastEnd

ONE_JOB = {"a": JobWork(1.0, 100_000.0, 0.0)}


def history(*tokens_per_s: float, stretch_s: float = 5.0) -> PaceHistory:
    """A history in which each pace lasted for one stretch."""
    made = PaceHistory(stretch_s, 720)
    for pace in tokens_per_s:
        made.add(stretch_s, pace * stretch_s)
    return made


def forecast(made: PaceHistory, horizon_s: float) -> PaceForecast:
    """The forecast, which is there."""
    found = made.forecast(horizon_s)
    assert found is not None
    return found


def seen(*tokens_per_s: float) -> Completions:
    """What is known after seconds of these paces."""
    completions = Completions()
    for pace in tokens_per_s:
        completions.add(1.0, pace)
    return completions


def test_nothing_is_foretold_from_a_few_seconds() -> None:
    assert seen(*[1000] * 14).predict(ONE_JOB, {}, {}) == {}
    assert set(seen(*[1000] * 15).predict(ONE_JOB, {}, {})) == {"a"}


def test_nothing_is_foretold_while_nothing_is_computed() -> None:
    assert seen(*[0] * 60).predict(ONE_JOB, {}, {}) == {}


def test_a_steady_pace_is_kept_up() -> None:
    found = seen(*[1000] * 600).predict(ONE_JOB, {}, {})["a"]

    assert found.expected_s == pytest.approx(100)
    assert 85 < found.low_s < 100 < found.high_s < 117


def test_a_range_narrows_as_a_steady_pace_goes_on() -> None:
    widths = [
        found.high_s - found.low_s
        for seconds in (300, 600, 1200)
        for found in seen(*[1000] * seconds).predict(ONE_JOB, {}, {}).values()
    ]

    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < 0.6 * widths[0]


def test_a_pace_that_swings_says_less_of_what_is_near_than_of_what_is_far() -> None:
    swings = history(*[1000 * (1 + 0.8 * math.sin(i * math.tau / 24)) for i in range(720)])

    assert forecast(swings, 60).log_sd > 4 * forecast(swings, 1200).log_sd
    assert forecast(swings, 1200).tokens_per_s == pytest.approx(1000, rel=0.15)


def test_a_pace_that_has_changed_is_forgotten() -> None:
    changed = history(*[1000] * 300, *[500] * 60)

    assert forecast(changed, 600).tokens_per_s == pytest.approx(500)


def test_doubt_rests_on_the_past_once_there_is_one() -> None:
    rng = np.random.default_rng(0)
    noisy = history(*(1000 * np.exp(0.5 * rng.standard_normal(700))))
    calm = history(*[1000] * 700)

    assert forecast(calm, 5).log_sd < PRIOR_SD / 10 < forecast(noisy, 5).log_sd


@pytest.mark.parametrize("elapsed_s", [0.1, 1.0, 5.0, 7.0, 100.0])
def test_the_time_between_two_looks_changes_no_pace(elapsed_s: float) -> None:
    made = PaceHistory(5.0, 720)
    for _ in range(round(1000 / elapsed_s)):
        made.add(elapsed_s, 1000 * elapsed_s)

    assert made.seen_s == pytest.approx(1000, abs=5.1)
    assert forecast(made, 60).tokens_per_s == pytest.approx(1000)


def test_a_history_has_an_end() -> None:
    made = PaceHistory(5.0, 10)
    made.add(5000, 1.0)

    assert made.seen_s == 50


def test_long_jobs_go_by_the_long_history() -> None:
    hours = [2000.0, 500.0] * 24
    completions = Completions()
    for pace in hours:
        for _ in range(720):
            completions.add(5.0, pace * 5)
    short = completions.predict({"a": JobWork(1.0, 500 * 300.0, 0.0)}, {}, {})["a"]
    long = completions.predict({"a": JobWork(1.0, 1250 * 36_000.0, 0.0)}, {}, {})["a"]

    assert completions.seen_s == len(hours) * 3600
    assert NUM_FINE * FINE_S < completions.seen_s < 2_016 * COARSE_S
    assert short.expected_s == pytest.approx(300)
    assert 0.7 * 36_000 < long.expected_s < 1.9 * 36_000


def test_doubt_about_the_work_widens_the_range() -> None:
    completions = seen(*[1000] * 600)
    sure = completions.predict({"a": JobWork(1.0, 100_000.0, 0.0)}, {}, {})["a"]
    unsure = completions.predict({"a": JobWork(1.0, 100_000.0, 0.3)}, {}, {})["a"]

    assert unsure.expected_s == sure.expected_s
    assert unsure.low_s < sure.low_s
    assert unsure.high_s > sure.high_s


def test_a_finished_job_is_done_in_a_moment() -> None:
    found = seen(*[1000] * 60).predict({"a": JobWork(1.0, 0.0, 0.0)}, {}, {})["a"]

    assert found.expected_s == found.low_s == 0
    assert found.high_s < 5


def test_rows_in_flight_at_the_end_are_done_sooner_than_the_pace_says() -> None:
    steady = seen(*[1000] * 600)
    by_pace = steady.predict(ONE_JOB, {}, {})["a"]
    ends = [
        steady.predict(ONE_JOB, {}, {"a": LastRows(LastEnd(1, 2, 3), in_flight_tokens, False)})["a"]
        for in_flight_tokens in (0.0, 50_000.0, 100_000.0, 200_000.0)
    ]
    none, half, whole, of_two_jobs = ends
    assert none.expected_s == pytest.approx(by_pace.expected_s, rel=0.02)
    assert none.low_s == pytest.approx(by_pace.low_s, rel=0.02)
    for sooner, later in itertools.pairwise([whole, half, by_pace]):
        assert sooner.expected_s < later.expected_s
        assert later.low_s - sooner.low_s > later.expected_s - sooner.expected_s
        assert sooner.high_s == pytest.approx(later.high_s)
    assert of_two_jobs == whole


def test_jobs_share_by_weight() -> None:
    works = {"light": JobWork(1.0, 100.0, 0.0), "heavy": JobWork(3.0, 100.0, 0.0)}

    assert tokens_ahead(works, {}) == pytest.approx({"heavy": 400 / 3, "light": 200})


def test_a_claim_is_all_that_a_job_gets_and_less_than_its_fair_part_changes_nothing() -> None:
    works = {"due": JobWork(1.0, 100.0, 0.0), "other": JobWork(1.0, 100.0, 0.0)}

    assert tokens_ahead(works, {"due": 0.75}) == pytest.approx({"due": 400 / 3, "other": 200})
    assert claimed_parts(works, {"due": 0.4}) == {"due": 0.5, "other": 0.5}
    claims = {"due": 0.4, "other": 0.55}
    assert claimed_parts(works, claims) == pytest.approx({"due": 0.45, "other": 0.55})


@pytest.mark.parametrize(("claim", "part"), [(0.4, 0.4), (0.5, 0.475), (0.8, 0.475)])
def test_a_claim_of_a_bounded_owner_takes_from_its_other_jobs(claim: float, part: float) -> None:
    key = Owner("key", is_bounded=True)
    works = {name: JobWork(1.0, 100.0, 0.0, key) for name in ("due", "beside")}
    works["other"] = JobWork(1.0, 100.0, 0.0)

    parts = claimed_parts(works, {"due": claim})

    assert parts == pytest.approx({"due": part, "beside": 0.5 - part, "other": 0.5})


Weights = st.just(1.0) | st.floats(0.1, 10)
Tokens = st.floats(0, 1e6)


@given(st.lists(st.tuples(Weights, Tokens, st.floats(0, 0.3)), min_size=1, max_size=4))
def test_shares_are_those_of_a_fluid(drawn: list[tuple[float, float, float]]) -> None:
    works = {str(i): JobWork(weight, tokens, 0.0) for i, (weight, tokens, _) in enumerate(drawn)}
    claims = {str(i): share for i, (_, _, share) in enumerate(drawn) if share > 0.1}
    claims = dict(itertools.islice(claims.items(), 3))

    found = tokens_ahead(works, claims)

    order = sorted(works, key=found.__getitem__)
    assert found[order[-1]] == pytest.approx(sum(work.tokens for work in works.values()), abs=1e-3)
    total, left = 0.0, {job_id: work.tokens for job_id, work in works.items()}
    for job_id in order:
        shares = claimed_parts({i: works[i] for i in left}, claims)
        assert sum(shares.values()) == pytest.approx(1)
        levels = {i: share / works[i].weight for i, share in shares.items()}
        lowest = min(levels.values())
        for i, level in levels.items():
            assert level == pytest.approx(lowest) or shares[i] == claims[i]
            assert shares[i] >= 0.999 * claims.get(i, 0.0)
        passed = found[job_id] - total
        left = {i: tokens - shares[i] * passed for i, tokens in left.items()}
        assert left.pop(job_id) == pytest.approx(0, abs=1e-3)
        total = found[job_id]


def run_rows(turns: JobTurns, num_rows: int, *, computed_tokens: int) -> None:
    """Rows of job `a`, handed out and back one each second beside a full window."""
    for row in range(num_rows):
        turns.observe(float(row), is_saturated=True)
        turns.charge(Turn("a", is_urgent=False), row, 100, ends_subtree=False)
        turns.settle("a", row, computed_tokens)


def test_what_rows_really_compute_corrects_the_end() -> None:
    turns = JobTurns()
    turns.join("a", 1.0, 1_000 * 100)
    run_rows(turns, 400, computed_tokens=200)

    found = turns.completions()["a"]

    assert found.expected_s == pytest.approx(600, rel=0.05)
    assert found.low_s < 600 < found.high_s


def test_a_small_job_whose_rows_are_all_in_flight_has_no_end_by_the_pace_of_another() -> None:
    turns = JobTurns()
    turns.join("a", 1.0, 1_000 * 100)
    run_rows(turns, 60, computed_tokens=100)
    turns.join("small", 1.0, 20 * 100)
    for row in range(20):
        assert "small" in turns.completions()
        turns.charge(Turn("small", is_urgent=False), row, 100, ends_subtree=False)

    assert turns.completions().keys() == {"a"}


def test_a_job_that_is_asked_about_waits_beside_those_that_run() -> None:
    turns = JobTurns()
    turns.join("a", 1.0, 1_000 * 100)
    run_rows(turns, 400, computed_tokens=100)
    alone = turns.predict(1.0, 0)
    beside = turns.predict(1.0, 100 * 100)
    first = turns.predict(1e6, 100 * 100)

    assert alone is not None and beside is not None and first is not None
    assert alone.expected_s == 0
    assert beside.expected_s == pytest.approx(200, rel=0.01)
    assert first.expected_s == pytest.approx(100, rel=0.01)
    assert set(turns.completions()) == {"a"}


def test_a_job_that_has_left_is_not_predicted() -> None:
    turns = JobTurns()
    turns.join("a", 1.0, 1_000 * 100)
    run_rows(turns, 60, computed_tokens=100)
    turns.leave("a")

    assert turns.completions() == {}
    assert turns.predict(1.0, 100) is not None


@pytest.mark.parametrize(("before", "after"), [(1.0, 8.0), (8.0, 1.0)])
def test_a_pace_goes_with_the_engines_and_its_range_narrows_as_they_are_seen(
    before: float, after: float
) -> None:
    completions = Completions()
    completions.resize(before)
    for _ in range(5 * 720):
        completions.add(5.0, 5.0 * 1000 * before)
    works = {"a": JobWork(1.0, 1000 * after * 36_000.0, 0.0)}
    completions.resize(after)
    found = [completions.predict(works, {}, {})["a"]]
    for _ in range(2):
        for _ in range(900):
            completions.add(5.0, 5.0 * 1000 * after)
        found.append(completions.predict(works, {}, {})["a"])

    assert [each.expected_s for each in found] == pytest.approx([36_000] * 3)
    assert found[0].low_s < 36_000 / 4 and found[0].high_s > 4 * 36_000
    widths = [each.high_s - each.low_s for each in found]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < 36_000 / 2


def test_an_engine_that_is_back_leaves_no_doubt() -> None:
    completions = seen(*[1000] * 600)
    before = completions.predict(ONE_JOB, {}, {})["a"]
    completions.resize(0.5)
    away = completions.predict(ONE_JOB, {}, {})["a"]
    completions.resize(1.0)

    assert away.expected_s == pytest.approx(2 * before.expected_s)
    assert away.high_s > 2.2 * before.high_s
    assert completions.predict(ONE_JOB, {}, {})["a"] == before
