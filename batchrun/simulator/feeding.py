"""The daemon of a simulation: its own dispatch (`daemon.dispatch`) on the virtual clock."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from batchrun.daemon.dispatch import Assigner
from batchrun.daemon.dispatcher import POLL_INTERVAL_S
from batchrun.daemon.engine_link import SCHEDULER_WINDOW
from batchrun.daemon.faults import Trials
from batchrun.daemon.in_flight import Assignment, EngineSlot
from batchrun.daemon.prices import RowTokens, planned_work
from batchrun.estimator.answer_length import AnswerLengths
from batchrun.hints import URGENT_LEAD, RowHint, write_hint
from batchrun.pool.fair_share import JobTurns
from batchrun.pool.job_shares import OPERATOR, Owner
from batchrun.pool.prefix_groups import group_rows
from batchrun.pool.radix_tree import build_radix_tree
from batchrun.pool.row_queue import RowQueue, Window
from batchrun.simulator.offline_jobs import Keys, OfflineJob, key_of, shared_tokens
from batchrun.simulator.online import EnginePort
from batchrun.simulator.virtual.engine import Arrival, BlockHashes, RequestRecord, hash_blocks
from batchrun.simulator.virtual.setup import NONCE
from batchrun.types import DEFAULT_MODEL, Usage

EPOCH = 1
PREFIX = "row-"


@dataclass(slots=True, eq=False)
class ActiveRows:
    """One job that has come, and how far it is: a `RunningJob`. `number` tells it from others.

    `finished_at_s` is when its last row ended; None: it has not.
    """

    plan: OfflineJob
    number: int
    seed: int
    queue: RowQueue = field(init=False)
    costs: list[int] = field(init=False)
    answers: AnswerLengths = field(init=False)
    trials: Trials = field(default_factory=Trials)
    current_nodes: dict[int, int] = field(default_factory=dict)
    num_done: int = 0
    served_tokens: int = 0
    computed_tokens: int = 0
    expected_tokens: int = 0
    finished_at_s: float | None = None
    latest: dict[int, tuple[Keys, int, BlockHashes]] = field(default_factory=dict)
    """Keys, tokens and block hashes of the row sent last: the next one mostly begins as it does."""

    def __post_init__(self) -> None:
        plan, expected = self.plan, self.plan.expected_tokens()
        nodes = build_radix_tree(plan.order.shared_chunks)
        groups = group_rows(plan.order, nodes, plan.chains)
        answer = plan.expected_output_tokens
        prompt, cached = plan.num_prompt_tokens, plan.num_prompt_tokens + answer - expected
        tokens = (prompt.astype(float), cached.astype(float))
        rows = RowTokens(*tokens, np.full(len(prompt), float(answer)))
        work = planned_work(plan.order, groups, rows)
        self.queue = RowQueue(plan.order.rows, nodes, work=work)
        self.answers = AnswerLengths([answer])
        self.costs = expected.tolist()

    @property
    def id(self) -> str:
        """What hints and turns call the job."""
        return f"job-{self.number}"

    @property
    def model(self) -> str:
        """All engines serve one."""
        return DEFAULT_MODEL

    @property
    def weight(self) -> float:
        """That of its terms."""
        return self.plan.weight

    @property
    def owner(self) -> Owner:
        """All jobs are the operator's."""
        return OPERATOR

    @property
    def left_tokens(self) -> int:
        """What all its rows are expected to compute."""
        return sum(self.costs[row] for row in self.plan.order.rows.tolist())

    def cost_tokens(self, row: int) -> int:
        """What a row is expected to compute."""
        return self.costs[row]


@dataclass(slots=True, eq=False)
class SimulatedSlot(EngineSlot):
    """A virtual engine, which always answers. `count_running` tells how many rows it runs."""

    count_running: Callable[[], int]

    @property
    def num_running(self) -> int:
        """Rows that the engine runs now."""
        return self.count_running()


SentRow = Assignment[ActiveRows, SimulatedSlot]


