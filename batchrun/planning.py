"""From a job's input to the order in which its rows run, and what they are expected to cost."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from batchrun.inputs import InputData, RequestTemplate, RowRenderError, prefix_text
from batchrun.jobspec import JobSpec
from batchrun.pool import CHUNK_BYTES, PrefixOrder, chunk_chain, order_by_prefix, salt_of
from batchrun.types import ProgressSink, RowError

BYTES_PER_TOKEN = 4.0
"""A first guess for English text, until the engine's own counts come back."""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """Every row of a job, known as a whole.

    `order` runs over all rows; `text_bytes[row]` is the length of the row's prompt text;
    `errors` holds the rows that cannot be rendered, which end with that error and never run.
    """

    order: PrefixOrder
    text_bytes: npt.NDArray[np.int64]
    errors: dict[int, RowError] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows of the input, the faulty ones included."""
        return len(self.text_bytes)

    def group_of(self) -> dict[int, int]:
        """The prefix group of each row; rows of a group share at least their first chunk."""
        pairs = zip(self.order.rows.tolist(), self.order.groups.tolist(), strict=True)
        return dict(pairs)

    @property
    def num_groups(self) -> int:
        """Prefix groups of two rows or more."""
        sizes = np.bincount(self.order.groups) if self.num_rows else np.zeros(0, dtype=np.int64)
        return int(np.count_nonzero(sizes > 1))

    @property
    def shared_share(self) -> float:
        """Share (0 to 1) of prompt text that a row before it in the order already holds.

        What an unlimited prefix cache would hit: the best possible hit rate.
        """
        total_bytes = int(self.text_bytes.sum())
        shared_bytes = int(self.order.shared_chunks.sum()) * CHUNK_BYTES
        return shared_bytes / total_bytes if total_bytes else 0.0

    def estimate_tokens(self, row: int) -> int:
        """Estimated prompt tokens of a row."""
        return max(1, int(self.text_bytes[row] / BYTES_PER_TOKEN))


def plan_job(
    spec: JobSpec, data: InputData, template: RequestTemplate, progress: ProgressSink | None = None
) -> JobPlan:
    """Render every row once, and order the rows by shared prefix.

    Reads the input in a stream; keeps 8 bytes for each 256 bytes of prompt text while it works.
    Raises DataError when the input cannot be read.
    """
    salt = salt_of(spec.model, spec.endpoint)
    chains: list[npt.NDArray[np.uint64]] = []
    text_bytes = np.zeros(data.num_rows, dtype=np.int64)
    errors: dict[int, RowError] = {}
    for first_row, rows in data.iter_rows(template.columns_used):
        for offset, values in enumerate(rows):
            row = first_row + offset
            try:
                text = prefix_text(template.render(values, row_number=row))
            except RowRenderError as problem:
                errors[row] = problem.row_error
                text = b""
            text_bytes[row] = len(text)
            chains.append(chunk_chain(text, salt))
        if progress is not None:
            progress("reading rows", len(chains), data.num_rows)
    return JobPlan(order_by_prefix(chains), text_bytes, errors)
