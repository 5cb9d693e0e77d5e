"""A deployment in virtual time: jobs of prefix subtrees, one engine, and the policy that ships.

The engine computes rows in the order in which they came, `capacity` tokens in a second; a bounded
window of rows is with it. It keeps the prefixes of the subtrees that it saw last: a row whose
prefix it no longer has computes that again.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from batchrun.pool.deadlines import Outlook
from batchrun.pool.fair_share import JobTurns
from batchrun.pool.prefix_keys import IntArray

WINDOW_ROWS = 64
WINDOW_TOKENS = 40_000
"""Estimated computed tokens; the row that goes over it still fits."""
NUM_KEPT_PREFIXES = 6


def log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    """A number between the two, each factor as likely as another."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))


class Capacity:
    """What the engine computes in each second; the last second lasts for ever."""

    def __init__(self, tokens_per_s: Sequence[float]) -> None:
        self._rates = list(tokens_per_s)
        self._done: list[float] = [0.0, *np.cumsum(self._rates).tolist()]

    def finish_at(self, start_s: float, tokens: int) -> float:
        """When work that begins at `start_s` is done."""
        second = min(int(start_s), len(self._rates) - 1)
        target = self._done[second] + (start_s - second) * self._rates[second] + tokens
        second = min(bisect_right(self._done, target), len(self._rates)) - 1
        return second + (target - self._done[second]) / self._rates[second]

    def mean(self, start_s: float, end_s: float) -> float:
        """Tokens per second between two whole seconds."""
        return float(np.mean(self._rates[int(start_s) : int(end_s)]))


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a job in the planned order.

    A row computes its own tokens, and the prefix of its subtree unless the engine has it.
    """

    own_tokens: IntArray
    prefix_tokens: IntArray
    subtrees: IntArray
    estimates: IntArray

    @property
    def is_first(self) -> npt.NDArray[np.bool_]:
        """Whether each row begins a subtree."""
        return np.not_equal(np.diff(self.subtrees, prepend=-1), 0)

    @property
    def computed_tokens(self) -> int:
        """What the job takes when every prefix is computed once."""
        return int(self.own_tokens.sum() + self.prefix_tokens[self.is_first].sum())

    @property
    def largest_subtree_tokens(self) -> int:
        """The most that one subtree takes."""
        sums = np.bincount(self.subtrees, weights=self.own_tokens)
        return int((sums + self.prefix_tokens[self.is_first]).max())


def draw_rows(rng: np.random.Generator, computed_tokens: float, bias: float) -> Rows:
    """Rows that take `computed_tokens` and a little more, of some shape.

    Estimates are off by the share `bias` for the whole job, and by 20 % for each row.
    """
    rows_per_subtree = log_uniform(rng, 1, 100)
    prefix_tokens = log_uniform(rng, 100, 20_000)
    own_tokens = log_uniform(rng, 100, 1000)
    columns: list[tuple[IntArray, int]] = []
    total = 0
    while total < computed_tokens:
        num_rows = 1 + rng.poisson(rows_per_subtree - 1)
        own = rng.lognormal(math.log(own_tokens), 0.6, num_rows).astype(np.int64) + 1
        columns.append((own, int(prefix_tokens * rng.uniform(0.5, 1.5))))
        total += int(own.sum()) + columns[-1][1]
    sizes = [len(own) for own, _ in columns]
    owns = np.concatenate([own for own, _ in columns])
    prefixes = np.repeat([prefix for _, prefix in columns], sizes)
    subtrees = np.repeat(np.arange(len(columns)), sizes)
    planned = owns + prefixes * (np.diff(subtrees, prepend=-1) != 0)
    noise = rng.lognormal(0, 0.2, len(owns))
    return Rows(owns, prefixes, subtrees, (planned * (1 + bias) * noise).astype(np.int64) + 1)


def document_rows(rng: np.random.Generator, prefix_tokens: int, rows_per_subtree: int) -> Rows:
    """500 documents of one size with short questions; estimates are exact."""
    num_rows = 500 * rows_per_subtree
    own = rng.integers(40, 100, num_rows)
    subtrees = np.repeat(np.arange(500), rows_per_subtree)
    planned = own + prefix_tokens * (np.diff(subtrees, prepend=-1) != 0)
    return Rows(own, np.full(num_rows, prefix_tokens), subtrees, planned)


@dataclass(slots=True)
class SimJob:
    """A job in the simulation. Instants are virtual seconds; lists grow as it runs."""

    job_id: str
    weight: float
    rows: Rows
    deadline_at: float | None = None
    num_sent: int = 0
    num_done: int = 0
    sent_at: list[float] = field(default_factory=list)
    done_at: list[float] = field(default_factory=list)
    done_tokens: list[int] = field(default_factory=list)
    news: list[tuple[float, Outlook]] = field(default_factory=list)

    @property
    def finished_at(self) -> float:
        """When the last row was done; infinite while one is left."""
        return self.done_at[-1] if self.num_done == len(self.rows.own_tokens) else math.inf

    def done_by(self, times_s: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Computed tokens of the rows that were done by each time."""
        totals = np.concatenate(([0.0], np.cumsum(self.done_tokens)))
        return totals[np.searchsorted(np.array(self.done_at), times_s, side="right")]


