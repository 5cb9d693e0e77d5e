"""Results and kept input columns -> one output file, or many, in input order, as a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.errors import DataError
from batchrun.files import atomic_file
from batchrun.jobs.inputs.input_data import InputData, check_columns
from batchrun.jobs.inputs.rows import Row, native_rows, plain_json
from batchrun.jobs.results.output_parts import PartSink, Sink, atomic_folder
from batchrun.jobs.spec import OUTPUT_COLUMNS, JobSpec
from batchrun.store.results import StoredResult
from batchrun.strict import parse_reply
from batchrun.types import ProgressSink, RowError


def every_row(
    results: Iterator[StoredResult], missing: RowError | None
) -> Iterator[StoredResult | None]:
    """For every row, without end, its result, out of `results` in row order; else one with the
    error `missing`, or None without such an error."""
    following = next(results, None)
    for row in count():
        while following is not None and following.row < row:
            following = next(results, None)
        if following is not None and following.row == row:
            yield following
        else:
            yield None if missing is None else StoredResult(row, error=missing, attempts=0)


def response_text(endpoint: str, body: bytes) -> str | None:
    """The answer in an engine's reply: the tool calls of choice 0 as JSON text, or else its text,
    or an embedding as a JSON list. None when the reply holds no answer."""
    try:
        reply = parse_reply(body)
    except ValueError:
        return None
    if not isinstance(reply, Mapping):
        return None
    if endpoint == "/v1/embeddings":
        return _embedding_text(reply)
    if endpoint == "/v1/responses":
        return _responses_text(reply)
    return _choice_text(_first(reply.get("choices")))


def on_one_line(text: bytes) -> bytes:
    """JSON whose strings hold nothing that readers may take for the end of a line."""
    for mark in "\u2028\u2029\x85":
        text = text.replace(mark.encode(), f"\\u{ord(mark):04x}".encode())
    return text


def error_text(error: RowError | None) -> str | None:
    """An error as the JSON text that the output's `error` column holds; None for none."""
    if error is None:
        return None
    fields = {"code": error.code, "message": error.message, "status_code": error.status_code}
    return json.dumps(fields, ensure_ascii=False)


def _first(items: object) -> Mapping[str, object]:
    first = items[0] if isinstance(items, list) and items else None
    return first if isinstance(first, Mapping) else {}


def _choice_text(choice: Mapping[str, object]) -> str | None:
    message = choice.get("message")
    if not isinstance(message, Mapping):
        return _text(choice.get("text"))
    content = message.get("tool_calls") or message.get("content")
    is_text = content is None or isinstance(content, str)
    return _text(content) if is_text else json.dumps(content, ensure_ascii=False)


def _embedding_text(reply: Mapping[str, object]) -> str | None:
    data = reply.get("data")
    vectors = [_first([item]).get("embedding") for item in data] if isinstance(data, list) else []
    if not vectors:
        return None
    return json.dumps(vectors[0] if len(vectors) == 1 else vectors)


def _responses_text(reply: Mapping[str, object]) -> str | None:
    items = reply.get("output")
    outputs = (
        [item for item in items if isinstance(item, Mapping)] if isinstance(items, list) else []
    )
    texts = [
        text
        for item in outputs
        if item.get("type") == "message" and isinstance(item.get("content"), list)
        for part in item["content"]
        if isinstance(part, Mapping) and (text := _text(part.get("text"))) is not None
    ]
    calls = [dict(item) for item in outputs if item.get("type") == "function_call"]
    if calls:
        return json.dumps(calls, ensure_ascii=False)
    return "".join(texts) if texts else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


_GROUP_BYTES = 32 << 20
_GROUP_ROWS = 65_536

_NUMBERS = frozenset({"prompt_tokens", "output_tokens", "cached_tokens", "attempts"})
"""The columns that hold whole numbers; all others that batchrun writes hold text."""


