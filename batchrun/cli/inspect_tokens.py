"""Tokens of a prompt tree: counted on a sample of its rows, estimated from bytes for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from batchrun.inputs.token_ratio import DEFAULT_BYTES_PER_TOKEN, TokenCounter
from batchrun.pool.chains import IntArray
from batchrun.pool.prompt_study import TreeTokens
from batchrun.pool.prompt_tree import FloatArray, PromptTree, path_sums

SAMPLE_ROWS = 2_048
SAMPLE_BYTES = 6 << 20
"""Most text that is tokenised; a few seconds."""
SEGMENT_BYTES = 256 << 10
"""Of a longer segment only the beginning is tokenised."""
CONTEXT_BYTES = 128
"""Text before a segment that is tokenised with it: a cut within a token counts on both sides."""
ROWS_PER_READ = 16
MAX_LEVEL = 4
"""Nodes this deep or deeper are taken to be alike in bytes per token; leaves are level 0."""

ReadTexts = Callable[[IntArray], list[bytes]]
"""The prompt texts of some rows."""


@dataclass(frozen=True, slots=True, eq=False)
class CountedTree:
    """`tokens` of all nodes and leaves; `num_rows` were sampled, with `num_bytes` tokenised."""

    tokens: TreeTokens
    bytes_per_token: float
    num_rows: int
    num_bytes: int


def count_tree(
    tree: PromptTree,
    read_texts: ReadTexts,
    count: TokenCounter | None,
    rng: np.random.Generator,
) -> CountedTree:
    """Tokens of every node and leaf. What no sampled row has gets the bytes per token of what is
    as deep in the tree. Without `count`, `DEFAULT_BYTES_PER_TOKEN` holds for all."""
    sample = _Sample(tree, count)
    if count is not None:
        spread = np.linspace(0, tree.num_rows - 1, min(SAMPLE_ROWS, tree.num_rows))
        positions = rng.permutation(np.unique(spread.round().astype(np.int64)))
        for start in range(0, len(positions), ROWS_PER_READ):
            if sample.num_bytes >= SAMPLE_BYTES:
                break
            part = positions[start : start + ROWS_PER_READ]
            for position, text in zip(part.tolist(), read_texts(tree.rows[part]), strict=True):
                sample.add(position, text)
    return sample.result()


class _Sample:
    """What was counted of a tree so far: a node once, however many sampled rows have it."""

    def __init__(self, tree: PromptTree, count: TokenCounter | None) -> None:
        self._tree = tree
        self._count = count
        self._levels = path_sums(tree.nodes.parents, np.ones(tree.nodes.num_nodes))
        self._node_tokens = np.full(tree.nodes.num_nodes, np.nan)
        self._leaf_tokens = np.full(tree.num_rows, np.nan)
        self._sums = np.zeros((MAX_LEVEL + 1, 2))
        self._num_rows = 0

    @property
    def num_bytes(self) -> int:
        """Bytes tokenised."""
        return int(self._sums[:, 0].sum())

    def add(self, position: int, text: bytes) -> None:
        """Count what is new in a row."""
        if self.num_bytes >= SAMPLE_BYTES:
            return
        self._num_rows += 1
        for node, start, end in self._segments(position, len(text)):
            if node is None:
                self._leaf_tokens[position] = self._tokens(text, start, end, 0)
            elif np.isnan(self._node_tokens[node]):
                level = min(int(self._levels[node]), MAX_LEVEL)
                self._node_tokens[node] = self._tokens(text, start, end, level)

    def result(self) -> CountedTree:
        """All nodes and leaves, counted or estimated."""
        levels = np.minimum(self._levels, MAX_LEVEL).astype(np.int64)
        ratios = self._bytes_per_token()
        nodes = _filled(self._node_tokens, self._tree.node_bytes / ratios[levels])
        leaves = _filled(self._leaf_tokens, self._tree.leaf_bytes / ratios[0])
        num_tokens = (path_sums(self._tree.nodes.parents, nodes), leaves)
        total = float(np.append(num_tokens[0], 0.0)[self._tree.innermost].sum() + leaves.sum())
        mean = float(self._tree.text_bytes.sum()) / total if total else DEFAULT_BYTES_PER_TOKEN
        return CountedTree(TreeTokens(nodes, leaves), mean, self._num_rows, self.num_bytes)

    def _segments(self, position: int, num_bytes: int) -> Iterator[tuple[int | None, int, int]]:
        """(node or None for the leaf, first byte, end) along a row."""
        start = 0
        for node in self._tree.nodes.path(position):
            end = int(self._tree.depth_bytes[node])
            yield node, start, end
            start = end
        yield None, start, num_bytes

    def _tokens(self, text: bytes, start: int, end: int, level: int) -> float:
        """Tokens of a segment, which join the sums of its level."""
        assert self._count is not None
        stop = min(end, start + SEGMENT_BYTES)
        if stop <= start:
            return 0.0
        before = max(start - CONTEXT_BYTES, 0)
        tokens = self._count(text[before:stop]) - self._count(text[before:start])
        self._sums[level] += (stop - start, tokens)
        return tokens * (end - start) / (stop - start)

    def _bytes_per_token(self) -> FloatArray:
        """By level; where nothing was counted, that of all levels together."""
        num_bytes, num_tokens = self._sums.sum(axis=0)
        overall = num_bytes / num_tokens if num_tokens else DEFAULT_BYTES_PER_TOKEN
        ratios = np.full(MAX_LEVEL + 1, overall)
        known = self._sums[:, 1] > 0
        ratios[known] = self._sums[known, 0] / self._sums[known, 1]
        return ratios


def _filled(counted: FloatArray, estimated: FloatArray) -> FloatArray:
    return np.where(np.isnan(counted), estimated, counted)
