"""Every format gives the same rows, in order and at random."""

from __future__ import annotations

import contextlib
import csv
import datetime
import gzip
import json
import os
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from batchrun.jobs.inputs.input_data import InputData, open_input
from batchrun.jobs.inputs.parquet import SMALL_GROUP_BYTES, ParquetInput
from batchrun.jobs.inputs.rows import BATCH_BYTES, Row
from batchrun.jobs.spec import InputSpec

ROWS: list[Row] = [
    {"id": f"r{i}", "text": f'line {i}\nwith "quotes", and more', "group": f"g{i % 3}"}
    for i in range(250)
]
NAMES = ["a.parquet", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.csv"]


def jsonl_bytes(rows: list[Row]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write_rows(path: Path, rows: list[Row]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=60)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        plain = jsonl_bytes(rows)
        packed = {".gz": gzip.compress(plain), ".zst": zstandard.compress(plain)}
        path.write_bytes(packed.get(path.suffix, plain))
    return path


def open_path(path: Path | str, **options: object) -> InputData:
    return open_input(InputSpec.model_validate({"path": str(path), **options}))


@pytest.mark.parametrize("name", NAMES)
def test_rows_come_in_order_with_their_numbers(tmp_path: Path, name: str) -> None:
    with open_path(write_rows(tmp_path / name, ROWS)) as data:
        assert (data.num_rows, data.columns) == (250, ("id", "text", "group"))
        found = [(first, row) for first, rows in data.iter_rows(max_bytes=2000) for row in rows]
        firsts = sorted({first for first, _ in found})
    assert [row for _, row in found] == ROWS
    assert len(firsts) > 5
    assert firsts[0] == 0


@pytest.mark.parametrize("name", NAMES)
def test_random_access_gives_rows_in_the_order_asked(tmp_path: Path, name: str) -> None:
    wanted = [249, 0, 61, 61, 120]
    with open_path(write_rows(tmp_path / name, ROWS)) as data:
        found = data.read_rows(wanted, ["text"])
        assert data.read_rows([], ["text"]) == []
    assert found == [{"text": ROWS[row]["text"]} for row in wanted]


@pytest.mark.parametrize("name", NAMES)
def test_batches_hold_the_chosen_columns(tmp_path: Path, name: str) -> None:
    with open_path(write_rows(tmp_path / name, ROWS)) as data:
        batches = [batch for _, batch in data.iter_batches(["group", "id"], max_bytes=2000)]
        bare = sum(batch.num_rows for _, batch in data.iter_batches([]))
    table = pa.Table.from_batches(batches)
    assert table.column_names == ["group", "id"]
    assert table.column("id").to_pylist() == [row["id"] for row in ROWS]
    assert bare == 250


def test_files_of_a_glob_are_one_input_in_sorted_order(tmp_path: Path) -> None:
    write_rows(tmp_path / "b.jsonl", ROWS[100:])
    write_rows(tmp_path / "a.jsonl", ROWS[:100])
    with open_path(tmp_path / "*.jsonl") as data:
        assert data.read_rows([0, 100, 99, 249]) == [ROWS[i] for i in (0, 100, 99, 249)]
        assert [(path.name, first, last) for path, first, last in data.places()] == [
            ("a.jsonl", 0, 100),
            ("b.jsonl", 100, 250),
        ]


def test_a_list_of_paths_keeps_its_order(tmp_path: Path) -> None:
    paths = [write_rows(tmp_path / "b.csv", ROWS[:2]), write_rows(tmp_path / "a.csv", ROWS[2:5])]
    with open_input(InputSpec(path=tuple(map(str, paths)))) as data:
        assert data.read_rows(range(5)) == ROWS[:5]


def test_a_path_with_glob_characters_is_taken_literally_when_it_exists(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a[1].jsonl", ROWS)
    with open_path(path) as data:
        assert data.num_rows == 250


def test_large_row_groups_are_read_through_a_scratch_copy(tmp_path: Path) -> None:
    document = "x" * 1_000_000
    table = pa.table({"n": list(range(60)), "document": [f"{i}{document}" for i in range(60)]})
    pq.write_table(table, tmp_path / "a.parquet")
    with open_path(tmp_path / "a.parquet") as data:
        rows = data.read_rows([59, 0, 30])
        batches = [batch for _, batch in data.iter_batches(max_bytes=4 << 20)]
    assert [row["n"] for row in rows] == [59, 0, 30]
    assert str(rows[0]["document"]).startswith("59x")
    assert max(batch.nbytes for batch in batches) < 6 << 20


def test_repeated_long_values_do_not_make_large_batches(tmp_path: Path) -> None:
    table = pa.table({"document": ["x" * 100_000] * 2000})
    pq.write_table(table, tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 1 << 20
    with open_path(tmp_path / "a.parquet") as data:
        largest = max(batch.nbytes for _, batch in data.iter_batches())
    assert largest < 10 << 20


DOCUMENT = "x" * 100_000


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("a", DOCUMENT),
        (b"a", DOCUMENT.encode()),
        (None, DOCUMENT),
        ([], ["x" * 100] * 1_000),
        ([{"role": "user", "content": "a"}], [{"role": "user", "content": DOCUMENT}]),
    ],
)
def test_long_values_that_repeat_after_short_ones_do_not_make_large_batches(
    tmp_path: Path, short: object, long: object
) -> None:
    path, values = tmp_path / "a.parquet", [short] * 1_500 + [long] * 1_000
    table = pa.table({"n": range(2_500), "a.document": values})
    pq.write_table(table, path)
    with open_path(path) as data:
        ((chunk,),) = data.chunk_sizes(["a.document"])
        sizes = [(batch.num_rows, batch.nbytes) for _, batch in data.iter_batches(["a.document"])]
        assert data.read_rows([2_000, 3], ["n"]) == [{"n": 2_000}, {"n": 3}]
        assert data.read_rows([3, 2_499], ["a.document"]) == [
            {"a.document": short},
            {"a.document": long},
        ]
    assert sum(num_rows for num_rows, _ in sizes) == 2_500
    assert max(num_bytes for _, num_bytes in sizes) < 20 << 20
    assert chunk[1] > sum(num_bytes for _, num_bytes in sizes) / 2


def test_categories_are_as_large_as_the_text_that_they_stand_for(tmp_path: Path) -> None:
    texts = [*map(str, range(16)), *(str(i) + "x" * 200_000 for i in range(350))]
    rows = [*range(366), *[365] * 350]
    column = pa.DictionaryArray.from_arrays(pa.array(rows), pa.array(texts))
    pq.write_table(pa.table({"document": column}), tmp_path / "a.parquet")
    with open_path(tmp_path / "a.parquet") as data:
        sizes = [(batch.num_rows, batch.nbytes) for _, batch in data.iter_batches()]
        assert data.read_rows([700, 3]) == [{"document": texts[365]}, {"document": "3"}]
    assert sum(num_rows for num_rows, _ in sizes) == len(rows)
    assert max(num_bytes for _, num_bytes in sizes) < 10 << 20


@pytest.mark.parametrize(("num_long", "long_bytes"), [(1, 2_000_000), (1_000, 25_000)])
def test_a_group_with_a_few_long_rows_is_decoded_once_for_random_access(
    tmp_path: Path, num_long: int, long_bytes: int
) -> None:
    path, long = tmp_path / "a.parquet", "x" * long_bytes
    texts = ["a"] * 30_000 + [long] * num_long + ["b"] * 9_000
    pq.write_table(pa.table({"document": texts}), path)
    with contextlib.closing(ParquetInput(path)) as file:
        ((num_rows, num_bytes),) = file.chunk_sizes(["document"])
        batches = file.iter_batches(["document"], file.schema(["document"]), BATCH_BYTES)
        assert max(batch.nbytes for _, batch in batches) < 2 * BATCH_BYTES
        assert file.read_rows([3], ["document"]) == [{"document": "a"}]
        path.write_bytes(b"")
        rows = file.read_rows([30_000, num_rows - 1], ["document"])
    assert rows == [{"document": long}, {"document": "b"}]
    assert num_long * long_bytes <= num_bytes < SMALL_GROUP_BYTES


def test_blank_lines_windows_line_ends_and_a_bom_are_borne(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n\n{"a": 2}\n  \n{"a": 3}')
    with open_path(path) as data:
        assert data.read_rows([2, 0]) == [{"a": 3}, {"a": 1}]
        assert data.num_rows == 3


def test_csv_line_ends_within_quotes_do_not_split_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfa,b\r\n"x\r\ny","say ""hi"", ok"\r\n\r\n1,\r\n')
    with open_path(path) as data:
        assert data.read_rows([1, 0]) == [
            {"a": "1", "b": ""},
            {"a": "x\r\ny", "b": 'say "hi", ok'},
        ]


def test_jsonl_columns_have_one_type_over_the_whole_file(tmp_path: Path) -> None:
    rows: list[Row] = [
        {"n": 1, "f": 1, "mixed": "a", "nested": {"k": 1}, "flag": True},
        {"n": None, "f": 0.5, "mixed": 2, "nested": [1], "flag": False},
    ]
    with open_path(write_rows(tmp_path / "a.jsonl", rows)) as data:
        (_, batch) = next(data.iter_batches())
        assert data.read_rows([0, 1]) == rows
    types = dict(zip(batch.schema.names, map(str, batch.schema.types), strict=True))
    assert types == {
        "n": "int64", "f": "double", "mixed": "string", "nested": "string", "flag": "bool"
    }  # fmt: skip
    assert batch.column("nested").to_pylist() == ['{"k": 1}', "[1]"]


def test_whole_numbers_that_a_float_would_round_stay_whole(tmp_path: Path) -> None:
    large = 2**53 + 1
    (tmp_path / "a.jsonl").write_text(f'{{"n": {large}, "m": {large}}}\n{{"n": 0.5, "m": 1}}\n')
    with open_path(tmp_path / "a.jsonl") as data:
        ((_, batch),) = data.iter_batches()
    assert batch.to_pydict() == {"n": [str(large), "0.5"], "m": [large, 1]}


def test_large_whole_numbers_stay_whole_beside_a_file_of_floats(tmp_path: Path) -> None:
    large = 2**53 + 1
    write_rows(tmp_path / "a.jsonl", [{"n": large, "m": 1}])
    write_rows(tmp_path / "b.jsonl", [{"n": 0.5, "m": 0.5}])
    with open_path(tmp_path / "*.jsonl") as data:
        batches = [batch for _, batch in data.iter_batches()]
    found = pa.Table.from_batches(batches).to_pydict()
    assert found == {"n": [str(large), "0.5"], "m": [1.0, 0.5]}


def test_a_file_of_nulls_leaves_a_column_the_type_that_others_give_it(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [{"n": None, "m": None}])
    write_rows(tmp_path / "b.jsonl", [{"n": 1, "m": None}])

    with open_path(tmp_path / "*.jsonl") as data:
        batches = [batch for _, batch in data.iter_batches()]

    assert all(batch.schema.types == [pa.int64(), pa.string()] for batch in batches)
    assert [batch.to_pylist()[0]["n"] for batch in batches] == [None, 1]


def test_more_files_than_a_process_may_open_at_first_are_read(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"{number}.jsonl").write_text('{"n": 1}\n')
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, limits[1]))
    try:
        with open_path(tmp_path / "*.jsonl") as data:
            assert data.num_rows == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_views_of_text_are_text(tmp_path: Path) -> None:
    views = {"a": pa.array(["x", "y"], type=pa.string_view()), "b": [1, 2]}
    pq.write_table(pa.table(views), tmp_path / "a.parquet")

    with open_path(tmp_path / "a.parquet") as data:
        assert data.schema(["a"]).field("a").type == pa.string()
        assert [row for _, rows in data.iter_rows() for row in rows] == data.read_rows([0, 1])
        assert data.read_rows([1], ["a"]) == [{"a": "y"}]


def test_what_is_no_text_is_json_beside_a_file_of_large_text(tmp_path: Path) -> None:
    texts = pa.array(["x"], type=pa.large_string())
    pq.write_table(pa.table({"tags": texts}), tmp_path / "a.parquet")
    write_rows(tmp_path / "b.jsonl", [{"tags": ["y"]}, {"tags": 1}])

    with open_path(tmp_path / "*") as data:
        batches = [batch for _, batch in data.iter_batches()]

    assert {batch.schema.field("tags").type for batch in batches} == {pa.large_string()}
    found = [tags for batch in batches for tags in batch.column("tags").to_pylist()]
    assert found == ["x", '["y"]', "1"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_a_column_of_many_long_rows_takes_the_memory_of_few(tmp_path: Path, name: str) -> None:
    ids = [f"r{i}" for i in range(1_000)]
    path = write_rows(tmp_path / name, [{"id": row_id, "text": "x" * 6_000} for row_id in ids])

    with open_path(path) as data:
        tracemalloc.start()
        found = data.read_rows(range(1_000), ["id"])
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()

    assert [row["id"] for row in found] == ids
    assert peak_bytes < path.stat().st_size / 2


def test_parquet_values_become_native(tmp_path: Path) -> None:
    times = pa.array([1_700_000_000_123_456_789], type=pa.timestamp("ns"))
    table = pa.table({"t": times, "s": [{"k": [1, 2]}], "n": pa.array([None], type=pa.int32())})
    pq.write_table(table, tmp_path / "a.parquet")
    with open_path(tmp_path / "a.parquet") as data:
        row = data.read_rows([0])[0]
    assert row["s"] == {"k": [1, 2]}
    assert row["n"] is None
    assert str(row["t"]).startswith("2023-11-14")


NULL_KEYS: list[list[object]] = [
    [[{"role": "system", "name": None}, {"role": "user", "name": None}]] * 6,
    [{"role": "user", "name": None}] * 6,
    [[None, None]] * 6,
]
TIMES = pa.array(range(1, 7), pa.int64()).cast(pa.timestamp("ns"))


@pytest.mark.parametrize("values", NULL_KEYS)
@pytest.mark.parametrize(
    "beside",
    [
        TIMES,
        pa.array(["x"] * 6).dictionary_encode(),
        pa.array([b"caf\xe9"] * 6).view(pa.string()),
        pa.array(["x"] * 6, pa.string_view()),
    ],
)
def test_keys_that_are_null_everywhere_are_read_beside_any_column(
    tmp_path: Path, beside: pa.Array, values: list[object]
) -> None:
    table = pa.table({"beside": beside, "messages": values})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)

    with open_path(tmp_path / "a.parquet") as data:
        read = [row for _, rows in data.iter_rows() for row in rows]
        picked = data.read_rows([5, 0])
        batches = [batch for _, batch in data.iter_batches()]

    assert [row["messages"] for row in read] == values
    assert [row["messages"] for row in picked] == [values[5], values[0]]
    pq.write_table(pa.Table.from_batches(batches), tmp_path / "b.parquet")
    assert pq.read_table(tmp_path / "b.parquet")["messages"].to_pylist() == values


@pytest.mark.parametrize(
    ("leaves", "kind"),
    [
        (TIMES, TIMES.type),
        (pa.array(list("xyzxyz")).dictionary_encode(), pa.string()),
        (pa.array(range(6), pa.int32()), pa.int64()),
    ],
)
def test_keys_that_are_null_everywhere_are_read_beside_any_other_key(
    tmp_path: Path, leaves: pa.Array, kind: pa.DataType
) -> None:
    for name, keys in {"a": leaves, "b": leaves.cast(kind)}.items():
        pairs = pa.StructArray.from_arrays([keys, pa.array([[None] * 2] * 6)], ["k", "z"])
        table = pa.table({"v": pa.ListArray.from_arrays([0, 3, 6], pairs)})
        pq.write_table(table, tmp_path / f"{name}.parquet")

    with open_path(tmp_path / "*.parquet") as data:
        rows = [row for _, rows in data.iter_rows() for row in rows]
        assert rows == data.read_rows(range(4))
        batches = [batch for _, batch in data.iter_batches()]
    pq.write_table(pa.Table.from_batches(batches), tmp_path / "c.parquet")
    for found in (rows, pq.read_table(tmp_path / "c.parquet").to_pylist()):
        values: Any = [row["v"] for row in found]
        assert [[pair["z"] for pair in value] for value in values] == [[[None] * 2] * 3] * 4


def test_times_as_spark_writes_them_are_right_in_every_year(tmp_path: Path) -> None:
    times = [datetime.datetime(year, 1, 2, 12) for year in (1, 2020, 9999)]
    table = pa.table({"t": pa.array(times, pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    with open_path(tmp_path / "a.parquet") as data:
        ((_, batch),) = data.iter_batches()
        assert [row["t"] for row in data.read_rows(range(3))] == times
    assert batch.column("t").to_pylist() == times


HUB_JOB = """\
name: sample
input: {{path: "{place}", messages: [{{role: user, content: "{{{{ text }}}}"}}]}}
output: {{path: out.parquet}}
"""
LOAD = """\
import sys
from pathlib import Path
from batchrun.errors import JobSpecError
from batchrun.jobs.job_file import input_files, load_job_file
try:
    spec = load_job_file(Path("job.yaml"), cwd=Path.cwd())
    print(*(path.name for path in input_files(spec.input.path)))
except JobSpecError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("hf://datasets/acme/reviews/data/one.jsonl", "one.jsonl"),
        ("hf://datasets/acme/reviews@main/data/*.jsonl", "one.jsonl two.jsonl"),
        (
            "hf://datasets/acme/reviews/three.jsonl",
            "job.yaml:2: input.path: hf://datasets/acme/reviews/three.jsonl: not in the local "
            "cache; hf download --repo-type dataset acme/reviews",
        ),
        (
            "hf://datasets/acme/other@v1/x.csv",
            "job.yaml:2: input.path: hf://datasets/acme/other@v1/x.csv: not in the local cache; "
            "hf download --repo-type dataset acme/other --revision v1",
        ),
        (
            "hf://models/x",
            "job.yaml:2: input.path: write hf://datasets/OWNER/NAME[@REVISION]/FILE (got "
            "'hf://models/x')",
        ),
    ],
)
def test_a_place_on_the_hub_is_read_from_the_cache_alone(
    tmp_path: Path, place: str, said: str
) -> None:
    cached = tmp_path / "hub" / "datasets--acme--reviews"
    data = cached / "snapshots" / ("0" * 40) / "data"
    for folder in (data, cached / "refs"):
        folder.mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    for name in ("one", "two"):
        (data / f"{name}.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "job.yaml").write_text(HUB_JOB.format(place=place))

    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        cwd=tmp_path,
        env={**os.environ, "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == f"{said}\n"


@pytest.mark.parametrize("columns", [["u.name"], ["u"], ["u.name", "u"], ["text", "u.name"]])
def test_a_column_may_be_called_as_a_field_of_another_is(
    tmp_path: Path, columns: list[str]
) -> None:
    row = {"u": {"name": "x", "id": 1}, "u.name": "y", "text": "t"}
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([row]), path)
    wanted = [{name: row[name] for name in columns}]

    with open_path(path, id="u.name") as data:
        assert [batch.to_pylist() for _, batch in data.iter_batches(columns)] == [wanted]
        assert data.read_rows([0], columns) == wanted
