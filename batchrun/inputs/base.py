"""What every input file offers, whatever its format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pyarrow as pa

Row = dict[str, object]
"""Column -> native Python value."""

ROW_LIMIT_BYTES = 64 << 20
"""Largest row; a longer one is refused with its place."""

_BLANK = b" \t\r\n"

BATCH_BYTES = 8 << 20
"""About how much decoded data a reader holds at a time."""


def is_blank(line: bytes) -> bool:
    """Whether a line of a text file is no row: it holds nothing but what JSON calls white space,
    however much of it."""
    return not line.strip(_BLANK)


class InputFile(Protocol):
    """One file of rows, numbered from 0. Used by one thread at a time.

    Every method raises DataError, one line that names the file, when it cannot be read.
    """

    path: Path
    num_rows: int
    columns: tuple[str, ...]

    def schema(self, columns: Sequence[str]) -> pa.Schema:
        """The Arrow types of `columns`, the same for every batch; may read the whole file."""
        ...

    def iter_batches(
        self, columns: Sequence[str], schema: pa.Schema, max_bytes: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(first row, batch) in file order; a batch holds about `max_bytes` decoded bytes."""
        ...

    def iter_rows(self, columns: Sequence[str], max_bytes: int) -> Iterator[tuple[int, list[Row]]]:
        """Like `iter_batches`, as native values: what a template sees."""
        ...

    def read_rows(self, rows: Sequence[int], columns: Sequence[str]) -> list[Row]:
        """The given rows in the given order."""
        ...

    def block_ends(self) -> list[int]:
        """Byte offsets at which the pinned blocks of the file end; the last is its size."""
        ...

    def close(self) -> None:
        """Gives the file back."""
        ...
