"""A job that is running, as the daemon keeps it in memory: all of it is derived.

With it goes what its rows are expected to compute and to find cached, how fast it goes, and what
travels with its rows.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from batchrun.daemon.faults import CircuitBreaker, Doubts, Refusals, Trials
from batchrun.daemon.in_flight import Assignment
from batchrun.daemon.prices import USUAL, RowTokens, output_token_s, planned_work
from batchrun.estimator.answer_length import AnswerLengths
from batchrun.hints import URGENT_LEAD, RowHint, SharedPrefixes, put_hint
from batchrun.jobs.expected_answers import EMBEDDINGS, output_limit
from batchrun.jobs.inputs.input_data import InputData
from batchrun.jobs.inputs.spool import PlannedRows
from batchrun.jobs.prompts.template import RequestTemplate, RowRenderError
from batchrun.jobs.prompts.tokens import CacheAgreement, predict_cached_in_row
from batchrun.jobs.spec import JobSpec
from batchrun.jobs.submit import JobPlan
from batchrun.pool.job_shares import OPERATOR, Owner
from batchrun.pool.prefix_keys import IntArray
from batchrun.pool.row_queue import PlannedWork, RowQueue
from batchrun.store.jobs import CUT_REASON, Counts, JobRecord
from batchrun.types import Outcome, OutcomeKind, RowError, Usage

RATE_WINDOW_S = 30.0

FloatArray = npt.NDArray[np.float64]


@dataclass(slots=True)
class RowRate:
    """Sums by the second, so that asking costs the same at any speed. Instants are monotonic."""

    _seconds: deque[tuple[float, FloatArray]] = field(default_factory=deque)

    def add(self, now_s: float, served_tokens: int, computed_tokens: int) -> None:
        """A row has ended."""
        if not self._seconds or now_s >= self._seconds[-1][0] + 1:
            self._forget(now_s)
            self._seconds.append((now_s, np.zeros(3)))
        self._seconds[-1][1][:] += (1, served_tokens, computed_tokens)

    def rates(self, now_s: float) -> tuple[float, float, float]:
        """(rows, served tokens, computed tokens) per second over the last `RATE_WINDOW_S`."""
        self._forget(now_s)
        if not self._seconds:
            return 0.0, 0.0, 0.0
        span_s = max(now_s - self._seconds[0][0], 1.0)
        rows, served, computed = np.sum([sums for _, sums in self._seconds], axis=0) / span_s
        return float(rows), float(served), float(computed)

    def _forget(self, now_s: float) -> None:
        while self._seconds and self._seconds[0][0] < now_s - RATE_WINDOW_S:
            self._seconds.popleft()


@dataclass(frozen=True, slots=True)
class RowCosts:
    """Expected computed tokens: prompt tokens that no earlier row has, and output tokens.

    Never corrected while the job runs, so that what its rows take off its work adds up to all of
    it: `pool.WorkLeft` learns how far these estimates are off.
    """

    new_bytes: IntArray
    bytes_per_token: float
    output_tokens: int
    left_tokens: int

    def tokens_of(self, row: int) -> int:
        return round(float(self.new_bytes[row]) / self.bytes_per_token) + self.output_tokens


def estimate_costs(plan: JobPlan, output_tokens: int, done: IntArray) -> RowCosts:
    """The costs of a job with answers of so many tokens, of which the rows `done` have a result
    already."""
    bytes_per_token = plan.tokens.bytes_per_token
    tokens = np.rint(plan.new_bytes / bytes_per_token).astype(np.int64) + output_tokens
    tokens[done] = 0
    return RowCosts(plan.new_bytes, bytes_per_token, output_tokens, int(tokens.sum()))


def work_of_plan(plan: JobPlan, group_of: IntArray, output_tokens: int) -> PlannedWork:
    """The work of a job's rows, from their groups, with answers of so many tokens."""
    tokens = plan.text_bytes / plan.tokens.bytes_per_token
    cached = tokens - plan.new_bytes / plan.tokens.bytes_per_token
    output = np.full(plan.num_rows, float(output_tokens))
    return planned_work(plan.order, group_of, RowTokens(tokens, cached, output))


