"""Whatever the rows, the order and the sizes: planned rows are the rows of the input."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from batchrun.jobs.inputs.input_data import open_input
from batchrun.jobs.inputs.rows import Row
from batchrun.jobs.inputs.spool import KeptCopy, PlannedRows, SpoolSizes, count_loads
from batchrun.jobs.spec import InputSpec

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=60)
ROWS = st.lists(
    st.fixed_dictionaries({
        "n": st.none() | st.integers(-(2**31), 2**31),
        "text": st.none() | TEXT,
        "tags": st.none() | st.lists(st.none() | TEXT, max_size=3),
        "body": st.fixed_dictionaries({"a": st.none() | st.booleans()}),
    }),
    min_size=1,
    max_size=10,
).map(lambda kinds: [{"row": row, **kinds[row % len(kinds)]} for row in range(90)])
"""Enough rows in each row group that a shuffled order is worth a copy."""
SIZES = st.builds(
    SpoolSizes,
    buffer_bytes=st.integers(1, 30_000),
    piece_bytes=st.integers(1, 3_000),
    cache_bytes=st.integers(1, 200),
)
TYPES = pa.schema([
    ("row", pa.int32()),
    ("n", pa.int64()),
    ("text", pa.string()),
    ("tags", pa.list_(pa.string())),
    ("body", pa.struct([("a", pa.bool_())])),
])


def write_rows(path: Path, rows: list[Row], *, group_rows: int) -> None:
    if path.suffix == ".parquet":
        table = pa.Table.from_pylist(rows, schema=TYPES)
        pq.write_table(table, path, row_group_size=group_rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("suffixes", [(".parquet",), (".jsonl",), (".parquet",) * 2 + (".jsonl",)])
@settings(max_examples=20, deadline=None)
@given(rows=ROWS, sizes=SIZES, group_rows=st.integers(4, 20), seed=st.integers(0, 2**32 - 1))
def test_planned_rows_are_the_rows_of_the_input(
    suffixes: tuple[str, ...], rows: list[Row], sizes: SpoolSizes, group_rows: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{index}{suffix}") for index, suffix in enumerate(suffixes)]
        for path in paths:
            write_rows(path, rows, group_rows=group_rows)
        with open_input(InputSpec(path=tuple(map(str, paths)))) as data:
            order = rng.permutation(data.num_rows)
            columns = rng.permutation(list(data.columns)).tolist()
            copy = KeptCopy(Path(folder, "job_1.rows"), source=b"")
            planned = PlannedRows(data, columns, order, copy, sizes=sizes)
            event(f"copied: {planned.spool_bytes is not None}")
            asked = [order, rng.permutation(data.num_rows), rng.integers(data.num_rows, size=20)]
            for part in [part for wanted in asked for part in np.array_split(wanted, 4)]:
                found = planned.read_rows(part.tolist())
                assert repr(found) == repr(data.read_rows(part.tolist(), columns))
            planned.close()


@settings(max_examples=200, deadline=None)
@given(chunks=st.lists(st.integers(0, 9), max_size=80), capacity=st.integers(1, 12))
def test_a_chunk_is_loaded_when_too_many_others_came_since(
    chunks: list[int], capacity: int
) -> None:
    num_loads = 0
    for index, chunk in enumerate(chunks):
        before = chunks[:index]
        since = before[::-1].index(chunk) if chunk in before else None
        num_loads += since is None or len(set(before[index - since :])) >= capacity
    assert count_loads(np.array(chunks, dtype=np.int64), capacity, limit=100) == num_loads
