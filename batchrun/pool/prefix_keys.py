"""Prefix keys without tokenising: the chunk chains of many rows, end to end in one array.

Equal leading text gives equal leading tokens up to the last few, so a chain of hashes over chunks
of the text stands in for the engine's chain of hashes over blocks of tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Self

import numpy as np
import numpy.typing as npt
import xxhash

CHUNK_BYTES = 256


def salt_of(*parts: str) -> int:
    """A seed from what separates KV caches besides the text: model, LoRA name, cache salt."""
    return xxhash.xxh3_64_intdigest("\x00".join(parts).encode("utf-8", "surrogatepass"))


IntArray = npt.NDArray[np.int64]
KeyArray = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class ChainTable:
    """Row r's chain, a key for each full chunk of its text, is `keys[starts[r] : starts[r + 1]]`.

    A last chunk shorter than `CHUNK_BYTES` has no key, as a partly filled KV block has no hash.
    Chained hashes make shared prefixes cheap to find: two rows share their first n chunks if and
    only if their n-th keys are equal.
    """

    keys: KeyArray
    starts: IntArray

    @classmethod
    def of(cls, chains: Sequence[KeyArray]) -> Self:
        """The table of these chains."""
        starts = np.zeros(len(chains) + 1, dtype=np.int64)
        np.cumsum([len(chain) for chain in chains], out=starts[1:])
        return cls(np.concatenate([np.empty(0, dtype=np.uint64), *chains]), starts)

    @property
    def num_rows(self) -> int:
        """Rows in the table."""
        return len(self.starts) - 1

    @property
    def lengths(self) -> IntArray:
        """Chunks of each row."""
        return np.diff(self.starts)

    def key_at(self, rows: IntArray, chunk: IntArray | int) -> KeyArray:
        """The key of the given chunk of each row, which must have it."""
        keys: KeyArray = self.keys[self.starts[rows] + chunk]
        return keys

    def prefix(self, row: int, num_chunks: int) -> KeyArray:
        """The first keys of a row's chain."""
        start = int(self.starts[row])
        return self.keys[start : start + num_chunks]

    def shared(self, rows: IntArray, others: IntArray) -> IntArray:
        """Leading chunks that each row shares with the other beside it. O(rows x log chunks)."""
        low = np.zeros(len(rows), dtype=np.int64)
        high = np.minimum(self._length(rows), self._length(others))
        open_ = np.flatnonzero(high)
        while open_.size:
            middle = (low[open_] + high[open_] + 1) >> 1
            mine = self.key_at(rows[open_], middle - 1)
            is_equal = mine == self.key_at(others[open_], middle - 1)
            low[open_] = np.where(is_equal, middle, low[open_])
            high[open_] = np.where(is_equal, high[open_], middle - 1)
            open_ = open_[low[open_] < high[open_]]
        return low

    def shared_with_previous(self, rows: IntArray) -> IntArray:
        """For rows in some order: leading chunks that each shares with the one before; 0 for the
        first."""
        shared = np.zeros(len(rows), dtype=np.int64)
        shared[1:] = self.shared(rows[1:], rows[:-1])
        return shared

    def _length(self, rows: IntArray) -> IntArray:
        lengths: IntArray = self.starts[rows + 1] - self.starts[rows]
        return lengths


def whole_chunks(num_bytes: int) -> range:
    """Where the chunks of a text of so many bytes end."""
    return range(CHUNK_BYTES, num_bytes + 1, CHUNK_BYTES)


class ChainBuilder:
    """Collects the chains of rows in their order; 8 bytes for each chunk and each row.

    `ends` gives where the chunks of a text of some length end: in the same places for all texts.
    """

    def __init__(self, salt: int, ends: Callable[[int], Iterable[int]] = whole_chunks) -> None:
        self._salt = salt
        self._ends = ends
        self._keys = array("Q")
        self._starts = array("q", [0])

    def add(self, texts: Iterable[bytes], salts: Iterable[int] | None = None) -> None:
        """The next rows' prompt texts; `salts`: of each its own."""
        digest, keys, starts = xxhash.xxh3_64_intdigest, self._keys, self._starts
        for text, key in zip(texts, repeat(self._salt) if salts is None else salts, strict=False):
            start, view = 0, memoryview(text)
            for end in self._ends(len(text)):
                key = digest(view[start:end], key)
                keys.append(key)
                start = end
            starts.append(len(keys))

    def build(self) -> ChainTable:
        """The table of all rows so far. Shares the builder's memory: add no more after it."""
        keys = np.frombuffer(self._keys, dtype=np.uint64)
        return ChainTable(keys, np.frombuffer(self._starts, dtype=np.int64))
