"""Fair shares between jobs: accounts, levels and turns."""

from __future__ import annotations

import pytest
from share_trials import fair_run, grain_run, pause_run

from batchrun.pool.job_shares import DOUBT, JobShares, Owner, WorkLeft

ALL = frozenset({"a", "b", "c"})


def make_shares(*weights: float, quantum_tokens: int = 1000) -> JobShares:
    """Jobs "a", "b", "c" of these weights, of unknown size."""
    shares = JobShares(quantum_tokens)
    for job_id, weight in zip("abc", weights, strict=False):
        shares.join(job_id, weight, WorkLeft(0))
    return shares


def hand_out(
    shares: JobShares, row: int, tokens: int = 100, ready: frozenset[str] = ALL
) -> str | None:
    """One row by fair share, done at once; every row is a subtree."""
    job_id = shares.holder(ready) or shares.begin_turn(ready)
    if job_id is not None:
        shares.charge(job_id, row, tokens, is_urgent=False)
        shares.settle(job_id, row, tokens)
        shares.end_turn(job_id)
    return job_id


def shares_of_rows(jobs: dict[str, Owner], num_rows: int = 600) -> dict[str, int]:
    """Rows of 100 tokens that jobs of weight 1 get, by their owners."""
    shares, got = JobShares(1000), dict.fromkeys((owner.id for owner in jobs.values()), 0)
    for job_id, owner in jobs.items():
        shares.join(job_id, 1, WorkLeft(0), owner)
    for row in range(num_rows):
        chosen = hand_out(shares, row, ready=frozenset(jobs))
        assert chosen is not None
        got[jobs[chosen].id] += 1
    shares.check()
    return got


def level(shares: JobShares, job_id: str) -> float:
    return shares.accounts[job_id].level


def test_jobs_get_rows_by_their_weights() -> None:
    shares = make_shares(1, 2, 4)

    jobs = [hand_out(shares, row) for row in range(70)]

    assert [jobs.count(job_id) for job_id in "abc"] == [10, 20, 40]


def test_a_heavy_job_without_rows_to_hand_out_adds_nothing_to_the_share_of_its_owner() -> None:
    shares = make_shares(10, 1)
    shares.join("batch", 1, WorkLeft(0), Owner("key"))
    ready = frozenset({"b", "batch"})

    jobs = [hand_out(shares, row, ready=ready) for row in range(100)]

    assert jobs.count("b") == 50


def test_a_row_costs_its_estimate_until_it_is_back_and_then_what_it_computed() -> None:
    shares = make_shares(2)
    shares.charge("a", 0, 300, is_urgent=False)
    charged = level(shares, "a")
    shares.settle("a", 0, 100)

    assert (charged, level(shares, "a")) == (150, 50)
    shares.check()


def test_a_row_that_comes_back_unfinished_costs_nothing() -> None:
    shares = make_shares(1)
    shares.charge("a", 0, 300, is_urgent=False)
    shares.refund("a", 0)

    assert level(shares, "a") == 0
    assert shares.accounts["a"].in_flight == {}


def test_a_row_is_paid_by_whom_it_was_charged_to_wherever_its_job_has_gone() -> None:
    shares = make_shares(1, 1)
    for row in range(3):
        shares.charge("a", row, 300, is_urgent=False)
    shares.place("a", 1)
    shares.refund("a", 0)
    shares.settle("a", 1, 100)
    shares.check()

    assert (shares.accounts["b"].tenant.level, level(shares, "a")) == (400, 0)


def test_an_urgent_row_is_no_part_of_the_fair_share() -> None:
    shares = make_shares(1)
    shares.charge("a", 0, 300, is_urgent=True)
    charged = level(shares, "a")
    shares.settle("a", 0, 400)

    assert (charged, level(shares, "a")) == (0, 0)
    assert shares.accounts["a"].num_urgent_tokens == 400


def test_a_late_job_starts_at_the_level_of_the_least_served() -> None:
    shares = make_shares(1, 1)
    for row in range(11):
        hand_out(shares, row)
    shares.join("c", 1, WorkLeft(0))
    shares.holder(ALL)

    assert level(shares, "c") == level(shares, "b") == 500


def test_a_late_job_starts_level_with_those_that_its_engine_serves() -> None:
    """Engine 1 serves `b` and `c`; `a` waits for an engine of another model, which is slow."""
    shares, here = make_shares(1, 1), frozenset({"b", "c"})
    for row in range(40):
        eligible = here if row % 20 else frozenset({"a"})
        chosen = shares.holder(ALL, eligible, bool(row % 20)) or shares.begin_turn(eligible)
        assert chosen is not None
        shares.charge(chosen, row, 2_000, is_urgent=False)
        if row == 10:
            shares.join("c", 1, WorkLeft(0))
    assert abs(level(shares, "c") - level(shares, "b")) <= 2_000 < level(shares, "c")
    assert level(shares, "a") == 4_000


def test_who_worked_on_one_engine_is_no_debtor_on_another() -> None:
    """`a` had engine 0 to itself while engine 1 asked in vain; then `b` begins there, and `a`."""
    shares = make_shares(1, quantum_tokens=100)
    for row in range(50):
        shares.holder(frozenset("a"), frozenset(), 1)
        hand_out(shares, row, ready=frozenset("a"))
    shares.join("b", 1, WorkLeft(0))
    shares.holder(frozenset("ab"), frozenset("b"), 1)
    assert level(shares, "a") == level(shares, "b") == 5_000


