"""Turn the files of the real data sets into the schema of the generated samples."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from batchrun.datasets.loogle_import import read_loogle
from batchrun.datasets.nextqa_import import read_nextqa
from batchrun.datasets.schemas import schema_of
from batchrun.datasets.toolbench_import import read_toolbench
from batchrun.datasets.writer import ProgressReport, Row, WrittenDataset, write_rows
from batchrun.errors import InputError
from batchrun.types import ProgressSink

DEFAULT_VIDEO_TOKENS = 512


def import_dataset(
    name: str,
    source: Path,
    target: Path,
    *,
    limit: int | None = None,
    video_tokens: int = DEFAULT_VIDEO_TOKENS,
    progress: ProgressSink | None = None,
) -> WrittenDataset:
    """Write the real data set `name`, found in the folder `source`, to the Parquet file `target`.

    `source` is a checkout of the data set's home repository or a folder with its files, plain or
    gzip-compressed. `limit` keeps the first rows only. `video_tokens` is the length of a long
    video's stand-in (NExT-QA only). Raises DataError, with file and line, for a folder or record
    that is not as expected, and InputError for other bad arguments.
    """
    schema = schema_of(name)
    if limit is not None and limit < 1:
        raise InputError(f"limit: {limit} is not a number of rows; give 1 or more")
    if video_tokens < 1:
        raise InputError(f"video_tokens: {video_tokens} is not a length; give 1 or more")
    rows = islice(_rows(name, source, video_tokens), limit)
    return write_rows(target, schema, rows, report=ProgressReport(progress))


def _rows(name: str, source: Path, video_tokens: int) -> Iterator[Row]:
    if name == "loogle":
        return read_loogle(source)
    if name == "toolbench":
        return read_toolbench(source)
    return read_nextqa(source, video_tokens=video_tokens)