class Simulation:
    """Jobs beside each other on one engine; the clock stands still between calls.

    `is_per_row`: every row ends a turn, as if no rows shared a prefix.
    """

    def __init__(
        self,
        capacity: Capacity,
        turns: JobTurns | None = None,
        num_kept_prefixes: int = NUM_KEPT_PREFIXES,
        *,
        is_per_row: bool = False,
    ) -> None:
        self.turns = turns or JobTurns()
        self.now_s = 0.0
        self.jobs: dict[str, SimJob] = {}
        self._capacity = capacity
        self._num_kept_prefixes = num_kept_prefixes
        self._is_per_row = is_per_row
        self._ready: set[str] = set()
        self._queue: deque[tuple[SimJob, int]] = deque()
        self._queued_tokens = 0
        self._head: tuple[float, int] | None = None
        self._kept: OrderedDict[tuple[str, int], None] = OrderedDict()

    def submit(self, job: SimJob) -> None:
        """The job starts, or goes on after `remove`."""
        self.jobs[job.job_id] = job
        self._ready.add(job.job_id)
        left = int(job.rows.estimates[job.num_sent :].sum())
        self.turns.join(job.job_id, job.weight, left, deadline_at=job.deadline_at)

    def remove(self, job_id: str) -> None:
        """The job is paused: its rows in flight are aborted and will run again."""
        job = self.jobs.pop(job_id)
        self._ready.discard(job_id)
        self.turns.leave(job_id)
        if self._queue and self._queue[0][0] is job:
            self._head = None
        self._queue = deque(entry for entry in self._queue if entry[0] is not job)
        self._queued_tokens = sum(int(job.rows.estimates[row]) for job, row in self._queue)
        job.num_sent = job.num_done

    def run_until(self, end_s: float) -> None:
        """Run to `end_s`, or until no job is left."""
        while self.now_s < end_s:
            self._fill()
            if not self._queue:
                self.now_s = end_s if math.isfinite(end_s) else self.now_s
                return
            finish_at, tokens = self._head or self._start_head()
            if finish_at > end_s:
                self.now_s = end_s
                return
            self.now_s, self._head = finish_at, None
            self._finish(*self._queue.popleft(), tokens)

    @property
    def _has_room(self) -> bool:
        return len(self._queue) < WINDOW_ROWS and self._queued_tokens < WINDOW_TOKENS

    def _fill(self) -> None:
        """Hand out rows while there is room."""
        while self._has_room:
            turn = self.turns.choose(self._ready, self.now_s)
            if turn is None:
                break
            job = self.jobs[turn.job_id]
            row, job.num_sent = job.num_sent, job.num_sent + 1
            is_last = job.num_sent == len(job.rows.own_tokens)
            ends = is_last or bool(job.rows.subtrees[row] != job.rows.subtrees[row + 1])
            estimate = int(job.rows.estimates[row])
            self.turns.charge(turn, row, estimate, ends_subtree=ends or self._is_per_row)
            self._queue.append((job, row))
            self._queued_tokens += estimate
            job.sent_at.append(self.now_s)
            if is_last:
                self._ready.discard(job.job_id)
        self.turns.observe(self.now_s, is_saturated=not self._has_room)
        for outlook in self.turns.take_news():
            self.jobs[outlook.job_id].news.append((self.now_s, outlook))

    def _start_head(self) -> tuple[float, int]:
        job, row = self._queue[0]
        tokens = int(job.rows.own_tokens[row])
        prefix = (job.job_id, int(job.rows.subtrees[row]))
        if prefix not in self._kept:
            tokens += int(job.rows.prefix_tokens[row])
            self._kept[prefix] = None
            if len(self._kept) > self._num_kept_prefixes:
                self._kept.popitem(last=False)
        self._kept.move_to_end(prefix)
        self._head = (self._capacity.finish_at(self.now_s, tokens), tokens)
        return self._head

    def _finish(self, job: SimJob, row: int, tokens: int) -> None:
        self.turns.settle(job.job_id, row, tokens)
        self._queued_tokens -= int(job.rows.estimates[row])
        job.num_done += 1
        job.done_at.append(self.now_s)
        job.done_tokens.append(tokens)
        if job.num_done == len(job.rows.own_tokens):
            self.turns.leave(job.job_id)
            del self.jobs[job.job_id]
