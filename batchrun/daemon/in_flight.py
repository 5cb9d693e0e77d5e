"""What the dispatch sees of a job and of an engine: rows to run, and what is in flight.

The daemon's jobs and engines are such, and those of the simulator.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import psutil

from batchrun.daemon.faults import SOLO, TRIAL_ROWS, TRIAL_S, Backpressure, Trials
from batchrun.estimator.answer_length import AnswerLengths
from batchrun.hints import SharedPrefixes
from batchrun.pool.job_shares import Owner
from batchrun.pool.prefix_keys import ChainTable
from batchrun.pool.radix_tree import PrefixOrder
from batchrun.pool.row_queue import TICK_S, RowLoad, RowQueue, Window
from batchrun.wire import RowKey

GATEWAYS_LEARN_S = 2.0
"""Gateways look at the list of engines four times a second; one may be busy."""
LEAVING_S = 300.0
ON_THE_WAY_TOKENS = 100_000
"""So many at most are between the daemon and a scheduler: the server in front of it tokenizes one
prompt after another. Where no door of ours stands before it, calls wait behind rows there."""
ARRIVED_S = 10.0
"""What was sent before that is taken to have arrived."""
LEAST_BODIES_BYTES, BODIES_SHARE = 1 << 30, 1 / 8
SMALL_BODY_BYTES, MOST_BYTES_PER_TOKEN = 64 << 10, 16
"""Bodies that are smaller, or have fewer for each token, are bounded by windows well enough."""
NEW_ROWS = 0.1
"""What a row that was answered counts for in the mean."""


def memory_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """What the machine has, or what its container may have."""
    found = [psutil.virtual_memory().total]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # Not there; "max": no limit.
            found.append(int((cgroup / name).read_text()))
    return min(found)


MAX_BODIES_BYTES = max(LEAST_BODIES_BYTES, int(BODIES_SHARE * memory_bytes()))


class RowPlan(Protocol):
    """All rows of a job as they are known before any of them ran: the keys of each row's prompt,
    the planned order, and prompt tokens."""

    @property
    def chains(self) -> ChainTable: ...

    @property
    def order(self) -> PrefixOrder: ...

    def estimate_tokens(self, row: int) -> int: ...


class RunningJob(Protocol):
    """A job whose rows go to engines.

    `queue` holds the rows that still have to run, `trials` the suspects among them; from the
    dispatch `answers` learns how long answers are. `left_tokens` is what rows without a result are
    expected to compute when the job joins, `cost_tokens` what one is. `current_nodes` is kept by
    the dispatch: of each engine, the prefix node of the row that it got last.
    """

    current_nodes: dict[int, int]

    @property
    def id(self) -> str: ...

    @property
    def model(self) -> str:
        """The one its rows ask for; `DEFAULT_MODEL`: that of the first engine."""
        ...

    @property
    def weight(self) -> float: ...

    @property
    def owner(self) -> Owner:
        """Whose it is: fair shares are those of owners first."""
        ...

    @property
    def left_tokens(self) -> int: ...

    @property
    def plan(self) -> RowPlan: ...

    @property
    def queue(self) -> RowQueue: ...

    @property
    def trials(self) -> Trials: ...

    @property
    def answers(self) -> AnswerLengths: ...

    def cost_tokens(self, row: int) -> int: ...


JobT = TypeVar("JobT", bound=RunningJob)
SlotT = TypeVar("SlotT", bound="EngineSlot")


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """What a row asks for: room for the tokens of its prompt, and for its work in seconds of a
    usual engine.

    `limit` is that of a suspect (see `Trials`); an urgent row has some room beyond the window.
    """

    prompt_tokens: int
    work_s: float = 0.0
    limit: int | None = None
    is_urgent: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Assignment(Generic[JobT, SlotT]):
    """A row that was taken from its job's queue for an engine, which goes by its number.

    `prefixes` are for its hint, counted when it was taken: rows that were taken with it, a moment
    later, are rows to come.
    """

    job: JobT
    row: int
    slot: SlotT
    engine: int
    demand: Demand
    prefixes: SharedPrefixes

    @property
    def key(self) -> RowKey:
        """What the engine knows the row by."""
        return self.job.id, self.row

    @property
    def tokens(self) -> int:
        """Those of its prompt, as they were estimated."""
        return self.demand.prompt_tokens

    @property
    def is_urgent(self) -> bool:
        """Whether it goes before the rows that wait in the engine: its job's deadline is near."""
        return self.demand.is_urgent

    @property
    def trials(self) -> Trials:
        return self.job.trials


