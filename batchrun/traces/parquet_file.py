"""Our own trace files: Parquet with a version, so that a later batchrun can tell them apart."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.errors import DataError
from batchrun.files import write_atomically
from batchrun.traces.trace import PrefixBlocks, Trace

FORMAT_VERSION = 1
METADATA_KEY = b"batchrun.trace"
BLOCKS = "prefix_blocks"
COLUMNS = {
    "arrival_s": pa.float64(),
    "num_prompt_tokens": pa.int64(),
    "num_output_tokens": pa.int64(),
}


def save_trace(trace: Trace, path: Path) -> None:
    """Write the trace; the file is wholly there or not at all. Raises DataError."""
    about: dict[str, object] = {
        "version": FORMAT_VERSION,
        "duration_s": trace.duration_s,
        "source": trace.source,
    }
    columns = {name: pa.array(getattr(trace, name), kind) for name, kind in COLUMNS.items()}
    if trace.prefix is not None:
        about["block_tokens"] = trace.prefix.block_tokens
        columns[BLOCKS] = pa.LargeListArray.from_arrays(
            pa.array(trace.prefix.offsets), pa.array(trace.prefix.hashes)
        )
    table = pa.table(columns).replace_schema_metadata({METADATA_KEY: json.dumps(about)})
    content = io.BytesIO()
    pq.write_table(table, content, compression="zstd")
    try:
        write_atomically(path, content.getvalue())
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from error


def load_parquet(path: Path) -> Trace:
    """A trace that `save_trace` wrote. Raises DataError."""
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot read the trace: {_first_line(error)}") from error
    about = _about(path, table.schema.metadata or {})
    for name, kind in COLUMNS.items():
        if name not in table.column_names or table.schema.field(name).type != kind:
            raise DataError(f"{path}: no column {name} of type {kind}")
        if table[name].null_count:
            raise DataError(f"{path}: column {name} has empty values")
    # Copies, because the table's memory is read only and a trace owns its arrays.
    values = {name: np.array(table[name].to_numpy()) for name in COLUMNS}
    try:
        return Trace(
            **values,
            duration_s=float(str(about["duration_s"])),
            prefix=_prefix(table, about),
            source=str(about["source"]),
        )
    except (KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a whole trace of batchrun: {_first_line(error)}") from error
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _about(path: Path, metadata: dict[bytes, bytes]) -> dict[str, object]:
    if METADATA_KEY not in metadata:
        raise DataError(
            f"{path}: Parquet, but no trace of batchrun; `batchrun trace convert` makes one from "
            "the formats that docs/traces.md names"
        )
    about: dict[str, object] = json.loads(metadata[METADATA_KEY])
    if about.get("version") != FORMAT_VERSION:
        raise DataError(
            f"{path}: a trace of version {about.get('version')}; this batchrun reads version "
            f"{FORMAT_VERSION}"
        )
    return about


def _prefix(table: pa.Table, about: dict[str, object]) -> PrefixBlocks | None:
    if BLOCKS not in table.column_names:
        return None
    blocks = table[BLOCKS].combine_chunks()
    offsets = np.zeros(len(blocks) + 1, np.int64)
    np.cumsum(blocks.value_lengths().to_numpy(zero_copy_only=False), out=offsets[1:])
    hashes = np.array(blocks.flatten().to_numpy(), np.int64)
    return PrefixBlocks(hashes, offsets, int(str(about["block_tokens"])))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
