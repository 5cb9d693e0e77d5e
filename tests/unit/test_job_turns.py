"""Turns of jobs with and without deadlines, and whole runs in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from share_trials import (
    INFEASIBLE,
    deadline_trial,
    several_trial,
    urgent_run,
)

from batchrun.pool.deadlines import Claim, Margins, UrgentTurns
from batchrun.pool.fair_share import NO_POOL, JobTurns, Turn
from batchrun.pool.job_shares import QUANTUM_TOKENS, Owner

READY = frozenset({"due", "later", "other"})


def make_urgent(*, left_tokens: float = 1e6, **shares: float) -> UrgentTurns:
    """Claims by jobs with so much left, with a quantum of 1,000 tokens."""
    urgent = UrgentTurns(1000)
    urgent.claim({job_id: Claim(share, left_tokens) for job_id, share in shares.items()})
    return urgent


def test_claims_get_their_shares_of_all_tokens() -> None:
    urgent = make_urgent(due=0.5, later=0.25)
    jobs: list[str] = []
    for _ in range(4000):
        jobs.append(urgent.choose(READY, is_between_turns=True) or "other")
        urgent.charge(jobs[-1], 100)

    assert jobs.count("due") == pytest.approx(2000, abs=30)
    assert jobs.count("later") == pytest.approx(1000, abs=30)


def test_tokens_by_fair_share_count_for_a_claim() -> None:
    urgent = make_urgent(due=0.25)
    for number in range(100):
        urgent.charge("due" if number % 2 else "other", 100)

    assert urgent.choose(READY, is_between_turns=True) is None


def test_a_claim_waits_for_the_end_of_a_subtree_but_not_for_long() -> None:
    urgent = make_urgent(due=0.5)
    urgent.charge("due", 2000)
    waits = 0
    while urgent.choose(READY, is_between_turns=False) is None:
        urgent.charge("other", 100)
        waits += 1

    assert waits == 11
    assert urgent.choose(READY, is_between_turns=False) == "due"


def test_a_job_that_waited_long_is_no_more_than_a_quantum_ahead_of_its_share() -> None:
    urgent = make_urgent(due=0.5)
    for _ in range(100):
        urgent.charge("other", 1000)
    num_rows = 0
    while urgent.choose(READY, is_between_turns=True) == "due":
        urgent.charge("due", 100)
        num_rows += 1

    assert num_rows == 40


def test_the_last_rows_of_a_job_do_not_wait_until_the_others_have_caught_up() -> None:
    urgent = make_urgent(due=0.1, left_tokens=400)
    urgent.charge("due", 5000)
    num_rows = 0
    while urgent.choose(READY, is_between_turns=True) is None:
        urgent.charge("other", 100)
        num_rows += 1

    assert num_rows == 11


def test_a_row_by_a_claim_is_owed_in_full() -> None:
    urgent = make_urgent(due=0.1)
    urgent.charge("due", 5000)
    num_rows = 0
    while urgent.choose(READY, is_between_turns=True) is None:
        urgent.charge("other", 100)
        num_rows += 1

    assert num_rows == 351


def test_an_earlier_deadline_interrupts_a_later_one() -> None:
    urgent = make_urgent(later=0.4)
    first = urgent.choose(READY, is_between_turns=True)
    urgent.charge("later", 100)
    urgent.claim({"due": Claim(0.4, 1e6), "later": Claim(0.4, 1e6)})

    assert [first, urgent.choose(READY, is_between_turns=False)] == ["later", "due"]


def test_without_a_forecast_shares_are_fair() -> None:
    turns = JobTurns()
    turns.join("other", 1, 1_000_000)
    turns.join("due", 1, 1_000_000, deadline_at=10.0)
    chosen: list[Turn | None] = []
    for row in range(10):
        turn = turns.choose(READY, 0.0)
        assert turn is not None
        turns.charge(turn, row, 100, ends_subtree=True)
        chosen.append(turn)

    assert chosen == [Turn("other", False), Turn("due", False)] * 5


def run_pools(
    turns: JobTurns, jobs: Mapping[int, Sequence[str]], rates: Mapping[int, int], seconds: range
) -> Counter[str]:
    """Each second the one engine of each pool runs a row of so many tokens; what jobs got."""
    got, ready = Counter[str](), {job_id for its in jobs.values() for job_id in its}
    for second in seconds:
        for pool, tokens in rates.items():
            turns.observe(second, is_saturated=True, pool=pool)
            turn = turns.choose(ready, second, {*jobs[pool]}, engine=pool)
            assert turn is not None
            turns.charge(turn, second, tokens, ends_subtree=True)
            turns.settle(turn.job_id, second, tokens)
            got[turn.job_id] += tokens
    return got


def test_a_job_is_foretold_by_the_engines_that_can_run_it() -> None:
    turns = JobTurns()
    turns.join("fast", 1, 9_000_000)
    turns.join("slow", 1, 600_000, deadline_at=500.0)
    turns.place({"fast": 0, "slow": 1})
    run_pools(turns, {0: ["fast"], 1: ["slow"]}, {0: 9_000, 1: 1_000}, range(60))

    ends = turns.completions()
    assert ends["fast"].expected_s == pytest.approx(940, rel=0.02)
    assert ends["slow"].expected_s == pytest.approx(540, rel=0.02)
    outlook = turns.outlook("slow")
    assert outlook is not None and not outlook.is_kept
    turns.place({"slow": NO_POOL})
    assert turns.completions() == ends, "as long as no engine has its model"
    assert turns.pace(2) == (None, 0.0) and turns.predict(1, 1_000, pool=2) is None


def test_what_an_owner_has_on_other_engines_takes_nothing_of_its_share() -> None:
    turns, key = JobTurns(), Owner("key", is_bounded=True)
    turns.join("fast", 1, 10**9, owner=key)
    turns.join("due", 1, 200_000, owner=key, deadline_at=500.0)
    turns.join("other", 1, 10**7)
    turns.place({"fast": 0, "due": 1, "other": 1})

    got = run_pools(turns, {0: ["fast"], 1: ["due", "other"]}, {0: 9_000, 1: 1_000}, range(410))

    turns.check()
    assert got["due"] == pytest.approx(205_000, abs=2 * QUANTUM_TOKENS)


def make_busy_turns() -> JobTurns:
    """Jobs "due" and "other" with a forecast of 1,000 tokens/s; "due" needs half of that."""
    turns = JobTurns(1000)
    turns.join("other", 1, 1_000_000)
    turns.observe(0, is_saturated=True)
    for second in range(60):
        turns.charge(Turn("other", False), second, 1000, ends_subtree=True)
        turns.settle("other", second, 1000)
        turns.observe(second + 1, is_saturated=True)
    turns.join("due", 0.01, 44_625, deadline_at=160.0)
    return turns


def test_a_claim_of_half_the_capacity_gets_every_other_subtree() -> None:
    turns = make_busy_turns()
    jobs: list[str] = []
    for row in range(60, 200):
        turn = turns.choose(READY, 60.0)
        assert turn is not None
        turns.charge(turn, row, 100, ends_subtree=row % 5 == 4)
        jobs.append(turn.job_id)

    subtrees = [set(jobs[i : i + 5]) for i in range(100, 140, 5)]
    assert subtrees in ([{"due"}, {"other"}] * 4, [{"other"}, {"due"}] * 4)


def test_a_job_that_left_claims_nothing() -> None:
    turns = make_busy_turns()
    before = turns.choose(READY, 60.0)
    turns.leave("due")

    assert before == Turn("due", True)
    turns.check()
    assert turns.choose(READY, 60.0) == Turn("other", False)


@pytest.mark.parametrize("seed", range(6))
def test_a_job_that_needs_less_than_its_time_meets_its_deadline(seed: int) -> None:
    record = deadline_trial(seed)

    assert record["is_met"]
    assert record["announced_share"] <= 0.05


def test_fair_shares_alone_would_not_have_met_it() -> None:
    assert not deadline_trial(4, margins=Margins(reserve=0, fair=-1e9))["is_met"]


@pytest.mark.parametrize("seed", range(3))
def test_a_job_that_cannot_be_in_time_is_announced_early(seed: int) -> None:
    record = deadline_trial(seed, INFEASIBLE)

    assert not record["is_met"]
    assert record["announced_at_share"] <= 0.5


def test_one_job_too_many_is_announced_and_the_others_meet_their_deadlines() -> None:
    *due, lost = several_trial(0)

    assert all(record["is_met"] for record in due)
    assert lost["announced_at_share"] <= 0.5


def test_an_urgent_job_gets_the_first_room_in_a_full_window() -> None:
    record = urgent_run(0)

    assert record["rows_of_others_before"] == 0
    assert record["wait_s"] <= 1


def test_a_job_that_waits_for_the_night_makes_no_eta_later() -> None:
    turns, ready = JobTurns(), frozenset({"now"})
    turns.join("now", 1, 1_000_000)
    turns.observe(0.0, is_saturated=True)
    for second in range(1, 61):
        turn = turns.choose(ready, second)
        assert turn is not None
        turns.charge(turn, second, 1_000, ends_subtree=True)
        turns.settle("now", second, 1_000)
        turns.observe(second, is_saturated=True)
    alone = turns.completions()["now"]
    turns.join("night", 1, 10_000_000)
    assert turns.completions({"night"}) == {"now": alone}
    assert turns.completions()["now"].expected_s > 1.5 * alone.expected_s
