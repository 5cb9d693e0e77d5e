"""KV blocks and hints as `batchrun.cache` sees them, without vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class Block:
    """A block as vLLM's: the hash stands behind a property; `==` is identity."""

    block_id: int
    ref_cnt: int = 0
    prev_free_block: Any = None
    next_free_block: Any = None
    hash_key: bytes | None = None

    @property
    def block_hash(self) -> bytes | None:
        """The key of the cached content."""
        return self.hash_key


@dataclass(frozen=True, slots=True)
class Node:
    """A prefix node in a hint."""

    node: int
    num_rows_to_come: int
    next_rank: int


@dataclass(frozen=True, slots=True)
class RowHint:
    """A row's hint."""

    row: int
    rank: int
    nodes: tuple[Node, ...] = ()
    epoch: int = 1
    job: str = "job"
