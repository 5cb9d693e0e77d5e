"""KV blocks and hints as `batchrun.cache` sees them, without vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchrun.hints import NodeHint, RowHint


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


def row_hint(
    row: int, rank: int, nodes: tuple[NodeHint, ...] = (), epoch: int = 1, job: str = "job"
) -> RowHint:
    """A row's hint."""
    return RowHint(epoch=epoch, job=job, row=row, rank=rank, nodes=nodes)
