"""Weighted fair share between jobs, in computed tokens, one prefix subtree at a time.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): the next turn is that of the job at
the lowest level, its charged tokens by its weight. A turn is a subtree, so that the KV of its
prefix stays in use, or a quantum where a subtree is longer.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

from batchrun.pool.work_left import WorkLeft

QUANTUM_TOKENS = 32_768


class Charge(NamedTuple):
    """What a row in flight was charged; an urgent one is no part of the fair share."""

    estimated_tokens: int
    charged_tokens: int
    is_urgent: bool


@dataclass(slots=True)
class JobAccount:
    """One job: what it was charged, and what it really computed.

    `fair_tokens` is what its level counts: rows handed out by fair share, corrected once they are
    back. `num_fair_tokens` and `num_urgent_tokens` were computed by the rows that are back.
    """

    weight: float
    work: WorkLeft
    start_level: float = 0.0
    level: float = 0.0
    fair_tokens: int = 0
    num_fair_tokens: int = 0
    num_urgent_tokens: int = 0
    is_awake: bool = False
    in_flight: dict[int, Charge] = field(default_factory=dict)

    def add(self, tokens: int) -> None:
        """Raise the level by a charge, or lower it by a negative one."""
        self.fair_tokens += tokens
        self.level = self.start_level + self.fair_tokens / self.weight

    def wake_at(self, level: float) -> None:
        """The job has rows again: what it could have had meanwhile is gone."""
        self.is_awake = True
        if self.level < level:
            self.start_level += level - self.level
            self.level = self.start_level + self.fair_tokens / self.weight


class JobShares:
    """The accounts of all jobs, and whose turn it is.

    `ready` is always the set of jobs that have a row to hand out now. A job that was not in it the
    last time, because it is new, was paused or waited, starts at the level of the least served.
    """

    def __init__(self, quantum_tokens: int = QUANTUM_TOKENS) -> None:
        self._quantum_tokens = quantum_tokens
        self._accounts: dict[str, JobAccount] = {}
        self._level = 0.0
        self._turn: str | None = None
        self.num_in_flight = 0
        self.in_flight_tokens = 0

    @property
    def accounts(self) -> dict[str, JobAccount]:
        """By job, in the order in which they joined; to read only."""
        return self._accounts

    def join(self, job_id: str, weight: float, work: WorkLeft) -> None:
        """A job takes part from now on; `weight` is above 0."""
        assert job_id not in self._accounts
        self._accounts[job_id] = JobAccount(weight, work)

    def leave(self, job_id: str) -> None:
        """A job has ended or is paused; its rows in flight are nobody's any more."""
        account = self._accounts.pop(job_id)
        self.num_in_flight -= len(account.in_flight)
        self.in_flight_tokens -= sum(c.charged_tokens for c in account.in_flight.values())
        self.end_turn(job_id)

    def holder(self, ready: AbstractSet[str]) -> str | None:
        """The ready job in the middle of its turn, or None where a turn has to begin."""
        self._wake(ready)
        if self._turn is None or self._turn not in ready:
            return None
        account = self._accounts[self._turn]
        ahead_tokens = (account.level - self._level) * account.weight
        return self._turn if ahead_tokens < self._quantum_tokens else None

    def begin_turn(self, ready: AbstractSet[str]) -> str | None:
        """Give the turn to the ready job at the lowest level; None when none is ready.

        Call `holder` with the same jobs first. Among equals, who joined first goes first.
        """
        awake = [(job_id, a) for job_id, a in self._accounts.items() if job_id in ready]
        self._turn = min(awake, key=lambda item: item[1].level)[0] if awake else None
        return self._turn

    def end_turn(self, job_id: str) -> None:
        """The job's subtree is handed out: if it has the turn, another begins."""
        if self._turn == job_id:
            self._turn = None

    def charge(self, job_id: str, row: int, estimated_tokens: int, *, is_urgent: bool) -> int:
        """A row is handed out; returns its charge, the estimate corrected by the rows before it.

        An urgent row leaves the level where it is.
        """
        account = self._accounts[job_id]
        assert row not in account.in_flight
        tokens = account.work.corrected(estimated_tokens)
        account.in_flight[row] = Charge(estimated_tokens, tokens, is_urgent)
        self.num_in_flight += 1
        self.in_flight_tokens += tokens
        if not is_urgent:
            account.add(tokens)
        return tokens

    def settle(self, job_id: str, row: int, computed_tokens: int) -> None:
        """A row has ended: its charge becomes what it computed. Free where its job has left."""
        account = self._accounts.get(job_id)
        if account is None:
            return
        charge = self._take_back(account, row)
        account.work.settle(charge.estimated_tokens, computed_tokens)
        if charge.is_urgent:
            account.num_urgent_tokens += computed_tokens
        else:
            account.num_fair_tokens += computed_tokens
            account.add(computed_tokens - charge.charged_tokens)

    def refund(self, job_id: str, row: int) -> None:
        """A row came back unfinished and will run again. Free where its job has left."""
        account = self._accounts.get(job_id)
        if account is None:
            return
        charge = self._take_back(account, row)
        if not charge.is_urgent:
            account.add(-charge.charged_tokens)

    def check(self) -> None:
        """Recount every account; raises AssertionError when one does not balance."""
        charges = [c for a in self._accounts.values() for c in a.in_flight.values()]
        assert self.num_in_flight == len(charges)
        assert self.in_flight_tokens == sum(c.charged_tokens for c in charges)
        for account in self._accounts.values():
            fair = [c for c in account.in_flight.values() if not c.is_urgent]
            in_flight_tokens = sum(charge.charged_tokens for charge in fair)
            assert account.fair_tokens == account.num_fair_tokens + in_flight_tokens
            assert account.level == account.start_level + account.fair_tokens / account.weight
        assert self._turn is None or self._turn in self._accounts

    def _wake(self, ready: AbstractSet[str]) -> None:
        """Find the level of the least served job; who was not ready before starts there."""
        lowest = float("inf")
        waking: list[JobAccount] = []
        for job_id, account in self._accounts.items():
            if job_id not in ready:
                account.is_awake = False
            elif not account.is_awake:
                waking.append(account)
            elif account.level < lowest:
                lowest = account.level
        if lowest < float("inf"):
            self._level = lowest
        for account in waking:
            account.wake_at(self._level)

    def _take_back(self, account: JobAccount, row: int) -> Charge:
        charge = account.in_flight.pop(row)
        self.num_in_flight -= 1
        self.in_flight_tokens -= charge.charged_tokens
        return charge