class LargeBodies:
    """Bodies in flight that have many more bytes than tokens, such as pictures. While those of all
    engines have `MAX_BODIES_BYTES` or more, jobs are `resting`, by id, that have one in flight or
    whose last body was one."""

    def __init__(self) -> None:
        self.resting: set[str] = set()
        self._num_bytes = Counter[str]()

    @contextmanager
    def holding(self, assignment: Assignment[Any, Any], num_bytes: int) -> Iterator[None]:
        """While the block runs, the row's body of so many bytes is in flight."""
        job_id = assignment.job.id
        if num_bytes <= max(SMALL_BODY_BYTES, MOST_BYTES_PER_TOKEN * assignment.tokens):
            self._forget(job_id)
            yield
            return
        self._count(job_id, num_bytes)
        try:
            yield
        finally:
            self._count(job_id, -num_bytes)

    def forget_all_but(self, open_jobs: Collection[str]) -> None:
        """The other jobs have ended."""
        for job_id in self._num_bytes.keys() - open_jobs:
            self._forget(job_id)

    def _forget(self, job_id: str) -> None:
        """Does nothing while one of its large bodies is in flight."""
        if not self._num_bytes[job_id]:
            del self._num_bytes[job_id]
            self.resting.discard(job_id)

    def _count(self, job_id: str, num_bytes: int) -> None:
        self._num_bytes[job_id] += num_bytes
        self.resting.clear()
        if self._num_bytes.total() >= MAX_BODIES_BYTES:
            self.resting.update(self._num_bytes)


