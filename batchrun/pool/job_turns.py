"""Which job hands out the next row: fair shares by weight, and what deadlines need on top."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import NamedTuple

from batchrun.pool.capacity_forecast import CapacityForecast
from batchrun.pool.completion import Completion
from batchrun.pool.deadlines import DEFAULT_MARGINS, Deadlines, Margins, Outlook
from batchrun.pool.finish_times import JobWork
from batchrun.pool.job_shares import QUANTUM_TOKENS, JobShares
from batchrun.pool.urgent_turns import Claim, UrgentTurns
from batchrun.pool.work_left import DOUBT, WorkLeft

REVIEW_INTERVAL_S = 1.0
NEW_JOB = ""
"""Stands for a job that is only asked about."""


class Turn(NamedTuple):
    """The job that hands out the next row, and whether its deadline is why."""

    job_id: str
    is_urgent: bool


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

    @property
    def capacity_tokens_per_s(self) -> float | None:
        """The forecast of what the engines compute for offline work; None while unknown."""
        return self._capacity.tokens_per_s

    @property
    def pace(self) -> tuple[float | None, float]:
        """Computed tokens per second of the last minute in which the engines were full (None while
        not known), and how many such seconds were seen."""
        completions = self._capacity.completions
        return completions.tokens_per_s, completions.seen_s

    @property
    def num_in_flight(self) -> int:
        """Rows that were handed out and are neither settled nor refunded."""
        return self._shares.num_in_flight

    def computed_tokens(self) -> dict[str, int]:
        """What the rows of each job have computed since it joined."""
        return {
            job_id: account.num_fair_tokens + account.num_urgent_tokens
            for job_id, account in self._shares.accounts.items()
        }

    def join(
        self, job_id: str, weight: float, work_tokens: int, *, due_at: float | None = None
    ) -> None:
        """A job runs from now on, or again after a pause.

        `work_tokens` is the sum of the estimates of its rows that have no result yet.
        """
        self._shares.join(job_id, weight, WorkLeft(work_tokens))
        if due_at is not None:
            self._deadlines.join(job_id, due_at)
        self._review_at = float("-inf")

    def leave(self, job_id: str) -> None:
        """A job has ended or is paused: no turn, no claim; its rows in flight are free."""
        self._shares.leave(job_id)
        self._urgent.leave(job_id)
        self._deadlines.leave(job_id)
        self._review_at = float("-inf")

    def choose(self, ready: AbstractSet[str], now_s: float) -> Turn | None:
        """The job whose row goes next, of those with a row to hand out; None when there is none."""
        if now_s >= self._review_at:
            self._review(now_s)
        holder = self._shares.holder(ready)
        urgent = self._urgent.choose(ready, is_between_turns=holder is None)
        if urgent is not None:
            return Turn(urgent, is_urgent=True)
        fair = holder or self._shares.begin_turn(ready)
        return None if fair is None else Turn(fair, is_urgent=False)

    def charge(self, turn: Turn, row: int, estimated_tokens: int, *, ends_subtree: bool) -> None:
        """A row is handed out. `ends_subtree`: the job's next row has another prefix."""
        job_id, is_urgent = turn
        tokens = self._shares.charge(job_id, row, estimated_tokens, is_urgent=is_urgent)
        self._urgent.charge(job_id, tokens, is_urgent=is_urgent)
        if ends_subtree:
            self._shares.end_turn(job_id)
            self._urgent.end_turn(job_id)

    def settle(self, job_id: str, row: int, computed_tokens: int) -> None:
        """A row has ended, with or without error, after so many computed tokens."""
        self._capacity.add(computed_tokens)
        self._shares.settle(job_id, row, computed_tokens)

    def refund(self, job_id: str, row: int) -> None:
        """A row came back unfinished and will run again."""
        self._shares.refund(job_id, row)

    def observe(self, now_s: float, *, is_saturated: bool) -> None:
        """From now on the engines have all the rows that they take, or not.

        Call it after each round of handing out, at least a few times a second.
        """
        self._capacity.observe(now_s, self._shares.num_in_flight, is_saturated=is_saturated)

    def outlook(self, job_id: str) -> Outlook | None:
        """What becomes of a job's deadline; None without one, or before there is a forecast."""
        return self._deadlines.outlook(job_id)

    def completions(self) -> dict[str, Completion]:
        """When the running jobs will be done; empty while the pace is not known."""
        return self._capacity.completions.foretell(self._works(), self._claims)

    def foretell(self, weight: float, work_tokens: int) -> Completion | None:
        """When a job would be done that joined now; None while the pace is not known."""
        works = self._works() | {NEW_JOB: JobWork(weight, work_tokens, DOUBT)}
        return self._capacity.completions.foretell(works, self._claims).get(NEW_JOB)

    def take_news(self) -> list[Outlook]:
        """Outlooks to announce: those that changed since the last call."""
        return self._deadlines.take_news()

    def check(self) -> None:
        """Recount everything; raises AssertionError when an account does not balance."""
        self._shares.check()
        self._urgent.check(self._shares.accounts.keys())

    def _review(self, now_s: float) -> None:
        self._review_at = now_s + REVIEW_INTERVAL_S
        capacity = self.capacity_tokens_per_s
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

    def _works(self) -> dict[str, JobWork]:
        return {
            job_id: JobWork(account.weight, account.work.tokens, account.work.doubt)
            for job_id, account in self._shares.accounts.items()
        }
