"""Ids must be unique: checked over all rows with eight bytes of memory per row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xxhash

from batchrun.errors import DataError
from batchrun.inputs.data import InputData
from batchrun.inputs.native import Undecodable
from batchrun.types import ProgressSink

_CHECKED_AT_ONCE = 10_000


def check_ids(data: InputData, *, progress: ProgressSink | None = None) -> None:
    """Raises DataError for a null id, an id that is not text or a whole number, or one that two
    rows share (naming the id and both rows). Row numbers as ids are always unique."""
    if data.id_column is None:
        return
    hashes = np.empty(data.num_rows, dtype=np.uint64)
    for row, row_id in _iter_ids(data, data.id_column):
        hashes[row] = xxhash.xxh3_64_intdigest(row_id.encode("utf-8", "surrogatepass"))
        if progress is not None and row % 100_000 == 0:
            progress("checking ids", row, data.num_rows)
    ordered = np.sort(hashes)
    shared = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    candidates = np.flatnonzero(np.isin(hashes, shared))
    while len(candidates):
        checked = np.flatnonzero(np.isin(hashes, hashes[candidates[:_CHECKED_AT_ONCE]]))
        _refuse_duplicates(data, data.id_column, set(checked.tolist()))
        candidates = np.setdiff1d(candidates, checked)


def _refuse_duplicates(data: InputData, column: str, candidates: set[int]) -> None:
    """Equal hashes are likely, not surely, equal ids: the ids themselves decide."""
    seen: dict[str, int] = {}
    for row, row_id in _iter_ids(data, column):
        if row not in candidates:
            continue
        if row_id in seen:
            raise DataError(
                f"{_place(data, row)}: id {row_id!r} (column {column!r}) is also the id of row "
                f"{seen[row_id]}; ids must be unique"
            )
        seen[row_id] = row


def _iter_ids(data: InputData, column: str) -> Iterator[tuple[int, str]]:
    for first_row, rows in data.iter_rows([column]):
        for index, values in enumerate(rows):
            value = values[column]
            if isinstance(value, bool) or not isinstance(value, str | int):
                raise DataError(
                    f"{_place(data, first_row + index)}: the id (column {column!r}) is "
                    f"{_describe(value)}; it must be text or a whole number"
                )
            yield first_row + index, str(value)


def _describe(value: object) -> str:
    if isinstance(value, Undecodable):
        return "not valid UTF-8"
    return "null" if value is None else f"a {type(value).__name__}"


def _place(data: InputData, row: int) -> str:
    for path, first, last in data.places():
        if first <= row < last:
            return f"{path}: row {row}"
    return f"row {row}"
