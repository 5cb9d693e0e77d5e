"""Hashes of the blocks of a file: what a pin holds about its bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

BLOCK_BYTES = 64 << 20
_READ_BYTES = 1 << 20


def even_block_ends(size_bytes: int) -> list[int]:
    """The ends of 64 MiB blocks; the last is the size of the file."""
    return [*range(BLOCK_BYTES, size_bytes, BLOCK_BYTES), size_bytes]


def hash_blocks(
    path: Path, ends: Sequence[int], *, on_bytes: Callable[[int], None] | None = None
) -> list[str]:
    """xxh3-128 of each block of the file; a block starts where the one before ends.

    Raises OSError. A file that is shorter than its blocks gives hashes of what is there.
    """
    hashes: list[str] = []
    position = 0
    with path.open("rb") as file:
        for end in ends:
            digest = xxhash.xxh3_128()
            while position < end and (block := file.read(min(_READ_BYTES, end - position))):
                digest.update(block)
                position += len(block)
            hashes.append(digest.hexdigest())
            if on_bytes is not None:
                on_bytes(position)
    return hashes
