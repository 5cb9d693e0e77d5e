"""Plan a sample before any text is made: which rows share what, and how long each part is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from batchrun.datasets.shapes import Shape, Spread

SHUFFLED_GROUPS = 128
"""Rows are shuffled within so many groups: few enough to keep the shared texts in memory."""

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PromptStatistics:
    """Means over the rows, in the terms of the Preble paper's table 1; shares are 0-1.

    `shared_share` is the part of a prompt that an earlier row had already (what an unbounded
    prefix cache would hit); `key_share` is the part that only the row's group shares.
    """

    num_rows: int
    prompt_tokens: float
    prompt_tokens_deviation: float
    shared_share: float
    key_share: float
    rows_per_group: float


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """One row to write: the `index`-th of its group."""

    group: int
    index: int
    tail_tokens: int


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """Sizes of every group and row of a sample."""

    seed: int
    system_tokens: int
    group_rows: IntArray
    shared_tokens: IntArray
    tail_tokens: IntArray

    def rows(self) -> Iterator[PlannedRow]:
        """All rows in file order: rows of one group lie apart, but not very far."""
        first_row = 0
        for start in range(0, len(self.group_rows), SHUFFLED_GROUPS):
            window = [
                (group, index)
                for group, num_rows in enumerate(
                    self.group_rows[start : start + SHUFFLED_GROUPS].tolist(), start
                )
                for index in range(num_rows)
            ]
            Random(f"{self.seed} rows {start}").shuffle(window)
            tails = self.tail_tokens[first_row : first_row + len(window)].tolist()
            for (group, index), tail_tokens in zip(window, tails, strict=True):
                yield PlannedRow(group, index, tail_tokens)
            first_row += len(window)

    def statistics(self) -> PromptStatistics:
        """What the sample's prompts look like on average."""
        shared = np.repeat(self.shared_tokens, self.group_rows)
        prompt = self.system_tokens + shared + self.tail_tokens
        is_first = np.zeros(len(prompt), bool)
        is_first[np.cumsum(self.group_rows) - self.group_rows] = True
        has_peers = np.repeat(self.group_rows > 1, self.group_rows)
        hit = np.where(is_first, self.system_tokens, self.system_tokens + shared)
        return PromptStatistics(
            num_rows=len(prompt),
            prompt_tokens=float(prompt.mean()),
            prompt_tokens_deviation=float(prompt.std()),
            shared_share=float((hit / prompt).mean()),
            key_share=float((shared * has_peers / prompt).mean()),
            rows_per_group=float(self.group_rows.mean()),
        )


def plan_sample(shape: Shape, *, num_rows: int, seed: int) -> SamplePlan:
    """Draw the sizes of `num_rows` rows of `shape`; the same seed gives the same plan.

    Lengths of groups are scaled so that their mean over rows, not over groups, is the shape's.
    """
    rng = Random(f"{seed} plan")
    group_rows = _group_rows(shape, num_rows, rng)
    shared = np.maximum(_draw(shape.shared_tokens, len(group_rows), rng), 16.0)
    shared *= shape.shared_tokens.mean * num_rows / float(shared @ group_rows)
    tails = np.maximum(_draw(shape.tail_tokens, num_rows, rng), 16.0)
    return SamplePlan(
        seed=seed,
        system_tokens=shape.system_tokens,
        group_rows=group_rows,
        shared_tokens=np.rint(shared).astype(np.int64),
        tail_tokens=np.rint(tails).astype(np.int64),
    )


def _group_rows(shape: Shape, num_rows: int, rng: Random) -> IntArray:
    """Rows of each group: at least one each, `num_rows` in all."""
    num_groups = max(1, round(num_rows / shape.rows_per_group.mean))
    weights = np.maximum(_draw(shape.rows_per_group, num_groups, rng) - 1.0, 0.0)
    weights[: int(shape.single_share * num_groups)] = 0.0
    total = float(weights.sum()) or 1.0
    ends = np.rint(np.cumsum(weights) / total * (num_rows - num_groups)).astype(np.int64)
    group_rows: IntArray = 1 + np.diff(ends, prepend=0)
    group_rows[-1] += num_rows - int(group_rows.sum())
    return group_rows


def _draw(spread: Spread, count: int, rng: Random) -> FloatArray:
    """`count` values at evenly spaced quantiles, in random order: no luck in small samples."""
    quantiles = [(number + 0.5) / count for number in range(count)]
    rng.shuffle(quantiles)
    standard = np.array([NormalDist().inv_cdf(quantile) for quantile in quantiles])
    if not spread.long_tail:
        return spread.mean + spread.deviation * standard
    variance = np.log1p((spread.deviation / spread.mean) ** 2)
    return np.asarray(np.exp(np.log(spread.mean) - variance / 2 + np.sqrt(variance) * standard))