def test_a_job_without_ready_rows_saves_up_no_credit() -> None:
    shares = make_shares(1, 1)
    for row in range(10):
        hand_out(shares, row, ready=frozenset({"a"}))

    jobs = [hand_out(shares, row) for row in range(10, 20)]

    assert jobs.count("b") == 5


def test_a_job_keeps_its_turn_until_its_subtree_is_handed_out() -> None:
    shares = make_shares(1, 1)
    first = shares.holder(ALL) or shares.begin_turn(ALL)
    shares.charge("a", 0, 300, is_urgent=False)
    second = shares.holder(ALL)
    shares.end_turn("a")
    third = shares.holder(ALL) or shares.begin_turn(ALL)

    assert [first, second, third] == ["a", "a", "b"]


def test_a_job_a_quantum_ahead_loses_its_turn_within_a_subtree() -> None:
    shares = make_shares(1, 1, quantum_tokens=300)
    turns: list[str | None] = []
    for row in range(8):
        job_id = shares.holder(ALL) or shares.begin_turn(ALL)
        assert job_id is not None
        shares.charge(job_id, row, 100, is_urgent=False)
        turns.append(job_id)

    assert "".join(map(str, turns)) == "aaabbbbb"


def test_many_jobs_of_one_owner_weigh_as_one() -> None:
    jobs = {"victim": Owner("victim", is_bounded=True)}
    jobs |= {f"greedy-{number}": Owner("greedy", is_bounded=True) for number in range(100)}

    assert shares_of_rows(jobs) == {"victim": 300, "greedy": 300}


def test_an_owner_weighs_as_its_heaviest_job() -> None:
    shares = JobShares(1000)
    for job_id, weight, owner in (("a", 3, "x"), ("b", 1, "x"), ("c", 1, "y")):
        shares.join(job_id, weight, WorkLeft(0), Owner(owner))

    jobs = [hand_out(shares, row) for row in range(160)]

    assert [jobs.count(job_id) for job_id in "abc"] == [90, 30, 40]


def test_who_makes_and_cancels_jobs_gains_nothing() -> None:
    shares, got = JobShares(1000), {"victim": 0, "greedy": 0}
    shares.join("victim", 1, WorkLeft(0), Owner("victim", is_bounded=True))
    row = 0
    for number in range(200):
        job_id = f"greedy-{number}"
        shares.join(job_id, 1, WorkLeft(0), Owner("greedy", is_bounded=True))
        for _ in range(3):
            row += 1
            chosen = shares.holder({"victim", job_id}) or shares.begin_turn({"victim", job_id})
            assert chosen is not None
            shares.charge(chosen, row, 100, is_urgent=False)
            got[chosen.partition("-")[0]] += 1
            if chosen == "victim":
                shares.settle(chosen, row, 100)
            shares.end_turn(chosen)
        shares.leave(job_id)
    shares.check()

    assert got["greedy"] <= got["victim"] + 2


def test_rows_of_a_job_that_left_are_free() -> None:
    shares = make_shares(1, 1)
    shares.charge("a", 0, 300, is_urgent=False)
    shares.charge("a", 1, 300, is_urgent=False)
    shares.leave("a")
    shares.settle("a", 0, 100)
    shares.refund("a", 1)

    assert shares.accounts.keys() == {"b"}
    assert shares.holder(ALL) is None
    assert shares.begin_turn(frozenset({"a"})) is None
    shares.check()


def test_a_row_is_charged_by_the_rows_that_came_back_before_it() -> None:
    shares = make_shares(1)
    for row in range(500):
        shares.charge("a", row, 100, is_urgent=False)
        shares.settle("a", row, 150)

    assert shares.charge("a", 500, 100, is_urgent=False) == pytest.approx(150, abs=2)


def test_what_is_left_is_corrected_by_what_came_back() -> None:
    work = WorkLeft(100_000)
    for _ in range(500):
        work.settle(100, 70)

    assert work.estimated_tokens == 50_000
    assert work.tokens == pytest.approx(35_000, rel=0.02)


def test_the_correction_follows_rows_that_turn_out_otherwise() -> None:
    work = WorkLeft(1_000_000)
    for number in range(2 * 1024):
        work.settle(100, 100 if number < 1024 else 200)

    assert work.ratio == pytest.approx(1.9, abs=0.06)


def test_doubt_of_an_estimate_shrinks_as_rows_come_back() -> None:
    work = WorkLeft(1000)
    doubts = [work.doubt]
    for _ in range(20):
        work.settle(10, 10)
        doubts.append(work.doubt)

    assert doubts[0] == DOUBT
    assert doubts == sorted(doubts, reverse=True)
    assert doubts[-1] < DOUBT / 3


def test_more_rows_than_were_announced_leave_nothing_to_do() -> None:
    work = WorkLeft(100)
    work.settle(150, 150)

    assert work.tokens == 0


@pytest.mark.parametrize("seed", [1, 9])
def test_any_two_minutes_bring_each_job_its_part_within_a_subtree(seed: int) -> None:
    assert fair_run(seed)["off_share_beyond_a_subtree"] <= 0.05


def test_a_paused_job_gets_nothing_and_then_its_part_again() -> None:
    record = pause_run(0)

    assert record["rows_while_paused"] == 0
    assert record["off_share_beyond_a_subtree"] <= 0.05


def test_turns_of_a_subtree_keep_the_prefixes_that_turns_of_a_row_lose() -> None:
    per_subtree, per_row = (grain_run(is_per_row=is_per_row) for is_per_row in (False, True))

    assert per_subtree["rows_per_s"] > 1.3 * per_row["rows_per_s"]