@dataclass(slots=True)
class ActiveJob:
    """One running job: its rows still to come, its tasks in flight, its progress; a `RunningJob`.

    `current_nodes` has the prefix node of the row that each engine got last, `num_cut` is how many
    answers ended at `max_tokens`, `content` names the input as it is now. Rows are read, and the
    input is closed, under the lock `reading`.
    """

    record: JobRecord
    spec: JobSpec
    data: InputData
    rows: PlannedRows
    template: RequestTemplate
    plan: JobPlan
    queue: RowQueue
    counts: Counts
    attempts: dict[int, int]
    trials: Trials
    group_of: IntArray
    answers: AnswerLengths
    costs: RowCosts
    breaker: CircuitBreaker
    owner: Owner = OPERATOR
    doubts: Doubts = field(default_factory=Doubts)
    refusals: Refusals = field(default_factory=Refusals)
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    current_nodes: dict[int, int] = field(default_factory=dict)
    pace: RowRate = field(default_factory=RowRate)
    cache_agreement: CacheAgreement = field(default_factory=CacheAgreement)
    num_cut: int = 0
    content: str = field(init=False)
    mean_text_bytes: float = field(init=False)

    def __post_init__(self) -> None:
        self.mean_text_bytes = float(self.plan.text_bytes.mean()) if self.plan.num_rows else 0.0
        self.content = xxhash.xxh3_64_hexdigest(self.record.pin.encode())

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def model(self) -> str:
        return self.spec.model

    @property
    def weight(self) -> float:
        return self.spec.weight

    @property
    def left_s(self) -> float:
        """Seconds until its deadline; infinite without one."""
        expires_at = self.record.expires_at
        return math.inf if expires_at is None else max(expires_at - time.time(), 0.0)

    @property
    def left_tokens(self) -> int:
        return self.costs.left_tokens

    @property
    def left_work_s(self) -> float:
        """What its rows without a result take, in seconds of a usual engine, with answers as long
        as they have turned out."""
        prompt_tokens = self.mean_text_bytes / self.plan.tokens.bytes_per_token
        more_tokens = self.answers.mean_tokens - self.costs.output_tokens
        more_s = more_tokens * output_token_s(USUAL, prompt_tokens)
        return max(0.0, self.queue.left_work_s + self.queue.num_unfinished * more_s)

    @property
    def knows_answers(self) -> bool:
        """Whether how long its answers are is more than guessed, or they cannot be longer."""
        limit = 0 if self.spec.endpoint == EMBEDDINGS else output_limit(self.spec)
        is_limited = limit is not None and limit <= self.costs.output_tokens
        return is_limited or not self.answers.is_guess

    def cost_tokens(self, row: int) -> int:
        return self.costs.tokens_of(row)

    def committed(self, outcome: Outcome, now_s: float) -> None:
        """Take note of a committed outcome at `now_s` (monotonic)."""
        self.queue.finish(outcome.row)
        ok = outcome.kind is OutcomeKind.OK
        usage = outcome.usage
        self.num_cut += ok and outcome.finish_reason == CUT_REASON
        self.counts = Counts(
            self.counts.num_completed + ok,
            self.counts.num_failed + (not ok),
            self.counts.num_prompt_tokens + usage.num_prompt_tokens,
            self.counts.num_output_tokens + usage.num_output_tokens,
            self.counts.num_cached_tokens + usage.num_cached_tokens,
        )
        served = usage.num_prompt_tokens + usage.num_output_tokens
        self.plan.tokens.correct(int(self.plan.text_bytes[outcome.row]), usage.num_prompt_tokens)
        self.pace.add(now_s, served, served - usage.num_cached_tokens)

    def compare_cached(self, row: int, usage: Usage, block_tokens: int | None) -> None:
        """A row has ended on an engine with such blocks: see how well its cached tokens were
        predicted. None: the engine does not tell, nothing counts."""
        if block_tokens is None or not usage.num_prompt_tokens:
            return
        predicted_tokens = predict_cached_in_row(
            int(self.plan.order.shared_chunks[self.queue.position_of(row)]),
            int(self.plan.text_bytes[row]),
            usage.num_prompt_tokens,
            block_tokens,
        )
        self.cache_agreement.add(predicted_tokens, usage.num_cached_tokens)

    async def settle(self, limit_s: float) -> None:
        """Wait until no row is in flight any more, at most so long."""
        if self.tasks:
            await asyncio.wait(list(self.tasks.values()), timeout=limit_s)

    def render(self, rows: Sequence[int]) -> list[dict[str, object] | RowError]:
        """The request bodies of these rows, read back from the input. Blocking."""
        rendered: list[dict[str, object] | RowError] = []
        for row, values in zip(rows, self.rows.read_rows(rows), strict=True):
            try:
                folder = self.data.folder(row)
                rendered.append(self.template.render(values, row_number=row, folder=folder))
            except RowRenderError as problem:
                rendered.append(problem.row_error)
        return rendered

    async def read_back(self, row: int) -> dict[str, object] | RowError:
        """The body of a row that an engine has, for which the input stays open."""

        async def read() -> dict[str, object] | RowError:
            async with self.reading:
                return (await asyncio.to_thread(self.render, [row]))[0]

        return await asyncio.shield(read())

    async def close_soon(self, limit_s: float) -> None:
        """Close the input once nobody reads it, which is waited for so long at most: its file
        system may not answer."""
        await asyncio.wait([asyncio.create_task(self._close())], timeout=limit_s)

    async def _close(self) -> None:
        async with self.reading:
            await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Close the input and the copy of its rows, which stays. Blocking."""
        self.rows.close()
        self.data.close()

    def accuracy(self) -> str:
        """How good the plan was, in a line for people."""
        cached = self.cache_agreement
        return (
            f"prompt tokens were estimated to {self.plan.tokens.mape:.1%}, cached tokens predicted "
            f"and returned agree to {cached.share:.0%} over {cached.num_rows:,} rows"
        )


HINTED_ENDPOINTS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})


class Hinter:
    """Writes hints. Ranks count all rows sent by this daemon, so they compare over jobs."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._next_rank = URGENT_LEAD

    def put(self, body: dict[str, object], sent: Assignment[ActiveJob, Any], nonce: str) -> None:
        """Write the hint of a row into its body, for an engine that believes this `nonce`."""
        hint = self.hint(sent.job, sent.row, sent.prefixes, is_urgent=sent.is_urgent)
        if hint is not None:
            put_hint(body, hint, nonce)

    def hint(
        self, job: ActiveJob, row: int, prefixes: SharedPrefixes, *, is_urgent: bool = False
    ) -> RowHint | None:
        """What goes with each choice of a row; None where its endpoint has no place for it."""
        if job.spec.endpoint not in HINTED_ENDPOINTS:
            return None
        rank = self._next_rank - (URGENT_LEAD if is_urgent else 0)
        self._next_rank += 1
        return RowHint(
            epoch=self._epoch,
            job=job.record.id,
            row=row,
            rank=rank,
            nodes=prefixes.node_hints(rank),
            key_node=prefixes.key_node,
            output_tokens=job.answers.room_tokens,
        )
