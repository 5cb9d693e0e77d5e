"""Parquet: streaming in small batches, and random access whatever the size of the row groups."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchrun.errors import DataError, MixedTypesError
from batchrun.jobs.inputs.rows import (
    BATCH_BYTES,
    CACHE_BYTES,
    ROW_LIMIT_BYTES,
    InputFile,
    Row,
    cast_changed,
    empty_batches,
    native_rows,
    with_leaves,
    without_nulls,
)

JSON_COLUMNS = "batchrun.json"
"""Where a file names, as a JSON list, its columns of JSON text that stands for other values."""

JSON_KINDS: Mapping[type, Callable[[str], object]] = {
    datetime.datetime: datetime.datetime.fromisoformat,
    datetime.date: datetime.date.fromisoformat,
    datetime.time: datetime.time.fromisoformat,
    decimal.Decimal: decimal.Decimal,
}
"""How values that JSON lacks are read there: each is `{tag_of(kind): its text}`."""

_MAGIC = b"PAR1"
_BUFFER_BYTES = 1 << 20
_MAX_BATCH_ROWS = 8192
_SAMPLE_ROWS = 16
_STRETCH_ROWS = 1024
SMALL_GROUP_BYTES = 4 * BATCH_BYTES
"""Row groups up to this size are decoded whole for random access; larger ones are searched."""


def tag_of(kind: type) -> str:
    """The only key of what stands in JSON for a value of one of `JSON_KINDS`."""
    return f"batchrun.{kind.__name__}"


_READ = {tag_of(kind): read for kind, read in JSON_KINDS.items()}


def _untagged(found: dict[str, object]) -> object:
    """The value that an object of JSON stands for; of others, the object."""
    tag, text = next(iter(found.items()), ("", None))
    if len(found) == 1 and tag in _READ and isinstance(text, str):
        with contextlib.suppress(ValueError, ArithmeticError):
            return _READ[tag](text)
    return found


class ParquetInput(InputFile):
    """One Parquet file. Memory does not grow with the file or with its row groups."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._source, self._file = _open(path)
        schema: pa.Schema = self._file.schema_arrow
        self.columns: tuple[str, ...] = tuple(schema.names)
        self._as_json = _json_columns(path, self._file.metadata.metadata)
        self.num_rows: int = self._file.metadata.num_rows
        groups = range(self._file.num_row_groups)
        self._group_rows = [self._file.metadata.row_group(group).num_rows for group in groups]
        self._ends = np.cumsum(self._group_rows)
        self._cache: OrderedDict[tuple[int, tuple[str, ...]], list[pa.RecordBatch]] = OrderedDict()
        self._sizes = cache(self._measure_sizes)
        self._with_categories = cache(partial(_parquet_file, self._source, self._file.metadata))

    def schema(self, columns: Sequence[str]) -> pa.Schema:
        """The file's own types of `columns`, of categories that of their values; DataError for a
        type that cannot be used."""
        fields = _plain(self._file.schema_arrow.field(name) for name in columns)
        for field in fields:
            if not _is_usable(field.type):
                raise DataError(
                    f"{self.path}: column {field.name!r} has type {field.type}, which cannot be "
                    "used; convert it to text, numbers, lists or structs"
                )
        return fields

    def check_fits(self, schema: pa.Schema) -> None:
        """Raises DataError where columns cannot have these types; reads those that have others."""
        own = self.schema(schema.names)
        for field in schema:
            if own.field(field.name).type != field.type:
                for _ in self.iter_batches([field.name], pa.schema([field]), BATCH_BYTES):
                    pass

    def iter_batches(
        self, columns: Sequence[str], schema: pa.Schema, max_bytes: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(first row, batch) in file order, row group after row group."""
        first_row = 0
        for group in range(self._file.num_row_groups):
            for batch in self._group_batches(group, columns, max_bytes):
                _refuse_huge_rows(self.path, first_row, batch)
                yield first_row, self._fitted(batch, schema)
                first_row += batch.num_rows

    def iter_rows(self, columns: Sequence[str], max_bytes: int) -> Iterator[tuple[int, list[Row]]]:
        """Like `iter_batches`, as native values."""
        for first_row, rows in super().iter_rows(columns, max_bytes):
            yield first_row, self._told(rows)

    def read_rows(self, rows: Sequence[int], columns: Sequence[str]) -> list[Row]:
        """The given rows in the given order; slow where they lie in large row groups."""
        if not columns:
            return [{} for _ in rows]
        self.schema(columns)
        wanted = np.unique(np.asarray(rows, dtype=np.int64))
        owners = np.searchsorted(self._ends, wanted, side="right")
        found: dict[int, Row] = {}
        for group in np.unique(owners).tolist():
            first = int(self._ends[group]) - self._group_rows[group]
            here = wanted[owners == group]
            for batch in self._chunks(group, tuple(columns)):
                inside = here[(here >= first) & (here < first + batch.num_rows)]
                if len(inside):
                    with _readable(self.path):
                        picked = native_rows(batch.take(pa.array(inside - first)))
                    found.update(zip(inside.tolist(), picked, strict=True))
                first += batch.num_rows
        return self._told([found[row] for row in rows])

    def _told(self, rows: list[Row]) -> list[Row]:
        """The rows with what their columns of JSON text stand for."""
        for name in self._as_json & rows[0].keys() if rows else ():
            for row in rows:
                if isinstance(text := row[name], str):
                    try:
                        row[name] = json.loads(text, object_hook=_untagged)
                    except (ValueError, RecursionError):
                        raise DataError(f"{self.path}: column {name!r} is not JSON") from None
        return rows

    def chunk_sizes(self, columns: Sequence[str]) -> list[tuple[int, int]]:
        """(rows, about how many decoded bytes) of each row group."""
        return [
            (num_rows, self._sizes(group, tuple(columns))[1])
            for group, num_rows in enumerate(self._group_rows)
        ]

    def close(self) -> None:
        """Closes the file."""
        self._source.close()
        self._cache.clear()

    def _fitted(self, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        """The batch in the types that all files of the input have in common."""
        try:
            return cast_changed(batch, schema)
        except pa.ArrowException as failure:
            reason = " ".join(str(failure).split())
            raise MixedTypesError(
                f"{self.path}: its column types differ from those of the other files: {reason}"
            ) from None

    def _group_batches(
        self, group: int, columns: Sequence[str], max_bytes: int
    ) -> Iterator[pa.RecordBatch]:
        if not columns:
            yield from empty_batches(self._group_rows[group])
            return
        batch_rows = self._batch_rows(group, columns, max_bytes)
        with _readable(self.path):
            batches = self._file.iter_batches(
                batch_size=batch_rows, row_groups=[group], columns=list(columns), use_threads=False
            )
            for batch in batches:
                # A column u.name is read together with the field of that name of a column u.
                yield from _plain_parts(batch.select(list(columns)), max_bytes)

    def _batch_rows(self, group: int, columns: Sequence[str], max_bytes: int) -> int:
        """Rows per batch so that one decodes to about `max_bytes`."""
        row_bytes, _ = self._sizes(group, tuple(columns))
        return int(np.clip(max_bytes / max(row_bytes, 1), 1, _MAX_BATCH_ROWS))

    def _measure_sizes(self, group: int, columns: tuple[str, ...]) -> tuple[float, int]:
        """(decoded bytes of a row among the longest, of the group): as the footer has them on the
        average, or as a few decoded rows or the text of all rows have them if that is more.

        The footer's size counts a repeated value once.
        """
        parts = self._parts(group, columns)
        num_rows = max(self._group_rows[group], 1)
        row_bytes = float(sum(part.total_uncompressed_size for part in parts) / num_rows)
        with _readable(self.path):
            sample = next(
                self._file.iter_batches(
                    batch_size=_SAMPLE_ROWS,
                    row_groups=[group],
                    columns=list(columns),
                    use_threads=False,
                ),
                None,
            )
            if sample is not None and sample.num_rows:
                num_bytes = sum(part.nbytes for part in _plain_parts(sample, BATCH_BYTES))
                row_bytes = max(row_bytes, num_bytes / sample.num_rows)
        longest_bytes, text_bytes = self._text_sizes(group, parts, row_bytes)
        group_bytes = max(int(self._group_rows[group] * row_bytes), text_bytes)
        return max(row_bytes, longest_bytes), group_bytes

    def _text_sizes(
        self, group: int, parts: Sequence[pq.ColumnChunkMetaData], row_bytes: float
    ) -> tuple[float, int]:
        """(bytes of text of a row, where some rows of the group that follow one another have most,
        of the group); 0 where that cannot be much more than `row_bytes` has it."""
        texts = [part for part in parts if _may_repeat_text(part)]
        if not texts:
            return 0.0, 0
        file = self._with_categories(tuple(part.path_in_schema for part in texts))
        num_rows = max(self._group_rows[group], 1)
        stretch_rows = int(np.clip(BATCH_BYTES / max(row_bytes, 1), 1, _STRETCH_ROWS))
        stretch_rows = min(stretch_rows, num_rows)
        longest_bytes = text_bytes = 0
        for part in texts:
            with _readable(self.path):
                batches = file.iter_batches(
                    batch_size=stretch_rows,
                    row_groups=[group],
                    columns=[part.path_in_schema],
                    use_threads=False,
                )
                harmless_bytes = 2 * row_bytes * num_rows / max(part.num_values, 1)
                most_bytes, all_bytes = _stretch_bytes(batches, harmless_bytes)
            longest_bytes += most_bytes
            text_bytes += all_bytes
        return longest_bytes / stretch_rows, text_bytes

    def _parts(self, group: int, columns: Sequence[str]) -> list[pq.ColumnChunkMetaData]:
        metadata = self._file.metadata.row_group(group)
        wanted = tuple(f"{name}." for name in columns)
        parts = (metadata.column(index) for index in range(metadata.num_columns))
        return [part for part in parts if f"{part.path_in_schema}.".startswith(wanted)]

    def _chunks(self, group: int, columns: tuple[str, ...]) -> Iterable[pa.RecordBatch]:
        """The rows of a group: out of a small cache, unless they are many."""
        if self._sizes(group, columns)[1] > SMALL_GROUP_BYTES:
            return self._group_batches(group, columns, BATCH_BYTES)
        if (group, columns) not in self._cache:
            with _readable(self.path):
                table = self._file.read_row_group(group, columns=list(columns), use_threads=False)
            parts = table.select(list(columns)).combine_chunks().to_batches()
            self._cache[group, columns] = [*map(_without_views, parts)]
        self._cache.move_to_end((group, columns))
        while len(self._cache) > 1 and self._cached_bytes() > CACHE_BYTES:
            self._cache.popitem(last=False)
        return self._cache[group, columns]

    def _cached_bytes(self) -> int:
        return sum(batch.nbytes for parts in self._cache.values() for batch in parts)


def _open(path: Path) -> tuple[pa.OSFile, pq.ParquetFile]:
    with path.open("rb") as file:
        head = file.read(len(_MAGIC))
        file.seek(max(path.stat().st_size - len(_MAGIC), 0))
        tail = file.read(len(_MAGIC))
    if head != _MAGIC:
        raise DataError(f"{path}: not a Parquet file (it does not start with PAR1)")
    if tail != _MAGIC:
        raise DataError(f"{path}: the Parquet file is cut short (its footer is missing)")
    with _readable(path):
        source = pa.OSFile(str(path))
        return source, _parquet_file(source, None, ())


def _parquet_file(
    source: pa.OSFile, metadata: pq.FileMetaData | None, categories: Sequence[str]
) -> pq.ParquetFile:
    """A reader; text of `categories` it reads as categories."""
    # Spark's INT96 times in nanoseconds would wrap outside the years 1677 to 2262.
    return pq.ParquetFile(
        source,
        metadata=metadata,
        pre_buffer=False,
        buffer_size=_BUFFER_BYTES,
        coerce_int96_timestamp_unit="us",
        read_dictionary=list(categories),
    )


def _may_repeat_text(part: pq.ColumnChunkMetaData) -> bool:
    """Whether the file may have text of this column once that stands in many rows."""
    is_text = part.physical_type == "BYTE_ARRAY"
    is_long = part.num_values * part.total_uncompressed_size > SMALL_GROUP_BYTES
    return is_text and is_long and any("DICTIONARY" in encoding for encoding in part.encodings)


def _stretch_bytes(batches: Iterable[pa.RecordBatch], harmless_bytes: float) -> tuple[int, int]:
    """Bytes of the text in (the batch with the most, all batches) whose rows name categories of the
    file; text after these was written as it is. 0 where no category is over so many bytes long."""
    most_bytes = all_bytes = num_known = 0
    for batch in batches:
        found = [leaf.dictionary for column in batch.columns for leaf in _categories(column)]
        num_values = sum(map(len, found))
        if not num_known and num_values and not any(_has_longer(v, harmless_bytes) for v in found):
            break
        num_bytes = sum(map(_category_bytes, batch.columns))
        most_bytes, all_bytes = max(most_bytes, num_bytes), all_bytes + num_bytes
        if num_known and num_values > num_known:
            break
        num_known = num_values
    return most_bytes, all_bytes


def _has_longer(values: pa.Array, num_bytes: float) -> bool:
    return (pc.max(pc.binary_length(values)).as_py() or 0) > num_bytes


def _json_columns(path: Path, marks: Mapping[bytes, bytes] | None) -> frozenset[str]:
    try:
        return frozenset(json.loads((marks or {}).get(JSON_COLUMNS.encode(), b"[]")))
    except (ValueError, TypeError, RecursionError):
        raise DataError(f"{path}: its mark {JSON_COLUMNS} is no list of columns") from None


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError) as failure:
        reason = " ".join(str(failure).split())[:300]
        raise DataError(f"{path}: damaged or not readable as Parquet: {reason}") from None


def _refuse_huge_rows(path: Path, first_row: int, batch: pa.RecordBatch) -> None:
    if batch.nbytes <= ROW_LIMIT_BYTES:
        return
    for index in range(batch.num_rows):
        if batch.slice(index, 1).nbytes > ROW_LIMIT_BYTES:
            raise DataError(
                f"{path}: row {first_row + index} holds over {ROW_LIMIT_BYTES >> 20} MiB"
            )


def _without_view(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(kind):
        return pa.string()
    return pa.binary() if pa.types.is_binary_view(kind) else kind


def _value(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _plain(fields: Iterable[pa.Field]) -> pa.Schema:
    """The fields with text where Arrow has views of it, or categories."""
    return pa.schema([field.with_type(_plain_type(field.type)) for field in fields])


def _plain_type(kind: pa.DataType) -> pa.DataType:
    plain = with_leaves(_without_view(kind), _value)
    return plain if plain == kind else without_nulls(plain)


def told_apart(schema: pa.Schema) -> pa.Schema:
    """Types that do not meet where those of `schema` would at the price of rounding decimals."""
    return pa.schema([f.with_type(with_leaves(f.type, _unrounded)) for f in schema])


def _unrounded(kind: pa.DataType) -> pa.DataType:
    """Text for decimals, which no float meets; null, which all meet, for whole numbers."""
    if pa.types.is_decimal(kind):
        return pa.string()
    return pa.null() if pa.types.is_integer(kind) else kind


def _plain_parts(batch: pa.RecordBatch, max_bytes: int) -> Iterator[pa.RecordBatch]:
    """The batch as `_plain` has it, cut where that grows: many rows may have one long category."""
    schema, half = _plain(batch.schema), batch.num_rows // 2
    if schema == batch.schema:
        yield batch
    elif half and sum(map(_category_bytes, batch.columns)) > max_bytes:
        yield from _plain_parts(batch.slice(0, half), max_bytes)
        yield from _plain_parts(batch.slice(half), max_bytes)
    else:
        yield cast_changed(batch, schema)


def _category_bytes(column: pa.Array) -> int:
    """Bytes of the text that the categories in a column stand for."""
    sizes = (pc.binary_length(leaf.dictionary).take(leaf.indices) for leaf in _categories(column))
    return sum(int(pc.sum(each).as_py() or 0) for each in sizes)


def _categories(column: pa.Array) -> Iterator[pa.DictionaryArray]:
    """The column, or what stands in its structs and lists, as far as that is of categories."""
    if pa.types.is_dictionary(column.type):
        yield column
    elif pa.types.is_struct(column.type):
        for child in column.flatten():
            yield from _categories(child)
    elif isinstance(column, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
        yield from _categories(column.flatten())


def _without_views(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with text where Arrow has views of text, which it cannot pick rows of."""
    fields = [field.with_type(_without_view(field.type)) for field in batch.schema]
    schema = pa.schema(fields)
    return cast_changed(batch, schema)


def _is_usable(kind: pa.DataType) -> bool:
    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_usable(kind.value_type)
    if types.is_struct(kind):
        return all(_is_usable(kind.field(index).type) for index in range(kind.num_fields))
    simple = (
        types.is_string,
        types.is_large_string,
        types.is_primitive,
        types.is_null,
        types.is_binary,
        types.is_large_binary,
        types.is_decimal,
    )
    return any(check(kind) for check in simple)
