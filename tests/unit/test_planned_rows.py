"""Rows come back in the planned order, from the input or from a copy in that order."""

from __future__ import annotations

import datetime
import decimal
import resource
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.errors import DataError
from batchrun.jobs.inputs.input_data import InputData, open_input
from batchrun.jobs.inputs.rows import Row
from batchrun.jobs.inputs.spool import PlannedRows, RowSpool, SpoolSizes, count_loads
from batchrun.jobs.spec import InputSpec
from batchrun.pool.prefix_keys import IntArray

TINY = SpoolSizes(buffer_bytes=20_000, piece_bytes=1_000, cache_bytes=4_000)


def write_parquet(path: Path, num_rows: int = 400) -> Path:
    texts = [f"{row} " + "x" * 100 for row in range(num_rows)]
    pq.write_table(pa.table({"n": range(num_rows), "text": texts}), path, row_group_size=20)
    return path


def open_path(path: Path | str) -> InputData:
    return open_input(InputSpec(path=(str(path),)))


def shuffled(num_rows: int) -> IntArray:
    return np.random.default_rng(1).permutation(num_rows)


def read_planned(data: InputData, order: IntArray, rows: Sequence[int], folder: Path) -> list[Row]:
    """The rows, 16 at a time, through a copy."""
    with closing(PlannedRows(data, data.columns, order, scratch=folder, sizes=TINY)) as planned:
        assert planned.spool_bytes
        parts = [planned.read_rows(rows[i : i + 16]) for i in range(0, len(rows), 16)]
    return [row for part in parts for row in part]


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def largest_file_bytes(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_shuffled_order_is_read_from_a_copy(tmp_path: Path) -> None:
    order = shuffled(400)
    with open_path(write_parquet(tmp_path / "a.parquet")) as data:
        found = read_planned(data, order, order.tolist(), tmp_path)
    assert [row["n"] for row in found] == order.tolist()
    assert {str(row["text"]) for row in found} == {f"{n} " + "x" * 100 for n in range(400)}


@pytest.mark.parametrize(
    ("order", "sizes"),
    [(np.arange(400), TINY), (shuffled(400), SpoolSizes())],
    ids=["in the order of the file", "fits into the cache"],
)
def test_what_the_cache_serves_well_is_read_from_the_input(
    tmp_path: Path, order: IntArray, sizes: SpoolSizes
) -> None:
    with (
        open_path(write_parquet(tmp_path / "a.parquet")) as data,
        closing(PlannedRows(data, ["n"], order, scratch=tmp_path / "gone", sizes=sizes)) as planned,
    ):
        assert planned.read_rows([17, 3, 399]) == [{"n": 17}, {"n": 3}, {"n": 399}]
        assert planned.spool_bytes is None


def test_text_files_are_read_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"n": [{row}]}}\n' for row in range(400)))
    with (
        open_path(tmp_path / "a.jsonl") as data,
        closing(PlannedRows(data, ["n"], shuffled(400), scratch=None, sizes=TINY)) as planned,
    ):
        assert planned.read_rows([7, 3]) == [{"n": [7]}, {"n": [3]}]
        assert planned.spool_bytes is None


def test_many_files_are_copied_in_any_order_as_each_would_keep_a_cache(tmp_path: Path) -> None:
    for number in range(9):
        write_parquet(tmp_path / f"{number}.parquet", num_rows=50)
    with open_path(tmp_path / "*.parquet") as data:
        found = read_planned(data, np.arange(450), range(450), tmp_path)
        assert found == data.read_rows(range(450))


@pytest.mark.parametrize("row", [-1, 400])
def test_a_row_that_is_not_there_is_an_index_error(tmp_path: Path, row: int) -> None:
    with (
        open_path(write_parquet(tmp_path / "a.parquet")) as data,
        pytest.raises(IndexError, match="rows must lie within 0 and 399"),
    ):
        read_planned(data, shuffled(400), [0, row], tmp_path)


@pytest.mark.parametrize("name", ["a.parquet", "a.csv", "a.jsonl"])
def test_without_columns_rows_are_empty(tmp_path: Path, name: str) -> None:
    write_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("n\n1\n2\n")
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    with open_path(tmp_path / name) as data:
        planned = PlannedRows(data, (), shuffled(data.num_rows), scratch=tmp_path, sizes=TINY)
        assert planned.read_rows([1, 0]) == [{}, {}]


def table_of_all_types(rows: range) -> pa.Table:
    words = pa.array([f"w{row}" for row in rows]).dictionary_encode()
    columns = {
        "words": words,
        "words_list": pa.ListArray.from_arrays(list(range(len(rows) + 1)), words),
        "list": [[row, None] if row % 3 else None for row in rows],
        "struct": [{"a": [str(row)], "b": row if row % 2 else None} for row in rows],
        "binary": [bytes([row]) * 50 for row in rows],
        "decimal": pa.array([decimal.Decimal(row) for row in rows], pa.decimal128(9, 2)),
        "time": pa.array(np.array(rows) * 10**9, type=pa.timestamp("ns", "UTC")),
        "date": [datetime.date(2024, 1, 1 + row % 31) for row in rows],
        "null": pa.nulls(len(rows)),
    }
    return pa.table(columns)


