"""Random access to rows that lie in chunks, with a small cache of decoded chunks."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from batchrun.errors import DataError
from batchrun.inputs.base import Row
from batchrun.inputs.native import native_rows

CACHE_BYTES = 64 << 20


class ChunkReader:
    """Rows by number out of chunks of known sizes; `read_chunk` decodes one of them."""

    def __init__(
        self,
        chunk_rows: Sequence[int],
        read_chunk: Callable[[int], pa.RecordBatch],
        *,
        close: Callable[[], None],
    ) -> None:
        self._starts = np.concatenate([[0], np.cumsum(chunk_rows, dtype=np.int64)])
        self._read_chunk = read_chunk
        self._cache: OrderedDict[int, pa.RecordBatch] = OrderedDict()
        self.close = close

    def read(self, rows: Sequence[int]) -> list[Row]:
        """The rows in the order asked for; each chunk is decoded once."""
        wanted = np.asarray(rows, dtype=np.int64)
        chunks = np.searchsorted(self._starts, wanted, side="right") - 1
        found: dict[int, Row] = {}
        for position in np.argsort(chunks, kind="stable").tolist():
            chunk = int(chunks[position])
            offset = int(wanted[position] - self._starts[chunk])
            found[position] = native_rows(self._chunk(chunk).slice(offset, 1))[0]
        return [found[position] for position in range(len(rows))]

    def _chunk(self, chunk: int) -> pa.RecordBatch:
        if chunk in self._cache:
            self._cache.move_to_end(chunk)
            return self._cache[chunk]
        batch = self._read_chunk(chunk)
        self._cache[chunk] = batch
        while len(self._cache) > 1 and sum(b.nbytes for b in self._cache.values()) > CACHE_BYTES:
            self._cache.popitem(last=False)
        return batch


def scratch_chunks(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, *, folder: Path | None, label: str
) -> ChunkReader:
    """A reader over a compressed scratch copy of `batches`, in an unlinked file in `folder`.

    Raises DataError naming `label` when there is no room for it.
    """
    file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - open as long as its reader
    sizes: list[int] = []
    try:
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_file(file, schema, options=options) as writer:
            for batch in batches:
                writer.write_batch(batch)
                sizes.append(batch.num_rows)
    except OSError as failure:
        file.close()
        reason = failure.strerror or str(failure)
        raise DataError(f"{label}: no scratch copy for random access: {reason}") from None
    file.seek(0)
    reader = pa.ipc.open_file(file)
    return ChunkReader(sizes, reader.get_batch, close=file.close)