@dataclass(slots=True, kw_only=True, eq=False)
class EngineSlot:
    """One engine, with what is in flight on it.

    `models` are those it serves; empty: it does not tell. While `is_down` it gets no rows. While it
    `is_set_apart` only suspects go to it; since `apart_since_s` the gateways know it. `row_s` is
    how long rows take. What the properties below tell is another's to say.
    """

    window: Window
    pressure: Backpressure = field(default_factory=Backpressure)
    load: RowLoad = field(default_factory=RowLoad)
    models: tuple[str, ...] | None = ()
    is_down: bool = False
    is_set_apart: bool = False
    apart_since_s: float | None = None
    row_s: float = 0.0
    in_flight: dict[RowKey, Assignment[Any, Any]] = field(default_factory=dict)
    _limits: dict[RowKey, int] = field(default_factory=dict)
    _sent_at_s: dict[RowKey, float] = field(default_factory=dict)

    @property
    def is_usable(self) -> bool:
        """Whether rows may be sent."""
        return not self.is_down

    @property
    def is_lost(self) -> bool:
        """Whether it will never be usable again by itself."""
        return False

    @property
    def is_off(self) -> bool:
        """Whether nobody wants it to run now."""
        return False

    @property
    def runs_scheduler(self) -> bool:
        """Whether batchrun's scheduler runs in it, which chooses among the rows that wait."""
        return True

    @property
    def num_running(self) -> int:
        """Offline rows that the engine runs now, as far as it tells."""
        return 0

    @property
    def num_arrived(self) -> int | None:
        """Rows of ours that have come as far as its scheduler; None where it does not tell."""
        return None

    @property
    def num_other_calls(self) -> int:
        """Calls that the engine has besides our rows, as far as it tells: online ones, and those
        that run as offline work."""
        return 0

    @property
    def alone(self) -> frozenset[RowKey]:
        """Rows that were sent to run solo, whatever they are by now."""
        return frozenset(key for key, limit in self._limits.items() if limit == SOLO)

    def serves(self, model: str) -> bool:
        """Whether rows that ask for this model can run here."""
        return True

    def is_left_alone(self, now_s: float) -> bool:
        """Whether online calls and other rows have left an engine that is set apart.

        Calls that do not end are not waited for longer than `LEAVING_S`.
        """
        if self.apart_since_s is None or len(self._limits) < len(self.in_flight):
            return False
        apart_s = now_s - self.apart_since_s
        return apart_s >= (LEAVING_S if self.num_other_calls else GATEWAYS_LEARN_S)

    def take(self, assignment: Assignment[Any, Any], now_s: float) -> None:
        """A row goes to the engine."""
        self.pressure.sent(len(self.in_flight), now_s)
        self.in_flight[assignment.key] = assignment
        self._sent_at_s[assignment.key] = now_s
        limit = assignment.trials.limits.get(assignment.row)
        if limit is not None:
            self._limits[assignment.key] = limit
        self.window.add(assignment.tokens, now_s)
        self.load.add(assignment.tokens, assignment.demand.work_s)

    @contextmanager
    def preparing(self, assignment: Assignment[Any, Any]) -> Iterator[None]:
        """While the block runs, the row has its place, and is not sent."""
        self._sent_at_s.pop(assignment.key, None)
        try:
            yield
        finally:
            self._sent_at_s[assignment.key] = time.monotonic()

    @property
    def has_sent(self) -> bool:
        """Whether a row was sent that has not come back."""
        return bool(self._sent_at_s)

    def release(self, assignment: Assignment[Any, Any]) -> None:
        """The row is in the engine no longer. Does nothing when it has left already."""
        if self.in_flight.pop(assignment.key, None) is None:
            return
        self._sent_at_s.pop(assignment.key, None)
        self._limits.pop(assignment.key, None)
        self.window.remove(assignment.tokens)
        self.load.remove(assignment.tokens, assignment.demand.work_s)

    def answered(self, duration_s: float) -> None:
        """A row was answered after so long."""
        self.row_s += (duration_s - self.row_s) * (NEW_ROWS if self.row_s else 1.0)

    @property
    def newest_s(self) -> float:
        """When the newest of the rows in flight was sent; minus infinity without any."""
        return next(reversed(self._sent_at_s.values()), -math.inf)

    @property
    def trial_s(self) -> float:
        """How long a suspect keeps others away, and they it, before something is done."""
        return max(TRIAL_S, TRIAL_ROWS * self.row_s)

    def end_trials(self, now_s: float) -> None:
        """Suspects that ran for long enough run like other rows from now on."""
        for key in [] if self.is_down else list(self._limits):
            ran_s, assignment = now_s - self._sent_at_s.get(key, now_s), self.in_flight[key]
            if assignment.trials.let_go(assignment.row, ran_s, self.trial_s):
                del self._limits[key]

    def holdouts(self, now_s: float) -> dict[RowKey, Assignment[Any, Any]]:
        """The rows in flight, once all of them have kept a suspect that is to run alone waiting for
        long; none while others are on trial."""
        is_over = not (self._limits or self.is_down) and now_s - self.newest_s >= self.trial_s
        return dict(self.in_flight) if is_over else {}

    def has_room_for(self, demand: Demand, now_s: float) -> bool:
        """Whether a row that asks for this may go now."""
        if not (self._lets_in(demand.limit) and self.pressure.allows(len(self.in_flight), now_s)):
            return False
        tokens = demand.prompt_tokens
        return self.window.has_room(tokens, self.num_running, is_urgent=demand.is_urgent)

    def opens_at_s(self, tokens: int, now_s: float) -> float:
        """When a row of so many tokens may go for which there is room: `now_s`, or when to ask
        again."""
        on_the_way = self._on_the_way_tokens(now_s)
        if on_the_way and on_the_way + tokens > ON_THE_WAY_TOKENS:
            return max(self.window.opens_at_s(tokens, now_s), now_s + TICK_S)
        return self.window.opens_at_s(tokens, now_s)

    def _on_the_way_tokens(self, now_s: float) -> int:
        """Tokens of the rows sent last that the scheduler has not seen yet."""
        num_arrived = self.num_arrived
        if num_arrived is None:
            return 0
        newest = islice(
            reversed(self.in_flight.values()), max(0, len(self.in_flight) - num_arrived)
        )
        oldest_s = now_s - ARRIVED_S
        sent_at_s = self._sent_at_s
        return sum(each.tokens for each in newest if sent_at_s.get(each.key, 0.0) > oldest_s)

    def _lets_in(self, limit: int | None) -> bool:
        """Whether the suspects among the rows in flight allow another row, of this limit."""
        limits = self._limits.values()
        if limit is None:
            return SOLO not in limits
        if limit == SOLO and self.in_flight:
            return False
        return len(limits) < min([limit, *limits])
