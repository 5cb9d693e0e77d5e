"""A job that is running: what the daemon keeps of it in memory. All of it is derived."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from batchrun.daemon.backpressure import Refusals
from batchrun.daemon.breaker import CircuitBreaker
from batchrun.daemon.cache_watch import CacheWatch
from batchrun.daemon.pace import Pace
from batchrun.daemon.row_costs import RowCosts
from batchrun.daemon.trials import Trials
from batchrun.inputs import InputData, RequestTemplate, RowRenderError
from batchrun.inputs.planned_rows import PlannedRows
from batchrun.jobspec import JobSpec
from batchrun.planning import JobPlan
from batchrun.pool import IntArray, RowQueue
from batchrun.store import Counts, JobRecord
from batchrun.types import Outcome, OutcomeKind, RowError


@dataclass(slots=True)
class ActiveJob:
    """One running job: its rows still to come, its tasks in flight, its progress.

    `current_node` is the prefix node of the row that was handed out last. Rows are read, and the
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
    costs: RowCosts
    cache: CacheWatch
    breaker: CircuitBreaker
    refusals: Refusals = field(default_factory=Refusals)
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    current_node: int | None = None
    pace: Pace = field(default_factory=Pace)

    def is_ready(self, now_s: float) -> bool:
        """Whether a row could be handed out at `now_s` (monotonic)."""
        return self.queue.peek(now_s) is not None

    def committed(self, outcome: Outcome, now_s: float) -> None:
        """Take note of a committed outcome at `now_s` (monotonic)."""
        self.queue.finish(outcome.row)
        ok = outcome.kind is OutcomeKind.OK
        usage = outcome.usage
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

    async def settle(self, limit_s: float) -> None:
        """Wait until no row is in flight any more, at most so long."""
        if self.tasks:
            await asyncio.wait(list(self.tasks.values()), timeout=limit_s)

    def render(self, rows: Sequence[int]) -> list[dict[str, object] | RowError]:
        """The request bodies of these rows, read back from the input. Blocking."""
        rendered: list[dict[str, object] | RowError] = []
        for row, values in zip(rows, self.rows.read_rows(rows), strict=True):
            try:
                rendered.append(self.template.render(values, row_number=row))
            except RowRenderError as problem:
                rendered.append(problem.row_error)
        return rendered

    def close(self) -> None:
        """Close the input and give the copy of its rows back. Blocking."""
        self.rows.close()
        self.data.close()

    def accuracy(self) -> str:
        """How good the plan was, in a line for people."""
        cached = self.cache.agreement
        return (
            f"prompt tokens were estimated to {self.plan.tokens.mape:.1%}, cached tokens foretold "
            f"and returned agree to {cached.share:.0%} over {cached.num_rows:,} rows"
        )
