"""Arrow batches as the native Python values that templates and JSON writers see."""

from __future__ import annotations

import base64
import datetime
import decimal
import math
from collections.abc import Iterator

import pyarrow as pa

from batchrun.inputs.base import Row

_EMPTY_BATCH_ROWS = 8192


class Undecodable:
    """Stands for text that is not valid UTF-8: whoever looks at it gets a ValueError."""

    def __init__(self, column: str) -> None:
        self._reason = f"column {column!r} is not valid UTF-8"

    def __str__(self) -> str:
        raise ValueError(self._reason)

    def __bool__(self) -> bool:
        raise ValueError(self._reason)


def native_rows(batch: pa.RecordBatch) -> list[Row]:
    """The rows of a batch as native Python values; sub-microsecond times are cut.

    Text that cannot be decoded becomes `Undecodable`.
    """
    if not batch.num_columns:
        return [{} for _ in range(batch.num_rows)]
    fields = [field.with_type(_without_nanoseconds(field.type)) for field in batch.schema]
    schema = pa.schema(fields)
    fitted = batch if schema == batch.schema else batch.cast(schema, safe=False)
    try:
        rows: list[Row] = fitted.to_pylist()
    except UnicodeDecodeError:
        return [_decodable_part(fitted, index) for index in range(fitted.num_rows)]
    return rows


def _decodable_part(batch: pa.RecordBatch, index: int) -> Row:
    row: Row = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[name] = column[index].as_py()
        except UnicodeDecodeError:
            row[name] = Undecodable(name)
    return row


def empty_batches(num_rows: int) -> Iterator[pa.RecordBatch]:
    """Batches without columns, `num_rows` rows in all."""
    for first in range(0, num_rows, _EMPTY_BATCH_ROWS):
        marks = pa.nulls(min(_EMPTY_BATCH_ROWS, num_rows - first))
        yield pa.RecordBatch.from_arrays([marks], names=["row"]).select([])


def plain_json(value: object) -> object:
    """`value` with only JSON's types in it: times as ISO text, bytes as base64, NaN as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return str(value)
    return value


def _without_nanoseconds(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if pa.types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if pa.types.is_time64(kind) and kind.unit == "ns":
        return pa.time64("us")
    return kind
