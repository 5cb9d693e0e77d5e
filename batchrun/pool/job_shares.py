"""What each job was charged, and whose turn is next: fair shares of tenants, then of their jobs.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) on two levels: the next turn is that
of the tenant at the lowest level, its charged tokens by its weight, and of the job at the lowest
level among those of the tenant. A tenant weighs as much as its heaviest job that is ready, so that
many jobs of one weigh as one.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

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


class Owner(NamedTuple):
    """Whose a job is: the id of an API key; "" is the operator. One that `is_bounded` never gets
    more than its share, whatever deadlines its jobs have."""

    id: str = ""
    is_bounded: bool = False


OPERATOR = Owner()


class Charge(NamedTuple):
    """What a row in flight was charged; an urgent one is no part of its job's fair share.

    `tenant_weight` is what its `tenant` weighed then; None: the tenant was not charged.
    """

    estimated_tokens: int
    charged_tokens: int
    is_urgent: bool
    tenant: Tenant
    tenant_weight: float | None


@dataclass(slots=True, eq=False)
class Tenant:
    """The jobs of one owner that share a pool of engines, and the level of all of them together;
    `weight` is that of the heaviest that is ready."""

    owner: Owner
    pool: int = 0
    weight: float = 0.0
    level: float = 0.0
    is_awake: bool = False
    jobs: dict[str, JobAccount] = field(default_factory=dict)
    peers: Peers = field(default_factory=lambda: Peers())

    def add(self, job_id: str, account: JobAccount) -> None:
        """A job has joined."""
        self.jobs[job_id], account.tenant = account, self
        self.weight = max(self.weight, account.weight)

    def wake_at(self, level: float) -> None:
        """It has rows again: what it could have had meanwhile is gone."""
        self.is_awake = True
        self.level = max(self.level, level)


@dataclass(slots=True, eq=False)
class JobAccount:
    """One job: what it was charged, and what it really computed.

    `fair_tokens` is what its level counts: rows handed out by fair share, corrected once they are
    back. `num_fair_tokens` and `num_urgent_tokens` were computed by the rows that are back.
    """

    weight: float
    work: WorkLeft
    tenant: Tenant
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


@dataclass(slots=True)
class Peers:
    """Tenants, or the jobs of one: by engine, the level of the least served that was awake and
    eligible, and the least of those that could have a turn."""

    levels: dict[int, float] = field(default_factory=dict)
    least_level: float = 0.0

    def wake(self, members: Iterable[tuple[Tenant | JobAccount, bool, bool]], engine: int) -> None:
        """Each with whether it is ready and whether it is eligible. Who was not ready before
        starts at the level of the least served of those that `engine` could serve: who waits for
        an engine of another model says nothing of what is fair here."""
        lowest, awake = math.inf, list[float]()
        waking: list[Tenant | JobAccount] = []
        for member, is_ready, is_eligible in members:
            if not is_ready:
                member.is_awake = False
            elif not member.is_awake:
                waking += [member] * is_eligible
            else:
                lowest = min(lowest, member.level)
                awake += [member.level] * is_eligible
        if awake:
            level = min(awake)
        elif lowest < math.inf:
            level = max(self.levels.get(engine, 0.0), lowest)
        else:
            level = max(self.levels.values(), default=0.0)
        for member in waking:
            member.wake_at(level)
            awake.append(member.level)
        if awake:
            self.levels[engine] = level
        self.least_level = min(awake, default=level)


class JobShares:
    """The `accounts` of all jobs, in the order in which they joined, and whose turn it is;
    `num_in_flight` counts rows by pool.

    `ready` is always the set of jobs that have a row to hand out now. A job that was not in it the
    last time, because it is new, was paused or waited, starts at the level of the least served of
    its tenant's on the same engine, and so do tenants. Each engine has a turn of its own;
    `eligible` are the ready jobs with a row for it.
    """

    def __init__(self, quantum_tokens: int = QUANTUM_TOKENS) -> None:
        self._quantum_tokens = quantum_tokens
        self.accounts: dict[str, JobAccount] = {}
        self._tenants: dict[tuple[str, int], Tenant] = {}
        self._peers = Peers()
        self._turns: dict[int, str] = {}
        self.num_in_flight = Counter[int]()

    def join(self, job_id: str, weight: float, work: WorkLeft, owner: Owner = OPERATOR) -> None:
        """A job takes part from now on; `weight` is above 0."""
        assert job_id not in self.accounts
        self._forget_tenants()
        tenant = self._tenants.setdefault((owner.id, 0), Tenant(owner))
        self.accounts[job_id] = JobAccount(weight, work, tenant)
        tenant.add(job_id, self.accounts[job_id])

    def place(self, job_id: str, pool: int) -> None:
        """The job shares the engines of this pool from now on; of 0 until it is said. What it had
        elsewhere says nothing there."""
        account = self.accounts[job_id]
        owner, before = account.tenant.owner, account.tenant.pool
        if before == pool:
            return
        del account.tenant.jobs[job_id]
        self._tenants.setdefault((owner.id, pool), Tenant(owner, pool)).add(job_id, account)
        self.end_turn(job_id)
        account.is_awake = False
        account.start_level -= account.level
        account.add(0)
        self.num_in_flight[before] -= len(account.in_flight)
        self.num_in_flight[pool] += len(account.in_flight)

    def jobs(self, pool: int) -> Iterator[tuple[str, JobAccount]]:
        """Those that share the engines of a pool."""
        return (job for t in self._tenants.values() if t.pool == pool for job in t.jobs.items())

    def leave(self, job_id: str) -> None:
        """A job has ended or is paused; its rows in flight are nobody's any more. Its tenant keeps
        their charge: whoever makes and cancels jobs gains nothing by it."""
        account = self.accounts.pop(job_id)
        del account.tenant.jobs[job_id]
        self.num_in_flight[account.tenant.pool] -= len(account.in_flight)
        self.end_turn(job_id)

    def holder(
        self, ready: AbstractSet[str], eligible: AbstractSet[str] | None = None, engine: int = 0
    ) -> str | None:
        """The eligible job in the middle of its turn, or None where a turn has to begin. All ready
        jobs are eligible unless it is said."""
        eligible = ready if eligible is None else eligible
        self._peers.wake(self._wake_jobs(ready, eligible, engine), engine)
        turn = self._turns.get(engine)
        if turn is None or turn not in eligible:
            return None
        return turn if self.is_in_turn(turn, engine) else None

    def begin_turn(self, eligible: AbstractSet[str], engine: int = 0) -> str | None:
        """Give the turn to the eligible job at the lowest level of the tenant at the lowest; None
        when there is none.

        Call `holder` with the same jobs first. Among equals, who joined first goes first.
        """
        self._turns.pop(engine, None)
        tenants = [t for t in self._tenants.values() if not t.jobs.keys().isdisjoint(eligible)]
        if not tenants:
            return None
        jobs = min(tenants, key=lambda tenant: tenant.level).jobs
        awake = [(job_id, account) for job_id, account in jobs.items() if job_id in eligible]
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
        ahead = (account.level - account.tenant.peers.least_level) * account.weight
        return ahead < self._quantum_tokens and self._is_near(account.tenant)

    def in_share(self, job_ids: AbstractSet[str]) -> set[str]:
        """Those of the jobs whose owners may have urgent rows now: all but jobs of a bounded owner
        that is a quantum ahead of the least served. Call `holder` first."""
        tenants = {each: self.accounts[each].tenant for each in job_ids & self.accounts.keys()}
        return {i for i, t in tenants.items() if not t.owner.is_bounded or self._is_near(t)}

    def charge(self, job_id: str, row: int, estimated_tokens: int, *, is_urgent: bool) -> int:
        """A row is handed out; returns its charge, the estimate corrected by the rows before it.

        An urgent row leaves the job's level where it is; a bounded tenant is charged for it.
        """
        account = self.accounts[job_id]
        assert row not in account.in_flight
        tokens, tenant = account.work.corrected(estimated_tokens), account.tenant
        weight = tenant.weight if tenant.owner.is_bounded or not is_urgent else None
        account.in_flight[row] = Charge(estimated_tokens, tokens, is_urgent, tenant, weight)
        self.num_in_flight[tenant.pool] += 1
        if not is_urgent:
            account.add(tokens)
        if weight is not None:
            tenant.level += tokens / weight
        return tokens

    def settle(self, job_id: str, row: int, computed_tokens: int) -> None:
        """A row has ended: its charge becomes what it computed. Free where its job has left."""
        account = self.accounts.get(job_id)
        if account is None:
            return
        charge = self._take_back(account, row, computed_tokens)
        account.work.settle(charge.estimated_tokens, computed_tokens)
        if charge.is_urgent:
            account.num_urgent_tokens += computed_tokens
        else:
            account.num_fair_tokens += computed_tokens

    def refund(self, job_id: str, row: int) -> None:
        """A row came back unfinished and will run again. Free where its job has left."""
        account = self.accounts.get(job_id)
        if account is not None:
            self._take_back(account, row, 0)

    def check(self) -> None:
        """Recount every account; raises AssertionError when one does not balance."""
        for account in self.accounts.values():
            fair = [c for c in account.in_flight.values() if not c.is_urgent]
            in_flight_tokens = sum(charge.charged_tokens for charge in fair)
            assert account.fair_tokens == account.num_fair_tokens + in_flight_tokens
            assert account.level == account.start_level + account.fair_tokens / account.weight
        assert set(self._turns.values()) <= self.accounts.keys()
        jobs = {job_id: job for t in self._tenants.values() for job_id, job in t.jobs.items()}
        assert jobs == self.accounts
        charges = [(job.tenant.pool, c) for job in jobs.values() for c in job.in_flight.values()]
        assert +self.num_in_flight == Counter(pool for pool, _ in charges)
        levels = defaultdict[Tenant, float](float)
        for _, charge in charges:
            levels[charge.tenant] += charge.charged_tokens / (charge.tenant_weight or math.inf)
        assert all(tenant.level > 0.999 * level - 1e-6 for tenant, level in levels.items())

    def _wake_jobs(
        self, ready: AbstractSet[str], eligible: AbstractSet[str], engine: int
    ) -> Iterator[tuple[Tenant, bool, bool]]:
        """Each tenant of the same engines, once its jobs are awake: whether it has one that is
        ready, and eligible."""
        tenants = self._tenants.values()
        pools = {each.pool for each in tenants if not each.jobs.keys().isdisjoint(eligible)}
        for tenant in [each for each in tenants if each.pool in pools]:
            members = [(job, key in ready, key in eligible) for key, job in tenant.jobs.items()]
            tenant.peers.wake(members, engine)
            ready_weights = (job.weight for job, is_ready, _ in members if is_ready)
            tenant.weight = max(ready_weights, default=tenant.weight)
            yield tenant, any(each[1] for each in members), any(each[2] for each in members)

    def _is_near(self, tenant: Tenant) -> bool:
        """Whether a tenant with jobs is less than a quantum ahead of the least served."""
        return (tenant.level - self._peers.least_level) * tenant.weight < self._quantum_tokens

    def _forget_tenants(self) -> None:
        """Those without jobs, once they are ahead of nobody."""
        level = min(self._peers.levels.values(), default=0.0)
        gone = [owner for owner, t in self._tenants.items() if not t.jobs and t.level <= level]
        for owner in gone:
            del self._tenants[owner]

    def _take_back(self, account: JobAccount, row: int, computed_tokens: int) -> Charge:
        """The row is in flight no longer: so much of its charge stays."""
        charge = account.in_flight.pop(row)
        self.num_in_flight[account.tenant.pool] -= 1
        over_tokens = computed_tokens - charge.charged_tokens
        if not charge.is_urgent:
            has_moved = charge.tenant is not account.tenant
            account.start_level -= has_moved * over_tokens / account.weight
            account.add(over_tokens)
        if charge.tenant_weight is not None:
            charge.tenant.level += over_tokens / charge.tenant_weight
        return charge
