"""A job that is running: what the daemon keeps of it in memory. All of it is derived."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from batchrun.daemon.breaker import CircuitBreaker
from batchrun.inputs import InputData, RequestTemplate
from batchrun.jobspec import JobSpec
from batchrun.planning import JobPlan
from batchrun.pool import PrefixNodes, RowQueue
from batchrun.store import Counts, JobRecord
from batchrun.types import Outcome, OutcomeKind

RATE_WINDOW_S = 30.0


@dataclass(slots=True)
class ActiveJob:
    """One running job: its rows still to come, its tasks in flight, its progress.

    `pending_from[i]` counts the rows from position i of the planned order on that had no result
    when the job was opened.
    """

    record: JobRecord
    spec: JobSpec
    data: InputData
    template: RequestTemplate
    plan: JobPlan
    queue: RowQueue
    counts: Counts
    attempts: dict[int, int]
    deaths: dict[int, int]
    group_of: dict[int, int]
    nodes: PrefixNodes
    pending_from: list[int]
    breaker: CircuitBreaker
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    in_flight_tokens: int = 0
    served_tokens: int = 0
    recent: deque[tuple[float, int, int]] = field(default_factory=deque)

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
        self.recent.append((now_s, served, served - usage.num_cached_tokens))

    def rates(self, now_s: float) -> tuple[float, float, float]:
        """(rows, served tokens, computed tokens) per second over the last `RATE_WINDOW_S`."""
        while self.recent and self.recent[0][0] < now_s - RATE_WINDOW_S:
            self.recent.popleft()
        if not self.recent:
            return 0.0, 0.0, 0.0
        span_s = max(now_s - self.recent[0][0], 1.0)
        served = sum(entry[1] for entry in self.recent)
        computed = sum(entry[2] for entry in self.recent)
        return len(self.recent) / span_s, served / span_s, computed / span_s
