"""Drawn jobs on the simulator: sent by its daemon, or in an order of one's own without one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from batchrun.hints import NodeHint, RowHint, read_hint, write_hint
from batchrun.pool.prefix_keys import ChainTable
from batchrun.pool.radix_tree import order_by_prefix
from batchrun.simulator.feeding import EPOCH, OfflinePort, RowFeed
from batchrun.simulator.offline_jobs import OfflineJob, in_order
from batchrun.simulator.online import Calls, OnlineCall, OnlinePort, OnlineRouter
from batchrun.simulator.virtual.engine import Arrival
from batchrun.simulator.virtual.setup import NONCE, EngineShape
from batchrun.types import USUAL_OUTPUT_TOKENS
from benchmarks.job_shapes import picked, prompt_of
from benchmarks.scenarios import Job, TokenIds

TOKENS_PER_CHUNK = 64
BLOCK_TOKENS = EngineShape().block_tokens


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DrawnJob(OfflineJob):
    """A job of the simulator whose prompts are the token ids that were drawn."""

    drawn: Job

    def prompt(self, row: int, seed: int) -> TokenIds:
        """Document and question, whatever the seed."""
        return prompt_of(self.drawn, self.drawn.rows[row])


def drawn_job(job: Job, chains: ChainTable | None = None) -> DrawnJob:
    """The job as the daemon plans it, its rows in the order of the pool.

    Without `chains`, of `TOKENS_PER_CHUNK` tokens a chunk, rows share their whole document or
    nothing.
    """
    sizes = np.full(len(job.rows), float(TOKENS_PER_CHUNK))
    if chains is None:
        documents = [len(job.documents[row.document]) for row in job.rows]
        sizes = np.array([tokens / _num_chunks(tokens) for tokens in documents])
        chains = _chains_of_documents(job)
    return DrawnJob(
        "job",
        chains,
        sizes,
        order_by_prefix(chains),
        np.array([job.num_prompt_tokens(row) for row in job.rows], np.int64),
        np.array([row.num_output_tokens for row in job.rows], np.int64),
        USUAL_OUTPUT_TOKENS,
        drawn=job,
    )


def planned_order(job: Job) -> Job:
    """The job with its rows in the order in which the daemon's pool sends them."""
    return picked(job, drawn_job(job).order.rows)


def callers(calls: Sequence[OnlineCall], seed: int) -> OnlinePort:
    """The users of one engine, as its source."""
    return OnlineRouter(Calls.of(calls), 1, seed).ports[0]


def daemon_of(jobs: Sequence[OfflineJob]) -> RowFeed:
    """The daemon of one engine."""
    return RowFeed(jobs, 1, 0, BLOCK_TOKENS)


def daemon_in_order(job: Job, *, is_all_at_once: bool = False) -> RowFeed:
    """The daemon of one engine, sending the rows as they stand.

    Its hints know all rows to come about a document, as if the pool had planned this order; by
    itself it would look for them beside one another only. With `is_all_at_once` the engine takes
    all rows for arrivals of the first instant, and vLLM preempts the first of them, not the last.
    """
    feed = daemon_of([in_order(drawn_job(job), np.arange(len(job.rows)))])
    feed.ports = [_HintedPort(feed, job, is_all_at_once=is_all_at_once)]
    return feed


class _HintedPort(OfflinePort):
    """The rows of the first engine, with hints by document."""

    def __init__(self, feed: RowFeed, job: Job, *, is_all_at_once: bool) -> None:
        super().__init__(feed, 0)
        self._is_all_at_once = is_all_at_once
        self._uses = iter(_next_uses(job))

    def take_due(self, now_s: float) -> list[Arrival]:
        """The rows sent by now."""
        return [self._hinted(arrival) for arrival in super().take_due(now_s)]

    def _hinted(self, arrival: Arrival) -> Arrival:
        hint = read_hint(arrival.hint, NONCE)
        assert isinstance(hint, RowHint)
        node, num_to_come, distance = next(self._uses)
        nodes = (NodeHint(node, num_to_come, hint.rank + distance),)
        told = write_hint(msgspec.structs.replace(hint, nodes=nodes), NONCE)
        at_s = 0.0 if self._is_all_at_once else arrival.arrival_at_s
        return replace(arrival, hint=told, arrival_at_s=at_s)


class RowSource:
    """Sends a job's rows in their order without a daemon, at most `most` of them in the engine."""

    def __init__(self, job: Job, most: float = math.inf) -> None:
        self._job = job
        self._uses = _next_uses(job)
        self._most = most
        self._in_engine: set[str] = set()
        self._next = 0

    @property
    def next_due_s(self) -> float:
        """At once; infinity while the engine has enough."""
        has_more = self._next < len(self._job.rows)
        return 0.0 if has_more and len(self._in_engine) < self._most else math.inf

    def take_due(self, now_s: float) -> list[Arrival]:
        """As many rows as there is room for."""
        due: list[Arrival] = []
        while self.next_due_s <= now_s:
            due.append(self._arrival(self._next, now_s))
            self._in_engine.add(due[-1].request_id)
            self._next += 1
        return due

    def on_finished(self, request_id: str) -> None:
        """A row that ended makes room."""
        self._in_engine.discard(request_id)

    def _arrival(self, rank: int, now_s: float) -> Arrival:
        row = self._job.rows[rank]
        node, num_to_come, distance = self._uses[rank]
        hint = RowHint(
            epoch=EPOCH,
            job="job",
            row=row.number,
            rank=rank,
            nodes=(NodeHint(node, num_to_come, rank + distance),),
            output_tokens=USUAL_OUTPUT_TOKENS,
        )
        prompt = prompt_of(self._job, row).tolist()
        told = write_hint(hint, NONCE)
        return Arrival(f"row-{rank:07d}", False, now_s, prompt, row.num_output_tokens, told)


def _next_uses(job: Job) -> list[tuple[int, int, int]]:
    """Per row: its document's node, the rows about it to come, and how far off the next one is."""
    places: dict[int, list[int]] = {}
    uses = [(0, 0, 0)] * len(job.rows)
    for place in reversed(range(len(job.rows))):
        document = job.rows[place].document
        later = places.setdefault(document, [])
        uses[place] = (document + 1, len(later), later[-1] - place if later else 0)
        later.append(place)
    return uses


def _num_chunks(num_tokens: int) -> int:
    return max(1, num_tokens // TOKENS_PER_CHUNK)


def _chains_of_documents(job: Job) -> ChainTable:
    """The chunks of each row's document, then one for its question."""
    chains = []
    for row in job.rows:
        num_chunks = _num_chunks(len(job.documents[row.document]))
        document = np.arange(num_chunks, dtype=np.uint64) + (row.document << 32)
        chains.append(np.append(document, np.uint64(row.number + (1 << 63))))
    return ChainTable.of(chains)
