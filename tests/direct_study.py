"""Preble's prompt study counted directly: a prefix tree over token ids, row by row.

Nothing here is shared with `batchrun/pool`; it is what that is held against.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.uint32]


class Node(NamedTuple):
    """A prefix of two rows or more, or what one row has for itself: its own tokens, the rows that
    have it, and the first of them."""

    tokens: int
    num_rows: int
    first_row: int


def direct_figures(prompts: Sequence[TokenIds]) -> dict[str, float]:
    """Means and deviations as `batchrun inspect --json` names them."""
    lengths, shared, common, keys = [], [], [], []
    rows_per_key: dict[Node, int] = {}
    for row, path in prefix_paths(prompts):
        length = sum(node.tokens for node in path)
        key = key_portion(path)
        rows_per_key[key] = key.num_rows
        lengths.append(length)
        shared.append(sum(node.tokens for node in path if node.first_row < row))
        common.append(sum(node.tokens for node in path if node.num_rows > 1))
        keys.append(key.tokens)
    total = np.array(lengths)
    figures = {
        "prompt_tokens": total,
        "shared_share": np.array(shared) / total,
        "common_share": np.array(common) / total,
        "key_portion_share": np.array(keys) / total,
        "rows_per_key_portion": np.array(list(rows_per_key.values())),
    }
    means = {f"{name}_mean": float(values.mean()) for name, values in figures.items()}
    stds = {f"{name}_std": float(values.std()) for name, values in figures.items()}
    return means | stds | {"shared_share_of_tokens": sum(shared) / sum(lengths)}


def key_portion(path: Sequence[Node]) -> Node:
    """ "The deepest node in a path that has more tokens than the sum of its predecessors"."""
    before, key = 0, path[0]
    for node in path:
        if node.tokens > before:
            key = node
        before += node.tokens
    return key


def prefix_paths(prompts: Sequence[TokenIds]) -> Iterator[tuple[int, list[Node]]]:
    """(row, nodes from the root to its own) of every row."""
    order = sorted(range(len(prompts)), key=lambda row: prompts[row].astype(">u4").tobytes())
    todo: list[tuple[list[int], int, list[Node]]] = [(order, 0, [])]
    while todo:
        rows, depth, path = todo.pop()
        if len(rows) == 1:
            yield rows[0], [*path, Node(len(prompts[rows[0]]) - depth, 1, rows[0])]
            continue
        end = _common_tokens(prompts[rows[0]], prompts[rows[-1]])
        if end > depth:
            path = [*path, Node(end - depth, len(rows), min(rows))]
        children: dict[int, list[int]] = {}
        for row in rows:
            if len(prompts[row]) == end:
                yield row, path
            else:
                children.setdefault(int(prompts[row][end]), []).append(row)
        todo += [(child, end, path) for child in children.values()]


def _common_tokens(one: TokenIds, other: TokenIds) -> int:
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if differing.size else length
