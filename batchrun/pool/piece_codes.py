"""Where within a chunk two rows part: codes of 16 bits for every few bytes of a prompt's text.

The order of a job needs whole chunks only. A study of its prompts needs more: of a prompt with
1,400 bytes, half a chunk is a tenth. Every chunk is cut into pieces of 32 bytes. A text's first
chunk is cut into pieces of 8 bytes too, since a beginning that all rows share is often short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchrun.pool.chains import IntArray
from batchrun.pool.prefix_key import CHUNK_BYTES

PIECE_BYTES = 32
HEAD_PIECE_BYTES = 8
SURE_BITS = 6
"""An equal beginning among n siblings counts if its codes have so many bits more than log2(n):
by chance it would be found for one sibling in 64 or fewer."""

CodeArray = npt.NDArray[np.uint16]

_CODE_BITS = 16
_CODE_TYPE = np.dtype(">u2")
_PER_CHUNK = CHUNK_BYTES // PIECE_BYTES
_PER_HEAD = CHUNK_BYTES // HEAD_PIECE_BYTES
_FACTORS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93],
    dtype=np.uint64,
)


@dataclass(frozen=True, slots=True, eq=False)
class PieceCodes:
    """Row r's chunks, the last one begun included, have the codes
    `codes[starts[r] : starts[r + 1]]`, its first chunk also `heads[r]`: a line for each chunk."""

    codes: CodeArray
    starts: IntArray
    heads: CodeArray

    def at(self, rows: IntArray, chunks: IntArray) -> CodeArray:
        """The codes of the given chunk of each row; zeros where the row has ended before."""
        places = self.starts[rows] + chunks
        found = np.zeros((len(rows), _PER_CHUNK), dtype=_CODE_TYPE)
        goes_on = places < self.starts[rows + 1]
        found[goes_on] = self.codes[places[goes_on]]
        return found


class PieceCoder:
    """Collects the codes of rows in their order: 16 bytes for each begun chunk, 64 for each row."""

    def __init__(self) -> None:
        self._codes, self._heads = bytearray(), bytearray()
        self._num_chunks: list[IntArray] = []

    def add(self, texts: Sequence[bytes]) -> None:
        """The next rows' prompt texts."""
        padded = b"".join(text + bytes(-len(text) % CHUNK_BYTES) for text in texts)
        self._codes += _coded(padded, PIECE_BYTES)
        heads = b"".join(text[:CHUNK_BYTES].ljust(CHUNK_BYTES, b"\0") for text in texts)
        self._heads += _coded(heads, HEAD_PIECE_BYTES)
        num_chunks = [-(-len(text) // CHUNK_BYTES) for text in texts]
        self._num_chunks.append(np.array(num_chunks, dtype=np.int64))

    def build(self) -> PieceCodes:
        """The codes of all rows so far. Shares the coder's memory: add no more after it."""
        codes = np.frombuffer(self._codes, dtype=_CODE_TYPE).reshape(-1, _PER_CHUNK)
        heads = np.frombuffer(self._heads, dtype=_CODE_TYPE).reshape(-1, _PER_HEAD)
        starts = np.cumsum(np.concatenate([np.zeros(1, dtype=np.int64), *self._num_chunks]))
        return PieceCodes(codes, starts, heads)


def sort_keys(codes: CodeArray) -> list[npt.NDArray[np.uint64]]:
    """Keys of the lines of codes, the first one first: in their order, lines with equal beginnings
    stand together."""
    return list(codes.view(">u8").astype(np.uint64).T)


def equal_pieces(codes: CodeArray, others: CodeArray, num_siblings: IntArray) -> IntArray:
    """Leading pieces that each line of codes shares with the other beside it, not by chance."""
    equal: IntArray = np.logical_and.accumulate(codes == others, axis=1).sum(axis=1)
    is_sure = _CODE_BITS * equal >= np.log2(np.maximum(num_siblings, 1)) + SURE_BITS
    return np.where(is_sure, equal, 0)


def _coded(text: bytes, piece_bytes: int) -> bytes:
    words = np.frombuffer(text, dtype="<u8").reshape(-1, piece_bytes // 8)
    mixed = (words * _FACTORS[: words.shape[1]]).sum(axis=1, dtype=np.uint64)
    codes: CodeArray = (mixed >> np.uint64(64 - _CODE_BITS)).astype(_CODE_TYPE)
    return codes.tobytes()
