"""Which job hands out the next row: weighted fair shares in computed tokens, one subtree at a time.

A turn is a subtree, so that the KV of its prefix stays in use, or a quantum where a subtree is
longer. What a job still has to compute is its estimate, corrected by what came back; what deadlines
need comes on top, but for jobs whose owners are bounded: theirs comes out of the owner's share.
Engines that share no model have capacities of their own, which go by the number of a pool.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

from batchrun.pool.deadlines import (
    DEFAULT_MARGINS,
    Claim,
    Deadlines,
    JobWork,
    Margins,
    Outlook,
    UrgentTurns,
)
from batchrun.pool.job_shares import DOUBT, OPERATOR, QUANTUM_TOKENS, JobShares, Owner, WorkLeft
from batchrun.pool.pace import CapacityForecast, Completion, LastRows
from batchrun.pool.row_times import RowTimes

REVIEW_INTERVAL_S = 1.0
NO_POOL = -1
"""That of models that no engine has, and of jobs that have left."""
NEW_JOB = ""
"""Stands for a job that is only asked about."""


class Turn(NamedTuple):
    """The job that hands out the next row to an engine, and whether its deadline is why."""

    job_id: str
    is_urgent: bool
    engine: int = 0


@dataclass(slots=True)
class _Pool:
    """Engines that share models: how fast they are, and what deadlines claim of that."""

    urgent: UrgentTurns
    capacity: CapacityForecast = field(default_factory=CapacityForecast)
    claims: dict[str, float] = field(default_factory=dict)


class JobTurns:
    """Whose row is next, for all jobs of a deployment.

    All tokens are computed tokens: prompt tokens that are not cached, and output tokens. Instants
    are on the clock of `now_s`. For each row: `choose`, `charge`, and `settle` or `refund`.
    """

    def __init__(
        self, quantum_tokens: int = QUANTUM_TOKENS, margins: Margins = DEFAULT_MARGINS
    ) -> None:
        self._quantum_tokens = quantum_tokens
        self._shares = JobShares(quantum_tokens)
        self._deadlines = Deadlines(margins)
        self._pools = defaultdict[int, _Pool](lambda: _Pool(UrgentTurns(quantum_tokens)))
        self._review_at = float("-inf")
        self._times: dict[str, RowTimes] = {}
        self.now_s = 0.0

    def pace(self, pool: int = 0) -> tuple[float | None, float]:
        """Computed tokens per second of the last minute in which the engines were full (None while
        not known), and how many such seconds were seen."""
        completions = self._pools[pool].capacity.completions
        return completions.tokens_per_s, completions.seen_s

    def join(
        self,
        job_id: str,
        weight: float,
        work_tokens: int,
        *,
        deadline_at: float | None = None,
        owner: Owner = OPERATOR,
        seq: int = 0,
    ) -> None:
        """A job runs from now on, or again after a pause.

        `work_tokens` is the sum of the estimates of its rows that have no result yet, `seq` its
        number among all jobs as they came.
        """
        self._shares.join(job_id, weight, WorkLeft(work_tokens), owner)
        self._times[job_id] = RowTimes()
        if deadline_at is not None:
            self._deadlines.join(job_id, deadline_at, seq)
        self._review_at = float("-inf")

    def leave(self, job_id: str) -> None:
        """A job has ended or is paused: no turn, no claim; its rows in flight are free."""
        self._shares.leave(job_id)
        del self._times[job_id]
        for pool in self._pools.values():
            pool.urgent.leave(job_id)
        self._deadlines.leave(job_id)
        self._review_at = float("-inf")

    def place(self, pool_of: Mapping[str, int]) -> None:
        """From now on these jobs share the engines of these pools; of 0 until it is said. One whose
        model no engine has stays where it was."""
        for job_id, number in pool_of.items():
            if number != NO_POOL:
                self._shares.place(job_id, number)

    def choose(
        self,
        ready: AbstractSet[str],
        now_s: float,
        eligible: AbstractSet[str] | None = None,
        engine: int = 0,
    ) -> Turn | None:
        """The job whose row goes to an engine next; None when there is none.

        `ready` are the jobs with a row to hand out, `eligible` those with one for this engine (not
        given: the same), all of one pool. Those that have left are passed over.
        """
        self.now_s = now_s
        if now_s >= self._review_at:
            self._review(now_s, ready)
        eligible = ready if eligible is None else eligible
        numbers = (each for each in map(self._number, eligible) if each != NO_POOL)
        pool = self._pools[next(numbers, NO_POOL)]
        holder = self._shares.holder(ready, eligible, engine)
        may_hurry = self._shares.in_share(eligible) if pool.claims else eligible
        urgent = pool.urgent.choose(may_hurry, is_between_turns=holder is None)
        if urgent is not None:
            return Turn(urgent, is_urgent=True, engine=engine)
        fair = holder or self._shares.begin_turn(eligible, engine)
        return None if fair is None else Turn(fair, is_urgent=False, engine=engine)

    def charge(self, turn: Turn, row: int, estimated_tokens: int, *, ends_subtree: bool) -> None:
        """A row is handed out. `ends_subtree`: the job's next row there has another prefix."""
        job_id, is_urgent, engine = turn
        urgent = self._pools[self._number(job_id)].urgent
        tokens = self._shares.charge(job_id, row, estimated_tokens, is_urgent=is_urgent)
        self._times[job_id].sent(row, self.now_s)
        urgent.charge(job_id, tokens, is_urgent=is_urgent)
        if ends_subtree:
            self._shares.end_turn(job_id, engine)
            urgent.end_turn(job_id)

    def is_in_turn(self, job_id: str, engine: int = 0) -> bool:
        """Whether the job goes on with its fair turn on an engine, if it has a row."""
        return self._shares.is_in_turn(job_id, engine)

    def settle(self, job_id: str, row: int, computed_tokens: int) -> None:
        """A row has ended, with or without error, after so many computed tokens."""
        self._pools[self._number(job_id)].capacity.add(computed_tokens)
        self._shares.settle(job_id, row, computed_tokens)
        if job_id in self._times:
            self._times[job_id].ended(row, self.now_s)

    def refund(self, job_id: str, row: int) -> None:
        """A row came back unfinished and will run again."""
        self._shares.refund(job_id, row)
        if job_id in self._times:
            self._times[job_id].lost(row)

    def observe(
        self, now_s: float, *, is_saturated: bool, pool: int = 0, speed: float = 1.0
    ) -> None:
        """From now on the engines of a pool have all the rows that they take, or not, and are so
        fast together (see `CapacityForecast.observe`).

        Call it after each round of handing out, at least a few times a second.
        """
        self.now_s = now_s
        num_in_flight = self._shares.num_in_flight[pool]
        capacity = self._pools[pool].capacity
        capacity.observe(now_s, num_in_flight, is_saturated=is_saturated, speed=speed)

    def outlook(self, job_id: str) -> Outlook | None:
        """What becomes of a job's deadline; None without one, or before there is a forecast."""
        return self._deadlines.outlook(job_id)

    def completions(self, waiting: AbstractSet[str] = frozenset()) -> dict[str, Completion]:
        """When the running jobs will be done, but for those that wait for another time of day, and
        those in flight as a whole of whose rows too few have ended; empty while no pace is known.
        """
        found: dict[str, Completion] = {}
        for number, pool in self._pools.items():
            works, last_rows = self._works(number, waiting), self._last_rows(number)
            its = pool.capacity.completions.predict(works, pool.claims, last_rows)
            found |= {i: its[i] for i in its if i in last_rows or not self._are_sent(i)}
        return found

    def predict(
        self, weight: float, tokens: int, waiting: AbstractSet[str] = frozenset(), pool: int = 0
    ) -> Completion | None:
        """When a job would be done that joined now; None while the pace is not known."""
        works = self._works(pool, waiting) | {NEW_JOB: JobWork(weight, tokens, DOUBT)}
        known = self._pools[pool]
        return known.capacity.completions.predict(works, known.claims, {}).get(NEW_JOB)

    def take_news(self) -> list[Outlook]:
        """Outlooks to announce: those that changed since the last call."""
        return self._deadlines.take_news()

    def check(self) -> None:
        """Recount everything; raises AssertionError when an account does not balance."""
        self._shares.check()
        for pool in self._pools.values():
            pool.urgent.check(self._shares.accounts.keys())

    def _number(self, job_id: str) -> int:
        account = self._shares.accounts.get(job_id)
        return NO_POOL if account is None else account.tenant.pool

    def _in_flight_tokens(self, pool: int) -> int:
        rows = (account.in_flight for _, account in self._shares.jobs(pool))
        return sum(charge.charged_tokens for each in rows for charge in each.values())

    def _review(self, now_s: float, ready: AbstractSet[str]) -> None:
        self._review_at = now_s + REVIEW_INTERVAL_S
        accounts = self._shares.accounts.items()
        waiting = {i for i, account in accounts if i not in ready and not account.in_flight}
        for number, pool in self._pools.items():
            capacity, pool.claims = pool.capacity.tokens_per_s, {}
            works = self._works(number)
            works |= {i: works[i]._replace(is_waiting=True) for i in waiting & works.keys()}
            if capacity is not None:
                lag_s = (self._in_flight_tokens(number) + self._quantum_tokens) / capacity
                pool.claims = self._deadlines.review(now_s, capacity, lag_s, works)
            claims = {i: Claim(share, works[i].tokens) for i, share in pool.claims.items()}
            pool.urgent.claim(claims)

    def _works(self, pool: int, waiting: AbstractSet[str] = frozenset()) -> dict[str, JobWork]:
        return {
            job_id: JobWork(job.weight, job.work.tokens, job.work.doubt, job.tenant.owner)
            for job_id, job in self._shares.jobs(pool)
            if job_id not in waiting
        }

    def _last_rows(self, pool: int) -> dict[str, LastRows]:
        found, in_flight_tokens = {}, self._in_flight_tokens(pool)
        for job_id, _ in self._shares.jobs(pool):
            last_end = self._times[job_id].last_end_s(self.now_s)
            if last_end is not None:
                found[job_id] = LastRows(last_end, in_flight_tokens, self._are_sent(job_id))
        return found

    def _are_sent(self, job_id: str) -> bool:
        """Whether a job has rows in flight and no others."""
        account = self._shares.accounts[job_id]
        estimated = sum(each.estimated_tokens for each in account.in_flight.values())
        return bool(account.in_flight) and estimated >= account.work.estimated_tokens