class JsonlSink:
    """One JSON object per line; `error` and `body` are objects, times ISO text, bytes base64."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._is_seen = file.isatty()

    def write(self, results: Sequence[Row], kept: pa.RecordBatch | Sequence[Row]) -> None:
        """Adds rows; `kept` are native rows. A terminal gets nothing that it would obey."""
        lines: list[str] = []
        for result, row in zip(results, kept, strict=True):
            first, *rest = result.items()
            values = dict([first, *row.items(), *map(_as_object, rest)])
            lines.append(json.dumps(plain_json(values), ensure_ascii=self._is_seen) + "\n")
        self._file.write(on_one_line("".join(lines).encode("utf-8", "backslashreplace")))

    def close(self) -> None:
        """Nothing is left over."""


def _as_object(item: tuple[str, object]) -> tuple[str, object]:
    name, value = item
    if name in {"error", "body"} and isinstance(value, str):
        return name, json.loads(value)
    return item


class ParquetSink:
    """zstd Parquet in row groups of about 32 MiB; kept columns have their input types."""

    def __init__(
        self,
        file: BinaryIO,
        *,
        kept: pa.Schema,
        result_columns: Sequence[str],
        id_type: pa.DataType,
    ) -> None:
        types = {name: pa.int64() if name in _NUMBERS else pa.string() for name in result_columns}
        results = [pa.field(name, kind) for name, kind in (types | {"id": id_type}).items()]
        self._schema = pa.schema([results[0], *kept, *results[1:]])
        self._kept = kept.names
        self._writer = pq.ParquetWriter(file, self._schema, compression="zstd")
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._waiting_rows = 0

    def write(self, results: Sequence[Row], kept: pa.RecordBatch | Sequence[Row]) -> None:
        """Adds rows; `kept` is a batch of the kept columns."""
        assert isinstance(kept, pa.RecordBatch)
        kept_columns = {name: kept.column(name) for name in self._kept}
        arrays = [
            kept_columns[field.name]
            if field.name in kept_columns
            else pa.array([row[field.name] for row in results], type=field.type)
            for field in self._schema
        ]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        self._waiting_rows += batch.num_rows
        if self._waiting_bytes >= _GROUP_BYTES or self._waiting_rows >= _GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        """Writes the last row group and the footer."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting, schema=self._schema))
            self._waiting.clear()
            self._waiting_bytes = self._waiting_rows = 0


_SLICE_ROWS = 256
_SLICE_BYTES = 8 << 20
"""Rows whose replies are held at a time: so many, and so much of them but for a single one."""


def write_output(
    place: Path | BinaryIO,
    results: Iterator[StoredResult],
    *,
    spec: JobSpec,
    data: InputData,
    missing: RowError | None,
    progress: ProgressSink | None = None,
) -> int:
    """Writes to `place` and returns the number of rows: a file or the files of a folder (.parquet,
    or JSONL for any other name), which appear whole or not at all, or JSONL as a stream.

    `results` come in row order, possibly with gaps. A row without a result gets the error
    `missing`, or is left out when that is None (a partial output). Raises StoreFullError,
    InputError for an unwritable place, DataError for an input that cannot be read any more.
    """
    check_columns(spec, data)
    num_written = 0
    every = every_row(results, missing)
    id_type = data.id_type()
    is_parquet = isinstance(place, Path) and place.suffix == ".parquet"
    make = partial(_make_sink, spec=spec, data=data, id_type=id_type, is_parquet=is_parquet)
    with _open_sink(place, spec.output.rows_per_file, make) as sink:
        slices = _kept_slices(spec, data, id_type, native=not is_parquet)
        for first_row, kept, ids in slices:
            for present, found in _bounded(islice(every, len(ids))):
                rows = [
                    _output_row(ids[index], result, spec)
                    for index, result in zip(present, found, strict=True)
                ]
                with _writable(first_row):
                    sink.write(rows, _selected(kept, present))
                num_written += len(rows)
            if progress is not None:
                progress("writing the results", first_row + len(ids), data.num_rows)
    return num_written


