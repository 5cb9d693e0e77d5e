"""Which job hands out the next row: weighted fair shares in computed tokens, one subtree at a time.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): the next turn is that of the job at
the lowest level, its charged tokens by its weight. A turn is a subtree, so that the KV of its
prefix stays in use, or a quantum where a subtree is longer. What a job still has to compute is its
estimate, corrected by what came back; what deadlines need comes on top.
"""

from __future__ import annotations

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
from batchrun.pool.pace import CapacityForecast, Completion, LastRows
from batchrun.pool.row_times import RowTimes

DOUBT = 0.3
"""How far an estimate may be off, as a share, before any row has come back."""
PRIOR_ROWS = 8
"""So many rows must come back to weigh as much as the estimate itself."""
HALF_LIFE_ROWS = 256
"""A row weighs half as much in the correction once so many others have come back after it."""

_DECAY = 0.5 ** (1 / HALF_LIFE_ROWS)


@dataclass(slots=True)
class WorkLeft:
    """The computed tokens that a job's unfinished rows will take.

    A row comes with an estimate. The ratio of computed to estimated tokens of the rows that came
    back corrects what is left, and the estimates of rows to come. Rows in flight count as left.
    """

    estimated_tokens: int
    ratio: float = 1.0
    _seen_rows: float = 0.0
    _seen_estimated: float = 0.0
    _seen_computed: float = 0.0

    @property
    def tokens(self) -> float:
        """The best guess."""
        return self.estimated_tokens * self.ratio

    @property
    def doubt(self) -> float:
        """How far the guess may be off, as a share: from `DOUBT` to nothing as rows come back."""
        return DOUBT * PRIOR_ROWS / (self._seen_rows + PRIOR_ROWS)

    def corrected(self, estimated_tokens: int) -> int:
        """What a row with this estimate will compute, by the rows that came back."""
        return round(estimated_tokens * self.ratio)

    def settle(self, estimated_tokens: int, computed_tokens: int) -> None:
        """A row with this estimate has ended, after so many computed tokens."""
        self.estimated_tokens = max(self.estimated_tokens - estimated_tokens, 0)
        self._seen_rows = self._seen_rows * _DECAY + 1
        self._seen_estimated = self._seen_estimated * _DECAY + estimated_tokens
        self._seen_computed = self._seen_computed * _DECAY + computed_tokens
        if self._seen_estimated > 0:
            seen_ratio = self._seen_computed / self._seen_estimated
            rows = self._seen_rows
            self.ratio = (rows * seen_ratio + PRIOR_ROWS) / (rows + PRIOR_ROWS)


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
    """The `accounts` of all jobs, in the order in which they joined, and whose turn it is.

    `ready` is always the set of jobs that have a row to hand out now. A job that was not in it the
    last time, because it is new, was paused or waited, starts at the level of the least served.
    Each engine has a turn of its own; `eligible` are the ready jobs with a row for it.
    """

    def __init__(self, quantum_tokens: int = QUANTUM_TOKENS) -> None:
        self._quantum_tokens = quantum_tokens
        self.accounts: dict[str, JobAccount] = {}
        self._level = 0.0
        self._least_level = 0.0
        self._turns: dict[int, str] = {}
        self.num_in_flight = 0
        self.in_flight_tokens = 0

    def join(self, job_id: str, weight: float, work: WorkLeft) -> None:
        """A job takes part from now on; `weight` is above 0."""
        assert job_id not in self.accounts
        self.accounts[job_id] = JobAccount(weight, work)

    def leave(self, job_id: str) -> None:
        """A job has ended or is paused; its rows in flight are nobody's any more."""
        account = self.accounts.pop(job_id)
        self.num_in_flight -= len(account.in_flight)
        self.in_flight_tokens -= sum(c.charged_tokens for c in account.in_flight.values())
        self.end_turn(job_id)

    def holder(
        self,
        ready: AbstractSet[str],
        eligible: AbstractSet[str] | None = None,
        engine: int = 0,
    ) -> str | None:
        """The eligible job in the middle of its turn, or None where a turn has to begin. All ready
        jobs are eligible unless it is said."""
        eligible = ready if eligible is None else eligible
        self._wake(ready, eligible)
        turn = self._turns.get(engine)
        if turn is None or turn not in eligible:
            return None
        return turn if self.is_in_turn(turn, engine) else None

    def begin_turn(self, eligible: AbstractSet[str], engine: int = 0) -> str | None:
        """Give the turn to the eligible job at the lowest level; None when there is none.

        Call `holder` with the same jobs first. Among equals, who joined first goes first.
        """
        awake = [(job_id, a) for job_id, a in self.accounts.items() if job_id in eligible]
        if not awake:
            self._turns.pop(engine, None)
            return None
        self._turns[engine] = min(awake, key=lambda item: item[1].level)[0]
        return self._turns[engine]

    def end_turn(self, job_id: str, engine: int | None = None) -> None:
        """The job's subtree is handed out: if it has the turn, of this engine or of any, another
        begins."""
        for each in [each for each, turn in self._turns.items() if turn == job_id]:
            if engine is None or each == engine:
                del self._turns[each]

    def is_in_turn(self, job_id: str, engine: int = 0) -> bool:
        """Whether the job goes on with its turn, if it has a row."""
        if self._turns.get(engine) != job_id:
            return False
        account = self.accounts[job_id]
        return (account.level - self._least_level) * account.weight < self._quantum_tokens

    def charge(self, job_id: str, row: int, estimated_tokens: int, *, is_urgent: bool) -> int:
        """A row is handed out; returns its charge, the estimate corrected by the rows before it.

        An urgent row leaves the level where it is.
        """
        account = self.accounts[job_id]
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
        account = self.accounts.get(job_id)
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
        account = self.accounts.get(job_id)
        if account is None:
            return
        charge = self._take_back(account, row)
        if not charge.is_urgent:
            account.add(-charge.charged_tokens)

    def check(self) -> None:
        """Recount every account; raises AssertionError when one does not balance."""
        charges = [c for a in self.accounts.values() for c in a.in_flight.values()]
        assert self.num_in_flight == len(charges)
        assert self.in_flight_tokens == sum(c.charged_tokens for c in charges)
        for account in self.accounts.values():
            fair = [c for c in account.in_flight.values() if not c.is_urgent]
            in_flight_tokens = sum(charge.charged_tokens for charge in fair)
            assert account.fair_tokens == account.num_fair_tokens + in_flight_tokens
            assert account.level == account.start_level + account.fair_tokens / account.weight
        assert set(self._turns.values()) <= self.accounts.keys()

    def _wake(self, ready: AbstractSet[str], eligible: AbstractSet[str]) -> None:
        """Find the level of the least served job; who was not ready before starts there."""
        lowest = float("inf")
        waking: list[JobAccount] = []
        for job_id, account in self.accounts.items():
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
        levels = [a.level for job_id, a in self.accounts.items() if job_id in eligible]
        self._least_level = min(levels, default=self._level)

    def _take_back(self, account: JobAccount, row: int) -> Charge:
        charge = account.in_flight.pop(row)
        self.num_in_flight -= 1
        self.in_flight_tokens -= charge.charged_tokens
        return charge


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
        self, job_id: str, weight: float, work_tokens: int, *, deadline_at: float | None = None
    ) -> None:
        """A job runs from now on, or again after a pause.

        `work_tokens` is the sum of the estimates of its rows that have no result yet.
        """
        self._shares.join(job_id, weight, WorkLeft(work_tokens))
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
        urgent = self._urgent.choose(eligible, is_between_turns=holder is None)
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

    def completions(self) -> dict[str, Completion]:
        """When the running jobs will be done; empty while the pace is not known."""
        works = self._works()
        return self._capacity.completions.predict(works, self._claims, self._last_rows())

    def predict(self, weight: float, work_tokens: int) -> Completion | None:
        """When a job would be done that joined now; None while the pace is not known."""
        works = self._works() | {NEW_JOB: JobWork(weight, work_tokens, DOUBT)}
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

    def _works(self) -> dict[str, JobWork]:
        return {
            job_id: JobWork(account.weight, account.work.tokens, account.work.doubt)
            for job_id, account in self._shares.accounts.items()
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
