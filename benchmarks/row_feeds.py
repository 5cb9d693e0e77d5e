"""Who sends requests to a virtual engine: its daemon with drawn jobs, a job alone, or probes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from msgspec import UNSET

from batchrun.estimator.probes import Probe, ProbeCall, PromptMaker
from batchrun.hints import FlexHint, NodeHint, RowHint, read_hint, write_hint
from batchrun.pool.prefix_keys import ChainTable
from batchrun.pool.radix_tree import order_by_prefix
from batchrun.routing.engine_book import EngineTraits
from batchrun.simulator.feeding import EPOCH, RowFeed
from batchrun.simulator.offline_jobs import OfflineJob, in_order
from batchrun.simulator.online import Calls, EnginePort, OnlineCall, OnlineRouter
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


def drawn_job(job: Job, chains: ChainTable | None = None, number: int = 0) -> DrawnJob:
    """The job as the daemon plans it, its rows in the order of the pool.

    Without `chains`, of `TOKENS_PER_CHUNK` tokens a chunk, rows share their whole document or
    nothing, and nothing with jobs of another `number`.
    """
    sizes = np.full(len(job.rows), float(TOKENS_PER_CHUNK))
    if chains is None:
        chains = _chains_of_documents(job, number)
        documents = [len(job.documents[row.document]) for row in job.rows]
        sizes = np.array(documents) / (chains.lengths - 1)
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


def callers(calls: Sequence[OnlineCall], seed: int) -> EnginePort:
    """The users of one engine, as its source."""
    return OnlineRouter(Calls.of(calls), [EngineTraits()], seed, EngineShape().max_model_len).ports[
        0
    ]


def daemon_of(jobs: Sequence[OfflineJob]) -> RowFeed:
    """The daemon of one engine."""
    return RowFeed(jobs, [BLOCK_TOKENS], 0)


def daemon_in_order(job: Job) -> RowFeed:
    """The daemon of one engine, sending the rows as they stand.

    Its hints know all rows to come about a document, as if the pool had planned this order; by
    itself it would look for them beside one another only.
    """
    feed = daemon_of([in_order(drawn_job(job), np.arange(len(job.rows)))])
    feed.ports = [_HintedPort(feed, job)]
    return feed


def daemon_in_turns(jobs: Sequence[Job]) -> RowFeed:
    """The daemon of one engine, sending the rows of each job as they stand, the jobs in turns."""
    return daemon_of([
        in_order(drawn_job(job, number=number), np.arange(len(job.rows)))
        for number, job in enumerate(jobs)
    ])


def flex_calls(job: Job) -> RowFeed:
    """Callers whose flex calls are the rows as they stand: no hint tells of any other."""
    feed = daemon_of([in_order(drawn_job(job), np.arange(len(job.rows)))])
    feed.ports = [_FlexPort(feed)]
    return feed


class _FlexPort(EnginePort):
    """The rows of the first engine, as calls."""

    def take_due(self, now_s: float) -> list[Arrival]:
        """The calls made by now."""
        hint = write_hint(FlexHint(), NONCE)
        return [replace(arrival, hint=hint) for arrival in super().take_due(now_s)]


class _HintedPort(EnginePort):
    """The rows of the first engine, with hints by document."""

    def __init__(self, feed: RowFeed, job: Job) -> None:
        super().__init__(feed)
        self._uses = iter(_next_uses(job))

    def take_due(self, now_s: float) -> list[Arrival]:
        """The rows sent by now."""
        return [self._hinted(arrival) for arrival in super().take_due(now_s)]

    def _hinted(self, arrival: Arrival) -> Arrival:
        hint = read_hint(arrival.hint, NONCE)
        assert isinstance(hint, RowHint)
        node, num_to_come, distance = next(self._uses)
        nodes = (NodeHint(node, num_to_come, hint.rank + distance),)
        text = write_hint(msgspec.structs.replace(hint, nodes=nodes, key_node=UNSET), NONCE)
        return replace(arrival, hint=text)


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
        text = write_hint(hint, NONCE)
        return Arrival(f"row-{rank:07d}", False, now_s, prompt, row.num_output_tokens, text)


class ProbeSource:
    """The callers of one probe: each sends its next call when the one before has ended."""

    def __init__(self) -> None:
        self._num_sent = 0
        self._due: list[Sequence[ProbeCall]] = []
        self._rest_of: dict[str, deque[ProbeCall]] = {}
        self._prompts = PromptMaker(0)

    def begin(self, probe: Probe, prompts: PromptMaker) -> None:
        """Let the callers of `probe` begin."""
        self._prompts = prompts
        self._due = list(probe.callers)

    @property
    def next_due_s(self) -> float:
        """At once, for a caller that waits for nothing."""
        return 0.0 if self._due else math.inf

    def take_due(self, now_s: float) -> list[Arrival]:
        """The next call of each caller that waits for nothing."""
        arrivals = [self._send(deque(calls), now_s) for calls in self._due]
        self._due = []
        return arrivals

    def on_finished(self, request_id: str) -> None:
        """The caller goes on."""
        rest = self._rest_of.pop(request_id)
        if rest:
            self._due.append(rest)

    def _send(self, calls: deque[ProbeCall], now_s: float) -> Arrival:
        call = calls.popleft()
        request_id = f"probe-{self._num_sent}"
        self._num_sent += 1
        self._rest_of[request_id] = calls
        prompt = self._prompts.prompt(call)
        return Arrival(request_id, True, now_s, prompt, call.output_tokens)


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


def _chains_of_documents(job: Job, number: int) -> ChainTable:
    """The chunks of each row's document, then one for its question."""
    chains = []
    for row in job.rows:
        num_chunks = max(1, len(job.documents[row.document]) // TOKENS_PER_CHUNK)
        first = (number << 56) + (row.document << 32)
        document = np.arange(num_chunks, dtype=np.uint64) + np.uint64(first)
        chains.append(np.append(document, np.uint64(row.number + (1 << 63))))
    return ChainTable.of(chains)