class RowFeed:
    """Sends the rows of all jobs to the engines when the daemon would, and counts what came back.

    `block_tokens` are those of each engine. `num_running` tells how many rows one runs.
    """

    def __init__(self, jobs: Sequence[OfflineJob], block_tokens: Sequence[int], seed: int) -> None:
        by_time = sorted(jobs, key=lambda job: job.submit_s)
        self.jobs = [ActiveRows(job, i, key_of(seed, i)) for i, job in enumerate(by_time)]
        self.sent: dict[str, SentRow] = {}
        self.num_running: Callable[[int], int] = lambda engine: 0
        self.ports = [EnginePort(self) for _ in block_tokens]
        self.assigner: Assigner[ActiveRows, SimulatedSlot] = Assigner([
            self._slot(index) for index in range(len(block_tokens))
        ])
        self._block_tokens = block_tokens
        self._num_joined = 0
        self._next_rank = URGENT_LEAD
        self._ask_at_s = 0.0

    @property
    def turns(self) -> JobTurns:
        """Whose row is next, and what is known of each job's end."""
        return self.assigner.turns

    @property
    def next_due_s(self) -> float:
        """When a row may go next, as far as is known; infinity: when one has ended."""
        return min(self._ask_at_s, self._next_submit_s())

    @property
    def running_jobs(self) -> list[str]:
        """The ids of the jobs whose rows go."""
        return list(self.assigner.jobs)

    def send(self, now_s: float) -> None:
        """Hand out all rows that may go now."""
        if now_s < self.next_due_s:
            return
        self._join_due(now_s)
        assignments, opens_at_s = self.assigner.assign(now_s)
        while assignments:
            for assignment in assignments:
                arrival = self._arrival(assignment, now_s)
                self.ports[assignment.engine].waiting.append(arrival)
            assignments, opens_at_s = self.assigner.assign(now_s)
        has_more = any(job.queue.num_pending for job in self.assigner.jobs.values())
        again_s = now_s + POLL_INTERVAL_S if has_more else math.inf
        self._ask_at_s = again_s if opens_at_s is None else min(opens_at_s, again_s)

    def ended(self, record: RequestRecord, now_s: float) -> None:
        """A row has ended: its account is settled, and its room is free."""
        sent = self.sent.pop(record.request_id)
        job, num_output_tokens = sent.job, len(record.output_token_ids)
        usage = Usage(record.num_prompt_tokens, num_output_tokens, record.num_hit_tokens)
        job.queue.finish(sent.row)
        job.num_done += 1
        job.served_tokens += usage.num_prompt_tokens + num_output_tokens
        job.computed_tokens += usage.num_prompt_tokens - usage.num_cached_tokens + num_output_tokens
        job.expected_tokens += job.costs[sent.row]
        sent.slot.release(sent)
        self.assigner.settle(sent, usage)
        self._ask_at_s = min(self._ask_at_s, now_s)
        if job.queue.is_finished:
            job.finished_at_s = now_s
            self.assigner.leave(job)

    def lose(self, index: int) -> None:
        """The engine has died, and its rows are pending again."""
        slot = self.assigner.slots[index]
        slot.is_down = True
        self.ports[index].waiting.clear()
        for request_id, sent in [each for each in self.sent.items() if each[1].slot is slot]:
            del self.sent[request_id]
            slot.release(sent)
            self.assigner.give_back(sent)
        self._ask_at_s = 0.0

    def _slot(self, index: int) -> SimulatedSlot:
        return SimulatedSlot(lambda: self.num_running(index), window=Window(*SCHEDULER_WINDOW))

    def _next_submit_s(self) -> float:
        has_more = self._num_joined < len(self.jobs)
        return self.jobs[self._num_joined].plan.submit_s if has_more else math.inf

    def _join_due(self, now_s: float) -> None:
        while self._next_submit_s() <= now_s:
            job = self.jobs[self._num_joined]
            self._num_joined += 1
            if not job.plan.num_rows:
                job.finished_at_s = now_s
                continue
            deadline_at = None if job.plan.deadline_s == math.inf else job.plan.deadline_s
            self.assigner.join(job, deadline_at=deadline_at)

    def _arrival(self, sent: SentRow, now_s: float) -> Arrival:
        job, row = sent.job, sent.row
        rank = self._next_rank - (URGENT_LEAD if sent.is_urgent else 0)
        self._next_rank += 1
        request_id = f"{PREFIX}{rank:09d}-{job.number}"
        prompt = job.plan.prompt(row, job.seed)
        self.sent[request_id] = sent
        limit_tokens, num_output_tokens = job.plan.answer_tokens(row)
        hint = RowHint(
            epoch=EPOCH,
            job=job.id,
            row=row,
            rank=rank,
            nodes=sent.prefixes.node_hints(rank),
            key_node=sent.prefixes.key_node,
            output_tokens=job.answers.room_tokens,
        )
        return Arrival(
            request_id,
            False,
            now_s,
            prompt.tolist(),
            limit_tokens,
            write_hint(hint, NONCE),
            self._hashes(job, row, prompt.tobytes(), self._block_tokens[sent.engine]),
            num_output_tokens,
        )

    def _hashes(self, job: ActiveRows, row: int, prompt: bytes, size: int) -> BlockHashes:
        """The prompt's hashes of blocks of this size; those shared with the row before are kept."""
        chains = job.plan.chains
        keys = chains.keys[chains.starts[row] : chains.starts[row + 1]]
        content = array("I", prompt)
        known: BlockHashes = []
        if (latest := job.latest.get(size)) is not None:
            latest_keys, num_tokens, hashes = latest
            length = min(len(keys), len(latest_keys))
            differ = np.flatnonzero(keys[:length] != latest_keys[:length])
            num_chunks = int(differ[0]) if differ.size else length
            shared = shared_tokens(num_chunks, float(job.plan.chunk_tokens[row]))
            known = hashes[: min(shared, len(content), num_tokens) // size]
        rest = content[len(known) * size :]
        hashes = [*known, *hash_blocks(rest, size, known[-1] if known else b"")]
        job.latest[size] = keys, len(content), hashes
        return hashes