def test_values_of_every_type_come_back_native(tmp_path: Path) -> None:
    groups = [table_of_all_types(range(first, first + 10)) for first in range(0, 200, 10)]
    with pq.ParquetWriter(tmp_path / "a.parquet", groups[0].schema) as writer:
        for group in groups:
            writer.write_table(group)
    with open_path(tmp_path / "a.parquet") as data:
        found = read_planned(data, shuffled(200), range(200), tmp_path)
        assert list(map(repr, found)) == list(map(repr, data.read_rows(range(200))))


def test_rows_keep_the_types_of_their_own_file(tmp_path: Path) -> None:
    for name, kind in [("a", pa.int32()), ("b", pa.float64()), ("c", pa.int32())]:
        table = pa.table({"n": pa.array(range(100), type=kind), "text": ["x" * 100] * 100})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=10)
    with open_path(tmp_path / "*.parquet") as data:
        found = read_planned(data, shuffled(300), [7, 107, 207, 108], tmp_path)
    assert [repr(row["n"]) for row in found] == ["7", "7.0", "7", "8.0"]


def test_the_copy_has_no_name_on_disk(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with open_path(write_parquet(tmp_path / "a.parquet")) as data:
        num_before = num_open_files()
        with closing(
            PlannedRows(data, ["text"], shuffled(400), scratch=scratch, sizes=TINY)
        ) as planned:
            planned.read_rows(range(400))
            assert planned.spool_bytes
            assert list(scratch.iterdir()) == []
        assert num_open_files() == num_before


def test_no_room_for_the_copy_is_one_line_and_leaves_nothing_open(tmp_path: Path) -> None:
    with open_path(write_parquet(tmp_path / "a.parquet")) as data:
        num_before = num_open_files()
        with largest_file_bytes(1_000), pytest.raises(DataError) as caught:
            PlannedRows(data, ["text"], shuffled(400), scratch=tmp_path, sizes=TINY)
        assert num_open_files() == num_before
    place = f"{tmp_path / 'a.parquet'}: no copy of its rows in {tmp_path}"
    assert str(caught.value) == f"{place}: File too large"


def test_a_scratch_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    for name in "ab":
        write_parquet(tmp_path / f"{name}.parquet")
    with (
        open_path(tmp_path / "*.parquet") as data,
        pytest.raises(DataError, match=r"a\.parquet and 1 more: no copy .*/gone: No such file"),
    ):
        PlannedRows(data, ["text"], shuffled(800), scratch=tmp_path / "gone", sizes=TINY)


def test_text_that_is_not_utf8_is_known_when_it_is_used(tmp_path: Path) -> None:
    texts = pa.array([b"x" * 100, b"\xff" * 100] * 200).view(pa.string())
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=20)
    with open_path(tmp_path / "a.parquet") as data:
        good, bad = read_planned(data, shuffled(400), [0, 1], tmp_path)

    assert good["text"] == "x" * 100
    with pytest.raises(ValueError, match="column 'text' is not valid UTF-8"):
        str(bad["text"])


def test_progress_runs_to_the_last_row(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []

    def note(stage: str, done: int, total: int) -> None:
        calls.append((stage, done, total))

    order = shuffled(400)
    with open_path(write_parquet(tmp_path / "a.parquet")) as data:
        PlannedRows(data, ["n", "text"], order, scratch=None, sizes=TINY, progress=note).close()
    assert calls[-1] == ("laying rows out", 400, 400)
    assert [done for _, done, _ in calls] == sorted({done for _, done, _ in calls})


@pytest.mark.parametrize("order", [np.arange(400), shuffled(400)], ids=["in order", "shuffled"])
def test_no_more_stays_in_memory_than_was_allowed(tmp_path: Path, order: IntArray) -> None:
    texts = ["x" * (10 if place < 300 else 2_000) for place in range(400)]
    rows = ((place, (texts[place],)) for place in shuffled(400).tolist())
    spool = RowSpool(rows, 400, sizes=TINY, folder=tmp_path)
    most = 0
    for part in np.array_split(order, 25):
        assert spool.read(part) == [(texts[place],) for place in part.tolist()]
        most = max(most, spool.cached_bytes)
    spool.close()
    assert TINY.cache_bytes / 2 < most <= TINY.cache_bytes


@pytest.mark.parametrize(
    ("chunks", "capacity", "num_loads"),
    [
        ([0, 0, 1, 1, 2], 1, 3),
        ([0, 1, 0, 1, 0], 1, 5),
        ([0, 1, 0, 1, 0], 2, 2),
        ([0, 1, 2, 0, 1, 2], 2, 6),
        ([0, 1, 0, 2, 0, 1], 2, 4),
        ([], 2, 0),
    ],
)
def test_loads_are_those_of_a_cache_of_the_chunks_used_last(
    chunks: list[int], capacity: int, num_loads: int
) -> None:
    assert count_loads(np.array(chunks, dtype=np.int64), capacity, limit=100) == num_loads
