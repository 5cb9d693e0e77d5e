"""From a job's input to the order in which its rows run, and what they are expected to cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from batchrun.jobs.inputs.data import InputData
from batchrun.jobs.prompts.template import RequestTemplate, RowRenderError
from batchrun.jobs.prompts.tokens import PLAIN_PROMPTS, PromptReader, TokenRatio, sample_rows
from batchrun.jobs.spec import JobSpec
from batchrun.pool.prefix_keys import CHUNK_BYTES, ChainBuilder, ChainTable, IntArray, salt_of
from batchrun.pool.radix_tree import PrefixOrder, order_by_prefix
from batchrun.types import ProgressSink, RowError

TextWatch = Callable[[Sequence[bytes]], None]
"""Told of all rows' prompt texts, some rows at a time; empty for a row with an error."""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """Every row of a job, known as a whole.

    `chains` are the keys of all rows' prompts, salted with `salt`; `order` runs over all rows;
    `text_bytes[row]` is the length of the row's prompt text, `new_bytes[row]` of what no row before
    it in the order has, and `tokens` makes tokens of either;
    `errors` holds the rows that cannot be rendered, which end with that error and never run.
    """

    salt: int
    chains: ChainTable
    order: PrefixOrder
    text_bytes: IntArray
    new_bytes: IntArray
    tokens: TokenRatio
    errors: dict[int, RowError] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows of the input, the faulty ones included."""
        return len(self.text_bytes)

    def group_of(self) -> IntArray:
        """The prefix group of each row; rows of a group share at least their first chunk."""
        groups = np.empty(self.num_rows, dtype=np.int64)
        groups[self.order.rows] = self.order.groups
        return groups

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
        return self.tokens.estimate_tokens(int(self.text_bytes[row]))


def plan_job(
    spec: JobSpec,
    data: InputData,
    template: RequestTemplate,
    *,
    prompts: PromptReader = PLAIN_PROMPTS,
    progress: ProgressSink | None = None,
    watch: TextWatch | None = None,
) -> JobPlan:
    """Render every row once, and order the rows by shared prefix, as the model reads them.

    Reads the input in a stream; keeps 8 bytes for each 256 bytes of prompt text. `watch` is shown
    the texts on their way. Raises DataError when the input cannot be read.
    """
    salt = salt_of(spec.model, spec.endpoint)
    builder = ChainBuilder(salt)
    text_bytes = np.zeros(data.num_rows, dtype=np.int64)
    errors: dict[int, RowError] = {}
    sampled = set(sample_rows(data.num_rows).tolist())
    sample: list[bytes] = []
    for first_row, rows in data.iter_rows(template.columns_used):
        texts: list[bytes] = []
        for row, values in enumerate(rows, start=first_row):
            try:
                texts.append(prompts.text(template.render(values, row_number=row)))
            except RowRenderError as problem:
                errors[row] = problem.row_error
                texts.append(b"")
        builder.add(texts)
        if watch is not None:
            watch(texts)
        sample += [text for row, text in enumerate(texts, start=first_row) if row in sampled]
        text_bytes[first_row : first_row + len(texts)] = [len(text) for text in texts]
        if progress is not None:
            progress("reading rows", first_row + len(texts), data.num_rows)
    chains = builder.build()
    order = order_by_prefix(chains)
    new_bytes = text_bytes.copy()
    new_bytes[order.rows] -= order.shared_chunks * CHUNK_BYTES
    tokens = TokenRatio.sampled(sample, prompts.count)
    return JobPlan(salt, chains, order, text_bytes, new_bytes, tokens, errors)
