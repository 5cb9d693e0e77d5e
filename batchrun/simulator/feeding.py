"""The daemon of a simulation: its turns between jobs, planned order, windows and hints."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from batchrun.daemon.assigning import URGENT_LEAD
from batchrun.daemon.dispatcher import POLL_INTERVAL_S
from batchrun.daemon.slots import SCHEDULER_WINDOW
from batchrun.hints import RowHint, nodes_to_tell, write_hint
from batchrun.pool.fair_share import JobTurns, Turn
from batchrun.pool.radix_tree import find_prefix_nodes
from batchrun.pool.row_queue import RowQueue
from batchrun.pool.window import Window
from batchrun.simulator.offline_jobs import Keys, OfflineJob, key_of, shared_tokens
from batchrun.simulator.virtual.engine import Arrival, BlockHashes, RequestRecord, hash_blocks
from batchrun.simulator.virtual.setup import NONCE

EPOCH = 1
PREFIX = "row-"


@dataclass(frozen=True, slots=True)
class SentRow:
    """A row in an engine; `tokens` count in the engine's window."""

    job: ActiveRows
    row: int
    engine: int
    tokens: int


@dataclass(slots=True, eq=False)
class ActiveRows:
    """One job that has come, and how far it is. `number` tells it from other jobs.

    `finished_at_s` is when its last row ended; None: it has not.
    """

    job: OfflineJob
    number: int
    seed: int
    queue: RowQueue = field(init=False)
    groups: list[int] = field(init=False)
    costs: list[int] = field(init=False)
    num_done: int = 0
    served_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    expected_tokens: int = 0
    finished_at_s: float | None = None
    latest: _Latest | None = None

    def __post_init__(self) -> None:
        nodes = find_prefix_nodes(self.job.order.shared_chunks)
        self.queue = RowQueue(self.job.order.rows, nodes)
        self.groups = self.job.group_of().tolist()
        self.costs = self.job.expected_tokens().tolist()

    def output_tokens_to_expect(self) -> int:
        """What the daemon tells of an answer: the mean of those so far, or its first guess."""
        if not self.num_done:
            return self.job.expected_output_tokens
        return round(self.output_tokens / self.num_done)

    @property
    def id(self) -> str:
        """What hints and turns call the job."""
        return f"job-{self.number}"


@dataclass(frozen=True, slots=True, eq=False)
class _Latest:
    """The row that was sent last: the next one mostly begins as it does."""

    keys: Keys
    num_tokens: int
    hashes: BlockHashes


