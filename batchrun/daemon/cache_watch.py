"""Cached tokens that the plan foretells for a job's rows, beside those that engines return."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchrun.inputs.token_ratio import CacheAgreement, predict_cached_in_row
from batchrun.planning import JobPlan
from batchrun.pool import RowQueue
from batchrun.types import Usage


@dataclass(slots=True)
class CacheWatch:
    """The agreement of both, over the rows that have ended since the daemon took up the job."""

    plan: JobPlan
    queue: RowQueue
    agreement: CacheAgreement = field(default_factory=CacheAgreement)

    def see(self, row: int, usage: Usage, block_tokens: int | None) -> None:
        """A row has ended on an engine with such blocks; None: it does not tell, nothing counts."""
        if block_tokens is None or not usage.num_prompt_tokens:
            return
        predicted_tokens = predict_cached_in_row(
            int(self.plan.order.shared_chunks[self.queue.position_of(row)]),
            int(self.plan.text_bytes[row]),
            usage.num_prompt_tokens,
            block_tokens,
        )
        self.agreement.add(predicted_tokens, usage.num_cached_tokens)
