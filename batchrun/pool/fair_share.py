"""Which job hands out the next row: weighted fair shares in computed tokens, one subtree at a time.

A turn is a subtree, so that the KV of its prefix stays in use, or a quantum where a subtree is
longer. What a job still has to compute is its estimate, corrected by what came back; what deadlines
need comes on top, but for jobs whose owners are bounded: theirs comes out of the owner's share.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
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
NEW_JOB = ""
"""Stands for a job that is only asked about."""


class Turn(NamedTuple):
    """The job that hands out the next row to an engine, and whether its deadline is why."""

    job_id: str
    is_urgent: bool
    engine: int = 0


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
        self._urgent = UrgentTurns(quantum_tokens)
        self._deadlines = Deadlines(margins)
        self._capacity = CapacityForecast()
        self._claims: dict[str, float] = {}
        self._review_at = float("-inf")
        self._times: dict[str, RowTimes] = {}
        self._now_s = 0.0

    @property
    def pace(self) -> tuple[float | None, float]:
        """Computed tokens per second of the last minute in which the engines were full (None while
        not known), and how many such seconds were seen."""
        completions = self._capacity.completions
        return completions.tokens_per_s, completions.seen_s

    def join(
        self,
        job_id: str,
        weight: float,
        work_tokens: int,
        *,
        deadline_at: float | None = None,
        owner: Owner = OPERATOR,
    ) -> None:
        """A job runs from now on, or again after a pause.

        `work_tokens` is the sum of the estimates of its rows that have no result yet.
        """
        self._shares.join(job_id, weight, WorkLeft(work_tokens), owner)
        self._times[job_id] = RowTimes()
        if deadline_at is not None:
            self._deadlines.join(job_id, deadline_at)
        self._review_at = float("-inf")

    def leave(self, job_id: str) -> None:
        """A job has ended or is paused: no turn, no claim; its rows in flight are free."""
        self._shares.leave(job_id)
        del self._times[job_id]
        self._urgent.leave(job_id)
        self._deadlines.leave(job_id)
        self._review_at = float("-inf")

    def choose(
        self,
        ready: AbstractSet[str],
        now_s: float,
        eligible: AbstractSet[str] | None = None,
        engine: int = 0,
    ) -> Turn | None:
        """The job whose row goes to an engine next; None when there is none.

        `ready` are the jobs with a row to hand out, `eligible` those with one for this engine (not
        given: the same).
        """
        self._now_s = now_s
        if now_s >= self._review_at:
            self._review(now_s)
        eligible = ready if eligible is None else eligible
        holder = self._shares.holder(ready, eligible, engine)
        may_hurry = self._shares.in_share(eligible) if self._claims else eligible
        urgent = self._urgent.choose(may_hurry, is_between_turns=holder is None)
        if urgent is not None:
            return Turn(urgent, is_urgent=True, engine=engine)
        fair = holder or self._shares.begin_turn(eligible, engine)
        return None if fair is None else Turn(fair, is_urgent=False, engine=engine)

    def charge(self, turn: Turn, row: int, estimated_tokens: int, *, ends_subtree: bool) -> None:
        """A row is handed out. `ends_subtree`: the job's next row there has another prefix."""
        job_id, is_urgent, engine = turn
        tokens = self._shares.charge(job_id, row, estimated_tokens, is_urgent=is_urgent)
        self._times[job_id].sent(row, self._now_s)
        self._urgent.charge(job_id, tokens, is_urgent=is_urgent)
        if ends_subtree:
            self._shares.end_turn(job_id, engine)
            self._urgent.end_turn(job_id)

    def is_in_turn(self, job_id: str, engine: int = 0) -> bool:
        """Whether the job goes on with its fair turn on an engine, if it has a row."""
        return self._shares.is_in_turn(job_id, engine)

    def settle(self, job_id: str, row: int, computed_tokens: int) -> None:
        """A row has ended, with or without error, after so many computed tokens."""
        self._capacity.add(computed_tokens)
        self._shares.settle(job_id, row, computed_tokens)
        if job_id in self._times:
            self._times[job_id].ended(row, self._now_s)

    def refund(self, job_id: str, row: int) -> None:
        """A row came back unfinished and will run again."""
        self._shares.refund(job_id, row)
        if job_id in self._times:
            self._times[job_id].lost(row)

    def observe(self, now_s: float, *, is_saturated: bool) -> None:
        """From now on the engines have all the rows that they take, or not.

        Call it after each round of handing out, at least a few times a second.
        """
        self._now_s = now_s
        self._capacity.observe(now_s, self._shares.num_in_flight, is_saturated=is_saturated)

    def outlook(self, job_id: str) -> Outlook | None:
        """What becomes of a job's deadline; None without one, or before there is a forecast."""
        return self._deadlines.outlook(job_id)

    def completions(self, waiting: AbstractSet[str] = frozenset()) -> dict[str, Completion]:
        """When the running jobs will be done, but for those that wait for another time of day;
        empty while the pace is not known."""
        works = self._works(waiting)
        return self._capacity.completions.predict(works, self._claims, self._last_rows())

    def predict(
        self, weight: float, work_tokens: int, waiting: AbstractSet[str] = frozenset()
    ) -> Completion | None:
        """When a job would be done that joined now; None while the pace is not known."""
        works = self._works(waiting) | {NEW_JOB: JobWork(weight, work_tokens, DOUBT)}
        return self._capacity.completions.predict(works, self._claims, {}).get(NEW_JOB)

    def take_news(self) -> list[Outlook]:
        """Outlooks to announce: those that changed since the last call."""
        return self._deadlines.take_news()

    def check(self) -> None:
        """Recount everything; raises AssertionError when an account does not balance."""
        self._shares.check()
        self._urgent.check(self._shares.accounts.keys())

    def _review(self, now_s: float) -> None:
        self._review_at = now_s + REVIEW_INTERVAL_S
        capacity = self._capacity.tokens_per_s
        if capacity is None:
            self._urgent.claim({})
            self._claims = {}
            return
        works = self._works()
        lag_s = (self._shares.in_flight_tokens + self._quantum_tokens) / capacity
        self._claims = self._deadlines.review(now_s, capacity, lag_s, works)
        self._urgent.claim({
            job_id: Claim(share, works[job_id].tokens) for job_id, share in self._claims.items()
        })

    def _works(self, waiting: AbstractSet[str] = frozenset()) -> dict[str, JobWork]:
        return {
            job_id: JobWork(
                account.weight, account.work.tokens, account.work.doubt, account.tenant.owner
            )
            for job_id, account in self._shares.accounts.items()
            if job_id not in waiting
        }

    def _last_rows(self) -> dict[str, LastRows]:
        found = {}
        for job_id, account in self._shares.accounts.items():
            last_end = self._times[job_id].last_end_s(self._now_s)
            if last_end is not None:
                estimated = sum(each.estimated_tokens for each in account.in_flight.values())
                are_sent = estimated >= account.work.estimated_tokens
                found[job_id] = LastRows(last_end, self._shares.in_flight_tokens, are_sent)
        return found
