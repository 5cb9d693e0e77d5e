"""Rows come back in the planned order, from the input or from a copy in that order."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from file_calls import largest_file_bytes

from batchrun.errors import DataError
from batchrun.jobs.inputs.input_data import InputData, open_input
from batchrun.jobs.inputs.rows import Row
from batchrun.jobs.inputs.spool import KeptCopy, PlannedRows, SpoolSizes, count_loads, write_spool
from batchrun.jobs.spec import InputSpec
from batchrun.pool.prefix_keys import IntArray
from batchrun.types import ProgressSink

TINY = SpoolSizes(buffer_bytes=20_000, piece_bytes=1_000, cache_bytes=4_000)


def write_parquet(path: Path, num_rows: int = 400) -> Path:
    texts = [f"{row} " + "x" * 100 for row in range(num_rows)]
    pq.write_table(pa.table({"n": range(num_rows), "text": texts}), path, row_group_size=20)
    return path


def open_path(path: Path | str) -> InputData:
    return open_input(InputSpec(path=(str(path),)))


def shuffled(num_rows: int) -> IntArray:
    return np.random.default_rng(1).permutation(num_rows)


def planned_rows(
    data: InputData,
    columns: Sequence[str],
    order: IntArray,
    folder: Path,
    *,
    sizes: SpoolSizes = TINY,
    source: bytes = b"",
    progress: ProgressSink | None = None,
) -> PlannedRows:
    copy = KeptCopy(folder / "job_1.rows", source)
    return PlannedRows(data, columns, order, copy, sizes=sizes, progress=progress)


def read_planned(data: InputData, order: IntArray, rows: Sequence[int], folder: Path) -> list[Row]:
    """The rows, 16 at a time, through a copy."""
    with closing(planned_rows(data, data.columns, order, folder)) as planned:
        assert planned.spool_bytes
        parts = [planned.read_rows(rows[i : i + 16]) for i in range(0, len(rows), 16)]
    return [row for part in parts for row in part]


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


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
        closing(planned_rows(data, ["n"], order, tmp_path / "gone", sizes=sizes)) as planned,
    ):
        assert planned.read_rows([17, 3, 399]) == [{"n": 17}, {"n": 3}, {"n": 399}]
        assert planned.spool_bytes is None


def test_rows_of_an_input_that_is_written_to_are_not_read_from_its_copy(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet")
    with (
        open_path(path) as data,
        closing(planned_rows(data, ["n"], shuffled(400), tmp_path)) as planned,
    ):
        assert planned.spool_bytes and planned.read_rows([5]) == [{"n": 5}]
        write_parquet(path, 401)
        with pytest.raises(DataError, match=r"a\.parquet: was written to while it is read"):
            planned.read_rows([7])


def test_text_files_are_read_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"n": [{row}]}}\n' for row in range(400)))
    with (
        open_path(tmp_path / "a.jsonl") as data,
        closing(planned_rows(data, ["n"], shuffled(400), tmp_path)) as planned,
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
        planned = planned_rows(data, (), shuffled(data.num_rows), tmp_path)
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


def laid_out(data: InputData, order: IntArray, folder: Path, source: bytes = b"") -> bool:
    """Whether the rows were copied anew; they are right, and nothing stays open."""
    stages: list[str] = []
    num_before = num_open_files()
    planned = planned_rows(
        data, ["n"], order, folder, source=source, progress=lambda stage, *_: stages.append(stage)
    )
    with closing(planned):
        assert planned.read_rows([17, 3, 399]) == [{"n": 17}, {"n": 3}, {"n": 399}]
    assert num_open_files() == num_before
    return bool(stages)


def test_a_copy_serves_whoever_reads_the_same_rows_again(tmp_path: Path) -> None:
    order, scratch = shuffled(400), tmp_path / "scratch"
    scratch.mkdir()
    with open_path(write_parquet(tmp_path / "a.parquet")) as data:
        assert laid_out(data, order, scratch)
        assert not laid_out(data, order, scratch)
        assert laid_out(data, order, scratch, source=b"another input")
        assert laid_out(data, order[::-1], scratch, source=b"another input")
        assert not laid_out(data, order[::-1], scratch, source=b"another input")
    (copy,) = scratch.iterdir()
    assert copy.stat().st_mode & 0o077 == 0


def test_a_copy_that_nobody_needs_any_more_goes(tmp_path: Path) -> None:
    with open_path(write_parquet(tmp_path / "a.parquet")) as data:
        assert laid_out(data, shuffled(400), tmp_path)
        assert not laid_out(data, np.arange(400), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


@pytest.mark.parametrize("num_left", [0, 1, 40, -1, -41, -4_000])
def test_a_copy_that_is_not_whole_is_made_anew(tmp_path: Path, num_left: int) -> None:
    order, copy = shuffled(400), tmp_path / "job_1.rows"
    with open_path(write_parquet(tmp_path / "a.parquet")) as data:
        laid_out(data, order, tmp_path)
        content = copy.read_bytes()
        copy.write_bytes(content[:num_left])
        assert laid_out(data, order, tmp_path)
        assert copy.read_bytes() == content


@pytest.mark.parametrize("place", [-1, -20, -30, -60, -1_000])
def test_a_copy_with_a_damaged_index_is_made_anew(tmp_path: Path, place: int) -> None:
    order, copy = shuffled(400), tmp_path / "job_1.rows"
    with open_path(write_parquet(tmp_path / "a.parquet")) as data:
        laid_out(data, order, tmp_path)
        damaged = bytearray(copy.read_bytes())
        damaged[place] ^= 0xFF
        copy.write_bytes(damaged)
        assert laid_out(data, order, tmp_path)


def test_a_value_that_can_be_loaded_no_more_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a time of a zone is, once the files of the zones have gone."""
    table = pa.table({"n": pa.array(map(decimal.Decimal, range(400)), pa.decimal128(9, 2))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=20)
    with (
        open_path(tmp_path / "a.parquet") as data,
        closing(planned_rows(data, ["n"], shuffled(400), tmp_path)) as planned,
    ):
        monkeypatch.delattr(decimal, "Decimal")
        with pytest.raises(DataError, match=r"job_1\.rows, .* is damaged: .*'Decimal'"):
            planned.read_rows([1])
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


def test_a_copy_that_others_may_write_is_not_read(tmp_path: Path) -> None:
    order = shuffled(400)
    with open_path(write_parquet(tmp_path / "a.parquet")) as data:
        laid_out(data, order, tmp_path)
        (tmp_path / "job_1.rows").chmod(0o620)
        assert laid_out(data, order, tmp_path)


def test_a_damaged_piece_is_one_line_and_the_next_copy_is_whole(tmp_path: Path) -> None:
    order, copy = shuffled(400), tmp_path / "job_1.rows"
    with open_path(write_parquet(tmp_path / "a.parquet")) as data:
        laid_out(data, order, tmp_path)
        with copy.open("r+b") as file:
            file.write(b"\0" * 2_000)
        with (
            closing(planned_rows(data, ["n"], order, tmp_path)) as planned,
            pytest.raises(DataError, match=r"a\.parquet: its copy .*/job_1\.rows, .* is damaged: "),
        ):
            planned.read_rows(range(400))
        assert laid_out(data, order, tmp_path)


def test_no_room_for_the_copy_is_one_line_and_leaves_nothing_open(tmp_path: Path) -> None:
    with open_path(write_parquet(tmp_path / "a.parquet")) as data:
        num_before = num_open_files()
        with largest_file_bytes(1_000), pytest.raises(DataError) as caught:
            planned_rows(data, ["text"], shuffled(400), tmp_path)
        assert num_open_files() == num_before
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]
    place = f"{tmp_path / 'a.parquet'}: no copy of its rows in {tmp_path}"
    assert str(caught.value) == f"{place}: File too large"


def test_a_scratch_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    for name in "ab":
        write_parquet(tmp_path / f"{name}.parquet")
    with (
        open_path(tmp_path / "*.parquet") as data,
        pytest.raises(DataError, match=r"a\.parquet and 1 more: no copy .*/gone: No such file"),
    ):
        planned_rows(data, ["text"], shuffled(800), tmp_path / "gone")


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
        planned_rows(data, ["n", "text"], order, tmp_path, progress=note).close()
    assert calls[-1] == ("laying rows out", 400, 400)
    assert [done for _, done, _ in calls] == sorted({done for _, done, _ in calls})


@pytest.mark.parametrize("order", [np.arange(400), shuffled(400)], ids=["in order", "shuffled"])
def test_no_more_stays_in_memory_than_was_allowed(tmp_path: Path, order: IntArray) -> None:
    texts = ["x" * (10 if place < 300 else 2_000) for place in range(400)]
    rows = ((place, (texts[place],)) for place in shuffled(400).tolist())
    spool = write_spool(tmp_path / "job_1.rows", bytes(16), rows, 400, sizes=TINY)
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
