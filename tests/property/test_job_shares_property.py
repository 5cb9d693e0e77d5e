"""Turns of jobs under random rows, weights and deadlines: accounts balance and nobody starves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batchrun.pool.deadlines import (
    MOST_SHARE,
    JobWork,
    Kept,
    fair_finishes_s,
    fair_parts,
    needed_shares,
)
from batchrun.pool.fair_share import NO_POOL, JobTurns
from batchrun.pool.job_shares import JobShares, Owner, WorkLeft

QUANTUM_TOKENS = 200
MOST_ROW_TOKENS = 100
TURN_TOKENS = QUANTUM_TOKENS + MOST_ROW_TOKENS
JOB_IDS = ("a", "b", "c", "d")

job_ids = st.sampled_from(JOB_IDS)
weights = st.sampled_from((0.5, 1.0, 2.0))
row_tokens = st.integers(MOST_ROW_TOKENS // 2, MOST_ROW_TOKENS)
owners = st.sampled_from([Owner(), Owner("key_1", is_bounded=True), Owner("key_2")])
due_ats = st.none() | st.floats(1, 1000)


class TurnsMachine(RuleBasedStateMachine):
    """Hands rows out and takes them back in any order; jobs come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = JobTurns(QUANTUM_TOKENS)
        self.in_flight: dict[tuple[str, int], int] = {}
        self.computed: dict[str, int] = {}
        self.num_rows = 0
        self.now_s = 0.0

    @rule(job_id=job_ids, weight=weights, deadline_at=due_ats, owner=owners)
    def join(self, job_id: str, weight: float, deadline_at: float | None, owner: Owner) -> None:
        if job_id not in self.computed:
            self.turns.join(job_id, weight, 10_000, deadline_at=deadline_at, owner=owner)
            self.computed[job_id] = 0

    @precondition(lambda self: self.computed)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.computed)))
        self.turns.leave(job_id)
        del self.computed[job_id]
        self.in_flight = {key: n for key, n in self.in_flight.items() if key[0] != job_id}

    @rule(ready=st.frozensets(job_ids), tokens=row_tokens, ends_subtree=st.booleans())
    def hand_out(self, ready: frozenset[str], tokens: int, *, ends_subtree: bool) -> None:
        turn = self.turns.choose(ready, self.now_s)
        assert (turn is None) == (not ready & self.computed.keys())
        if turn is not None:
            assert turn.job_id in ready
            self.turns.charge(turn, self.num_rows, tokens, ends_subtree=ends_subtree)
            self.in_flight[turn.job_id, self.num_rows] = tokens
            self.num_rows += 1
        self.turns.observe(self.now_s, is_saturated=len(self.in_flight) > 3)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), factor=st.floats(0, 2), is_done=st.booleans())
    def take_back(self, data: st.DataObject, factor: float, *, is_done: bool) -> None:
        job_id, row = data.draw(st.sampled_from(sorted(self.in_flight)))
        tokens = int(self.in_flight.pop((job_id, row)) * factor)
        if is_done:
            self.turns.settle(job_id, row, tokens)
            self.computed[job_id] += tokens
        else:
            self.turns.refund(job_id, row)

    @precondition(lambda self: self.computed)
    @rule(tokens=row_tokens)
    def work_for_a_while(self, tokens: int) -> None:
        for _ in range(20):
            self.now_s += 1
            turn = self.turns.choose(self.computed.keys(), self.now_s)
            assert turn is not None
            self.turns.charge(turn, self.num_rows, tokens, ends_subtree=False)
            self.turns.settle(turn.job_id, self.num_rows, tokens)
            self.turns.observe(self.now_s, is_saturated=True)
            self.computed[turn.job_id] += tokens
            self.num_rows += 1

    @rule(pools=st.fixed_dictionaries(dict.fromkeys(JOB_IDS, st.integers(NO_POOL, 1))))
    def place(self, pools: dict[str, int]) -> None:
        self.turns.place({job_id: pools[job_id] for job_id in self.computed})

    @rule(elapsed_s=st.floats(0, 50))
    def wait(self, elapsed_s: float) -> None:
        self.now_s += elapsed_s
        self.turns.observe(self.now_s, is_saturated=len(self.in_flight) > 3)

    @invariant()
    def accounts_balance(self) -> None:
        self.turns.check()
        accounts = self.turns._shares.accounts
        num_in_flight = sum(len(account.in_flight) for account in accounts.values())
        assert num_in_flight == len(self.in_flight)
        assert self.computed == {
            job: account.num_fair_tokens + account.num_urgent_tokens
            for job, account in accounts.items()
        }


