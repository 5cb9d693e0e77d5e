"""What each row of a job is expected to compute; the engines' usage corrects it afterwards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchrun.jobspec import JobSpec
from batchrun.planning import JobPlan
from batchrun.pool import IntArray
from batchrun.store import Counts
from batchrun.types import USUAL_OUTPUT_TOKENS


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
        """Those of one row."""
        return round(float(self.new_bytes[row]) / self.bytes_per_token) + self.output_tokens


def estimate_costs(spec: JobSpec, plan: JobPlan, counts: Counts, done: IntArray) -> RowCosts:
    """The costs of a job of which the rows `done` have a result already."""
    bytes_per_token = plan.tokens.bytes_per_token
    output_tokens = expected_output_tokens(spec, counts)
    tokens = np.rint(plan.new_bytes / bytes_per_token).astype(np.int64) + output_tokens
    tokens[done] = 0
    return RowCosts(plan.new_bytes, bytes_per_token, output_tokens, int(tokens.sum()))


def expected_output_tokens(spec: JobSpec, counts: Counts) -> int:
    """The mean of the answers so far, or a guess: 128, or a smaller `max_tokens`."""
    if counts.num_completed:
        return round(counts.num_output_tokens / counts.num_completed)
    most = spec.request.get("max_tokens", spec.request.get("max_completion_tokens"))
    return min(most, USUAL_OUTPUT_TOKENS) if isinstance(most, int) else USUAL_OUTPUT_TOKENS