class RowFeed:
    """Sends the rows of all jobs to the engines, as the daemon does (`daemon.assigning`).

    A prefix group goes to one engine while that has room, else to the least loaded. `num_running`
    tells how many rows an engine runs.
    """

    def __init__(
        self, jobs: Sequence[OfflineJob], num_engines: int, seed: int, block_tokens: int
    ) -> None:
        by_time = sorted(jobs, key=lambda job: job.submit_s)
        self.jobs = [ActiveRows(job, i, key_of(seed, i)) for i, job in enumerate(by_time)]
        self.sent: dict[str, SentRow] = {}
        self.num_running: Callable[[int], int] = lambda engine: 0
        self.ports = [OfflinePort(self, index) for index in range(num_engines)]
        self._windows = [Window(*SCHEDULER_WINDOW) for _ in range(num_engines)]
        self._block_tokens = block_tokens
        self.turns = JobTurns()
        self._joined: dict[str, ActiveRows] = {}
        self._num_joined = 0
        self._next_rank = URGENT_LEAD
        self._ask_at_s = 0.0
        self._is_saturated = False

    @property
    def next_due_s(self) -> float:
        """When a row may go next, as far as is known; infinity: when one has ended."""
        return min(self._ask_at_s, self._next_submit_s())

    @property
    def running_jobs(self) -> list[str]:
        """The ids of the jobs whose rows go."""
        return list(self._joined)

    def send(self, now_s: float) -> None:
        """Hand out all rows that may go now."""
        if now_s < self.next_due_s:
            return
        self._join_due(now_s)
        self._ask_at_s = math.inf
        while True:
            ready = {
                name for name, job in self._joined.items() if job.queue.peek(now_s) is not None
            }
            turn = self.turns.choose(ready, now_s)
            if turn is None:
                self._is_saturated = False
                break
            job = self._joined[turn.job_id]
            engine, opens_at_s = self._place(job, turn, now_s)
            if engine is None or opens_at_s > now_s:
                self._is_saturated |= engine is None
                self._ask_at_s = min(opens_at_s, now_s + POLL_INTERVAL_S)
                break
            self.ports[engine].waiting.append(self._take(job, turn, engine, now_s))
        self.turns.observe(now_s, is_saturated=self._is_saturated)

    def ended(self, record: RequestRecord, now_s: float) -> None:
        """A row has ended: its account is settled, and its place is free."""
        sent = self.sent.pop(record.request_id)
        job, num_output_tokens = sent.job, len(record.output_token_ids)
        computed = record.num_prompt_tokens - record.num_hit_tokens + num_output_tokens
        job.queue.finish(sent.row)
        job.num_done += 1
        job.served_tokens += record.num_prompt_tokens + num_output_tokens
        job.computed_tokens += computed
        job.output_tokens += num_output_tokens
        job.expected_tokens += job.costs[sent.row]
        self._windows[sent.engine].remove(sent.tokens)
        self.turns.settle(job.id, sent.row, computed)
        self._ask_at_s = min(self._ask_at_s, now_s)
        if job.queue.is_finished:
            job.finished_at_s = now_s
            self.turns.leave(job.id)
            del self._joined[job.id]

    def _next_submit_s(self) -> float:
        has_more = self._num_joined < len(self.jobs)
        return self.jobs[self._num_joined].job.submit_s if has_more else math.inf

    def _join_due(self, now_s: float) -> None:
        while self._next_submit_s() <= now_s:
            active = self.jobs[self._num_joined]
            self._num_joined += 1
            job = active.job
            if not job.num_rows:
                active.finished_at_s = now_s
                continue
            self._joined[active.id] = active
            due_at = None if job.deadline_s == math.inf else job.deadline_s
            work = sum(active.costs[row] for row in job.order.rows.tolist())
            self.turns.join(active.id, job.weight, work, due_at=due_at)

    def _place(self, job: ActiveRows, turn: Turn, now_s: float) -> tuple[int | None, float]:
        """The engine for the job's next row, and when its window opens."""
        row = job.queue.peek(now_s)
        assert row is not None
        tokens = int(job.job.num_prompt_tokens[row])
        preferred = job.groups[row] % len(self._windows)
        by_load = sorted(range(len(self._windows)), key=lambda i: self._windows[i].num_tokens)
        for engine in (preferred, *by_load):
            window, num_running = self._windows[engine], self.num_running(engine)
            is_bound = engine != preferred and not turn.is_urgent
            if not window.has_room(tokens, num_running, is_urgent=turn.is_urgent):
                continue
            if not is_bound or window.has_room_to_lend(tokens, num_running):
                return engine, window.opens_at_s(tokens, now_s)
        return None, math.inf

    def _take(self, job: ActiveRows, turn: Turn, engine: int, now_s: float) -> Arrival:
        row = job.queue.peek(now_s)
        assert row is not None
        job.queue.take(row)
        following = job.queue.peek(now_s)
        ends_group = following is None or job.groups[following] != job.groups[row]
        self.turns.charge(turn, row, job.costs[row], ends_subtree=ends_group)
        rank = self._next_rank - (URGENT_LEAD if turn.is_urgent else 0)
        self._next_rank += 1
        request_id = f"{PREFIX}{rank:09d}-{job.number}"
        prompt = job.job.prompt(row, job.seed)
        tokens = len(prompt)
        self.sent[request_id] = SentRow(job, row, engine, tokens)
        self._windows[engine].add(tokens, now_s)
        limit_tokens, num_output_tokens = job.job.answer_tokens(row)
        return Arrival(
            request_id,
            False,
            now_s,
            prompt.tolist(),
            limit_tokens,
            _hint(job, row, rank),
            self._hashes(job, row, prompt.tobytes()),
            num_output_tokens,
        )

    def _hashes(self, job: ActiveRows, row: int, prompt: bytes) -> BlockHashes:
        """The prompt's block hashes; those that it shares with the row before are not made anew."""
        size, chains = self._block_tokens, job.job.chains
        keys = chains.keys[chains.starts[row] : chains.starts[row + 1]]
        content = array("I", prompt)
        known: BlockHashes = []
        if job.latest is not None:
            length = min(len(keys), len(job.latest.keys))
            differ = np.flatnonzero(keys[:length] != job.latest.keys[:length])
            num_chunks = int(differ[0]) if differ.size else length
            both = min(len(content), job.latest.num_tokens)
            tokens = min(shared_tokens(num_chunks, float(job.job.chunk_tokens[row])), both)
            known = job.latest.hashes[: tokens // size]
        rest = content[len(known) * size :]
        hashes = [*known, *hash_blocks(rest, size, known[-1] if known else b"")]
        job.latest = _Latest(keys, len(content), hashes)
        return hashes


class OfflinePort:
    """The rows of one engine: a `TrafficSource`."""

    def __init__(self, feed: RowFeed, engine: int) -> None:
        self.waiting: list[Arrival] = []
        self._feed = feed
        self._engine = engine

    @property
    def next_due_s(self) -> float:
        """The next row that may be for this engine."""
        waiting = self.waiting
        return waiting[0].arrival_at_s if waiting else self._feed.next_due_s

    def take_due(self, now_s: float) -> list[Arrival]:
        """The rows sent by now."""
        self._feed.send(now_s)
        num_due = sum(arrival.arrival_at_s <= now_s for arrival in self.waiting)
        due = self.waiting[:num_due]
        del self.waiting[:num_due]
        return due

    def on_finished(self, request_id: str) -> None:
        """The cluster tells the feed, with the request's record."""


def _hint(job: ActiveRows, row: int, rank: int) -> str:
    """What travels with the row."""
    hint = RowHint(
        epoch=EPOCH,
        job=job.id,
        row=row,
        rank=rank,
        nodes=nodes_to_tell(job.queue.path_of(row), job.queue.num_to_come, rank),
        output_tokens=job.output_tokens_to_expect(),
    )
    return write_hint(hint, NONCE)