TestTurns = TurnsMachine.TestCase
TestTurns.settings = settings(deadline=None)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(weights, due_ats), min_size=2, max_size=4),
    st.lists(st.tuples(row_tokens, st.booleans()), min_size=1, max_size=20),
)
def test_no_job_starves_while_it_has_rows(
    jobs: list[tuple[float, float | None]], rows: list[tuple[int, bool]]
) -> None:
    turns = JobTurns(QUANTUM_TOKENS)
    waits = dict.fromkeys(JOB_IDS[: len(jobs)], 0)
    for job_id, (weight, deadline_at) in zip(waits, jobs, strict=True):
        turns.join(job_id, weight, 200_000, deadline_at=deadline_at)
    for row in range(1500):
        tokens, ends_subtree = rows[row % len(rows)]
        turn = turns.choose(waits.keys(), row * 0.1)
        assert turn is not None
        turns.charge(turn, row, tokens, ends_subtree=ends_subtree)
        turns.settle(turn.job_id, row, tokens)
        turns.observe(row * 0.1, is_saturated=True)
        waits = {job_id: wait + tokens for job_id, wait in waits.items()}
        waits[turn.job_id] = 0
        assert max(waits.values()) <= longest_wait_tokens([weight for weight, _ in jobs])


def longest_wait_tokens(job_weights: list[float]) -> float:
    """By fair share a job waits for a turn of each other one, and until their levels have caught up
    with its last turn. Deadlines take at most `MOST_SHARE` of all, but for their first credits."""
    others = job_weights[1:]
    fair = TURN_TOKENS * (len(others) + sum(job_weights) / min(job_weights))
    credits = (QUANTUM_TOKENS + TURN_TOKENS) * len(job_weights)
    return (fair + credits) / (1 - MOST_SHARE)


@settings(deadline=None)
@given(st.lists(weights, min_size=2, max_size=4), st.lists(row_tokens, min_size=1, max_size=20))
def test_no_job_is_ever_more_than_a_quantum_and_a_row_ahead(
    job_weights: list[float], rows: list[int]
) -> None:
    shares = JobShares(QUANTUM_TOKENS)
    ready = set(JOB_IDS[: len(job_weights)])
    for job_id, weight in zip(JOB_IDS, job_weights, strict=False):
        shares.join(job_id, weight, WorkLeft(0))
    for row in range(200):
        tokens = rows[row % len(rows)]
        chosen = shares.holder(ready) or shares.begin_turn(ready)
        assert chosen is not None
        shares.charge(chosen, row, tokens, is_urgent=False)
        lowest = min(account.level for account in shares.accounts.values())
        for account in shares.accounts.values():
            ahead_tokens = (account.level - lowest) * account.weight
            assert ahead_tokens < TURN_TOKENS + 1e-6


works = st.builds(JobWork, weights, st.floats(1, 1e6), st.just(0.0), owners, num=st.just(1))


@given(st.dictionaries(job_ids, works, min_size=1))
def test_fair_shares_lose_no_capacity_and_hold_no_job_below_its_part(
    jobs: dict[str, JobWork],
) -> None:
    finishes_s = fair_finishes_s(jobs, 1000.0)

    total = sum(work.tokens for work in jobs.values())
    assert max(finishes_s.values()) == pytest.approx(total / 1000)
    parts = fair_parts(jobs)
    assert sum(parts.values()) == pytest.approx(1)
    for job_id, work in jobs.items():
        least_s, most_s = work.tokens / 1000, work.tokens / (1000 * parts[job_id])
        assert least_s * 0.999 <= finishes_s[job_id] <= most_s * 1.001


@given(st.lists(st.tuples(st.floats(10, 1000), st.floats(1, 1e5)), min_size=1, max_size=5))
def test_claims_do_all_the_work_up_to_each_deadline_or_take_all_they_may(
    due: list[tuple[float, float]],
) -> None:
    kept = [Kept(left_s, str(i), tokens) for i, (left_s, tokens) in enumerate(sorted(due))]
    shares = needed_shares(kept, [entry.left_s for entry in kept], 1000.0)

    claimed = total = 0.0
    for entry in kept:
        claimed += shares.get(entry.job_id, 0.0)
        total += entry.tokens
        enough = claimed * 1000 * entry.left_s >= total * 0.999
        assert enough or claimed == pytest.approx(MOST_SHARE)
    assert all(share > 0 for share in shares.values())
