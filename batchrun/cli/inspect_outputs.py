"""How long a job's answers are: what came back, else what the data says, else the limit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchrun.inputs import InputData
from batchrun.jobspec import JobSpec
from batchrun.pool.prompt_tree import FloatArray
from batchrun.store import JobRecord, Store
from batchrun.store import results as result_records

LIMIT_KEYS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
ANSWER_COLUMNS = ("answer", "answers", "reference", "expected", "completion", "output")
"""A column of such a name that the job keeps holds what a good answer would be."""
MAX_RESULTS = 2_000
"""So many finished rows are looked at one by one; means are of all."""


@dataclass(frozen=True, slots=True, eq=False)
class OutputEstimate:
    """`tokens[row]` is NaN where nothing is known of the row; `source` says where they are from."""

    tokens: FloatArray
    mean: float | None
    source: str

    @property
    def filled(self) -> FloatArray:
        """One value for every row: the mean where nothing is known, 0 where that is unknown too."""
        filled: FloatArray = np.where(np.isnan(self.tokens), self.mean or 0.0, self.tokens)
        return filled

    @property
    def std(self) -> float | None:
        """Deviation over the rows of which something is known."""
        return float(np.nanstd(self.tokens)) if (~np.isnan(self.tokens)).any() else None


def output_limit(spec: JobSpec) -> int | None:
    """The most output tokens of a row that the job file allows, where it says so."""
    limits = (spec.request.get(key) for key in LIMIT_KEYS)
    return next((limit for limit in limits if isinstance(limit, int)), None)


def estimate_outputs(
    spec: JobSpec, data: InputData, stored: tuple[Store, JobRecord] | None, bytes_per_token: float
) -> OutputEstimate:
    """The best estimate there is. Raises DataError when the input cannot be read."""
    if stored is not None:
        returned = _returned(*stored)
        if returned is not None:
            return returned
    in_data = answers_in_data(spec, data, bytes_per_token)
    if in_data is not None:
        return in_data
    limit = output_limit(spec)
    tokens = np.full(data.num_rows, np.nan if limit is None else float(limit))
    if limit is None:
        return OutputEstimate(tokens, None, "unknown")
    return OutputEstimate(tokens, float(limit), "the limit in the job file")


def answers_in_data(
    spec: JobSpec, data: InputData, bytes_per_token: float
) -> OutputEstimate | None:
    """What a column of good answers says, where the job keeps one. Raises DataError."""
    column = next((name for name in ANSWER_COLUMNS if name in spec.output.keep), None)
    if column is None or column not in data.columns:
        return None
    answers = _answers(data, column, bytes_per_token, output_limit(spec))
    if np.isnan(answers).all():
        return None
    return OutputEstimate(answers, float(np.nanmean(answers)), f"the column {column!r}")


def _returned(store: Store, record: JobRecord) -> OutputEstimate | None:
    """What finished rows returned; None while none has."""
    counts = result_records.count(store, record.seq)
    if not counts.num_completed:
        return None
    tokens = np.full(record.num_rows, np.nan)
    for result in result_records.read(store, record.seq, limit=MAX_RESULTS):
        if result.error is None:
            tokens[result.row] = result.usage.num_output_tokens
    mean = counts.num_output_tokens / counts.num_completed
    return OutputEstimate(tokens, mean, f"the {counts.num_completed:,} rows that are done")


def _answers(data: InputData, column: str, bytes_per_token: float, limit: int | None) -> FloatArray:
    """Tokens of the texts in a column, and one for the end of the answer; NaN where empty."""
    parts = [np.empty(0)]
    for _, batch in data.iter_batches([column]):
        values = batch.column(0)
        if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
            return np.full(data.num_rows, np.nan)
        parts.append(pc.binary_length(values).fill_null(0).to_numpy(zero_copy_only=False))
    num_bytes = np.concatenate(parts).astype(np.float64)
    tokens = np.where(num_bytes > 0, num_bytes / bytes_per_token + 1, np.nan)
    capped: FloatArray = tokens if limit is None else np.minimum(tokens, limit)
    return capped