@contextmanager
def _writable(first_row: int) -> Iterator[None]:
    """Raises DataError for what the input has and the output's format cannot hold."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"a row from {first_row} on holds what the output cannot: {reason}; "
            "`batchrun results JOB -o FILE.parquet` writes kept columns as they are"
        ) from None


def _bounded(
    slice_of: Iterable[StoredResult | None],
) -> Iterator[tuple[list[int], list[StoredResult]]]:
    """The results in a slice with their places in it, so many at a time as `_SLICE_BYTES` hold."""
    places: list[int] = []
    found: list[StoredResult] = []
    num_bytes = 0
    for place, result in enumerate(slice_of):
        if result is None:
            continue
        if num_bytes >= _SLICE_BYTES:
            yield places, found
            places, found, num_bytes = [], [], 0
        places.append(place)
        found.append(result)
        num_bytes += len(result.body or b"")
    if places:
        yield places, found


def _output_row(row_id: str | int, result: StoredResult, spec: JobSpec) -> Row:
    reply = result.body
    row: Row = {
        "id": row_id,
        "response": None if reply is None else response_text(spec.endpoint, reply),
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.usage.num_prompt_tokens,
        "output_tokens": result.usage.num_output_tokens,
        "cached_tokens": result.usage.num_cached_tokens,
        "attempts": result.attempts,
        "error": error_text(result.error),
    }
    if spec.output.body:
        row["body"] = None if reply is None else reply.decode("utf-8", "replace")
    return row


@contextmanager
def _open_sink(
    place: Path | BinaryIO, rows_per_file: int | None, make: Callable[[BinaryIO], Sink]
) -> Iterator[Sink]:
    """The sink of an output, which is there when this is left without an error."""
    if not isinstance(place, Path):
        yield make(place)
    elif rows_per_file is None:
        with atomic_file(place) as file:
            sink = make(file)
            yield sink
            sink.close()
    else:
        with (
            atomic_folder(place) as folder,
            PartSink(folder, place.suffix, rows_per_file, make) as parts,
        ):
            yield parts


def _make_sink(
    file: BinaryIO, *, spec: JobSpec, data: InputData, id_type: pa.DataType, is_parquet: bool
) -> Sink:
    if not is_parquet:
        return JsonlSink(file)
    columns = OUTPUT_COLUMNS if spec.output.body else OUTPUT_COLUMNS[:-1]
    kept = data.schema(spec.output.keep)
    return ParquetSink(file, kept=kept, result_columns=columns, id_type=id_type)


def _selected(kept: pa.RecordBatch | list[Row], present: Sequence[int]) -> object:
    if isinstance(kept, list):
        return [kept[index] for index in present]
    return kept.take(pa.array(present, type=pa.int64()))


def _kept_slices(
    spec: JobSpec, data: InputData, id_type: pa.DataType, *, native: bool
) -> Iterator[tuple[int, pa.RecordBatch | list[Row], list[str | int]]]:
    """(first row, kept columns, ids) for a few rows at a time."""
    as_id = int if pa.types.is_integer(id_type) else str
    keep = list(spec.output.keep)
    id_columns = [data.id_column] if data.id_column else []
    columns = list(dict.fromkeys([*keep, *id_columns]))
    batches: Iterable[tuple[int, Any]] = (data.iter_rows if native else data.iter_batches)(columns)
    for first_row, rows in batches:
        for start in range(0, len(rows), _SLICE_ROWS):
            part = rows[start : start + _SLICE_ROWS]
            kept = part.select(keep) if not native else [{n: row[n] for n in keep} for row in part]
            id_rows = part if native else native_rows(part.select(id_columns))
            numbered = enumerate(id_rows, first_row + start)
            yield (
                first_row + start,
                kept,
                [as_id(data.row_id(row, number)) for number, row in numbered],
            )
