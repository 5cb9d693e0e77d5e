"""The records of a simulation as Parquet files, written in row groups as they come."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.errors import DataError

ROWS_PER_GROUP = 65_536

REQUESTS = {
    "is_online": pa.bool_(),
    "job": pa.dictionary(pa.int32(), pa.string()),
    "number": pa.int64(),
    "engine": pa.int16(),
    "arrival_s": pa.float64(),
    "admitted_s": pa.float64(),
    "first_token_s": pa.float64(),
    "last_token_s": pa.float64(),
    "num_prompt_tokens": pa.int32(),
    "num_hit_tokens": pa.int32(),
    "num_output_tokens": pa.int32(),
    "num_late_tokens": pa.int32(),
    "num_preemptions": pa.int32(),
    "is_finished": pa.bool_(),
}
"""One row per request, in the order in which they ended; those that had not come last. `number` is
the call's place in the trace, or the row of `job` (null for online calls). Instants are null where
they did not happen. Late tokens came after arrival + TTFT + i * TPOT of the promises."""

STEPS = {
    "engine": pa.int16(),
    "start_s": pa.float64(),
    "duration_s": pa.float64(),
    "num_online_requests": pa.int32(),
    "num_offline_requests": pa.int32(),
    "num_online_tokens": pa.int32(),
    "num_offline_tokens": pa.int32(),
}
"""One row per step that computed anything."""

SECONDS = {
    "engine": pa.int16(),
    "at_s": pa.float64(),
    "online_arrivals": pa.int32(),
    "online_active": pa.int32(),
    "offline_active": pa.int32(),
    "online_waiting": pa.int32(),
    "offline_waiting": pa.int32(),
    "online_running_blocks": pa.int32(),
    "offline_running_blocks": pa.int32(),
    "online_cached_blocks": pa.int32(),
    "offline_cached_blocks": pa.int32(),
    "forecast_blocks": pa.int32(),
    "offline_prompt_tokens": pa.int64(),
    "offline_hit_tokens": pa.int64(),
    "offline_computed_tokens": pa.int64(),
}
"""One row per engine and second. Blocks by class as in Echo's figure 10, the cached ones every ten
seconds (else null); `forecast_blocks` is what
the scheduler expects online requests to want (null without a forecast). The last three and
`online_arrivals` are sums since the row before."""

TABLES = {"requests": REQUESTS, "steps": STEPS, "seconds": SECONDS}


class Table:
    """One file that grows; at most `ROWS_PER_GROUP` rows are held in memory."""

    def __init__(self, path: Path, columns: Mapping[str, pa.DataType]) -> None:
        """Raises DataError when the file cannot be made."""
        self._schema = pa.schema(list(columns.items()))
        self._rows: list[tuple[object, ...]] = []
        try:
            self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")
        except OSError as error:
            raise DataError(f"{path}: cannot be written: {error.strerror or error}") from error

    def add(self, *row: object) -> None:
        """One row, its values in the order of the columns."""
        self._rows.append(row)
        if len(self._rows) >= ROWS_PER_GROUP:
            self._flush()

    def close(self) -> None:
        """Write what is left, and the footer."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            columns = zip(*self._rows, strict=True)
            arrays = [
                pa.array(values, field.type)
                for values, field in zip(columns, self._schema, strict=True)
            ]
            self._writer.write_table(pa.table(arrays, schema=self._schema))
            self._rows = []


class Tables(AbstractContextManager["Tables"]):
    """The three files of a simulation in `folder`; closed at the end of the context."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder. Raises DataError when that cannot be done."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{folder}: cannot be made: {error.strerror}") from error
        made = {name: Table(folder / f"{name}.parquet", cols) for name, cols in TABLES.items()}
        self.requests, self.steps, self.seconds = made["requests"], made["steps"], made["seconds"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for table in (self.requests, self.steps, self.seconds):
            table.close()
