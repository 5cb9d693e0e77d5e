"""Everything that can be wrong with an input file is one line that names it."""

from __future__ import annotations

import gzip
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from file_calls import largest_file_bytes

from batchrun.errors import DataError, JobSpecError, StoreError, StoreFullError
from batchrun.jobs.inputs.input_data import InputData, check_columns, open_input
from batchrun.jobs.spec import InputSpec, JobSpec
from batchrun.jobs.submit import prepare_job

INCHES = b'1,Monitor 24" wide\n2,TV 42" LCD, black\n'


def open_path(path: Path | str, **options: object) -> InputData:
    return open_input(InputSpec.model_validate({"path": str(path), **options}))


def problem_of(act: Callable[[], object]) -> str:
    with pytest.raises((DataError, JobSpecError)) as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def read_all(path: Path | str) -> None:
    with open_path(path) as data:
        for _ in data.iter_rows():
            pass


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", b"", "the input has no rows"),
        ("a.jsonl", b"\n \n", "the input has no rows"),
        ("a.csv", b"a,b\n", "the input has no rows"),
        ("a.parquet", b"PK\x03\x04 not parquet", "a.parquet: not a Parquet file"),
        ("a.parquet", b"PAR1 cut off in the middle", "a.parquet: the Parquet file is cut short"),
        ("a.parquet", b"PAR1" + b"\x99" * 50 + b"PAR1", "a.parquet: damaged"),
        ("a.parquet", b"", "a.parquet: not a Parquet file"),
        ("a.jsonl", b'{"a": 1}\n\n[1]\n', "a.jsonl:3: must be a JSON object, not an array"),
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "a.jsonl:2: not valid JSON: EOF while parsing"),
        ("a.jsonl", b'{"a": NaN}\n', "a.jsonl:1: not valid JSON"),
        ("a.jsonl", b'{"a": "\xff"}\n', "a.jsonl:1: not valid JSON: invalid unicode"),
        ("a.jsonl.gz", b"not gzip", "a.jsonl.gz: cannot be read: Not a gzipped file"),
        (
            "a.jsonl.gz",
            gzip.compress(b"{}")[:10] + bytes(99),
            "a.jsonl.gz: cannot be read: Error -3",
        ),
        ("a.jsonl.zst", b"not zstd", "a.jsonl.zst: cannot be read: ZSTD"),
        ("a.csv", b"a,b\n1,2\n3\n", "a.csv:3: 1 fields where the header has 2"),
        ("a.csv", b'a,b\n"x\ny",2\n3,4,5\n', "a.csv:4: 3 fields where the header has 2"),
        ("a.csv", b"a,b\n1,x\n1,x\ry\n2,z\n", "a.csv:3: a carriage return stands outside quotes"),
        ("a.csv", b"a\nx\ry\n", "a.csv:2: a carriage return stands outside quotes"),
        ("a.csv", b'a,b\n1,2\n3,"4\n5,6\n\n7,8', "a.csv:3: a quoted field is never closed"),
        ("a.csv", b'a\n"\n\n', "a.csv:2: a quoted field is never closed"),
        ("a.csv", b'a\n5" disk\nx\n"y\nz"\n', "a.csv:2: a quote stands inside"),
        ("a.csv", b'a\nx\n1"\n2"\n3"\ny\n', "a.csv:3: a quote stands inside"),
        ("a.csv", b"a,b\n" + INCHES, "a.csv:2: a quote stands inside an unquoted field"),
        ("a.csv", b"a,b\n0,x\n" + INCHES + b"3,y\n", "a.csv:3: a quote stands inside"),
        ("a.csv", b"a,b\n" + (b"1,x\n" * 9 + b'1,x"\n') * 2, "a.csv:11: a quote stands inside"),
        ("a.csv", b"a,b\n1,2\n1,\xff\n", "a.csv:3: not UTF-8 text"),
        ("a.csv", b"a,a\n1,2\n", "a.csv: two columns are named 'a'"),
        ("a.data", b"x", "a.data: unknown format; set input.format"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert problem in problem_of(lambda: read_all(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "first", "line", "last"),
    [
        ("a.jsonl", b"", b'{"t": "' + b"x" * 1000 + b'"}\n', b'{"t": "\xff"}\n'),
        ("a.csv", b"t\n", b"x" * 1000 + b"\n", b"\xff\n"),
    ],
)
def test_a_bad_line_is_found_at_submission_wherever_it_stands(
    tmp_path: Path, name: str, first: bytes, line: bytes, last: bytes
) -> None:
    (tmp_path / name).write_bytes(first + line * 3000 + last)
    spec = {"path": f"{tmp_path}/{name}", "messages": [{"role": "user", "content": "{{ t }}"}]}
    job = {"name": "x", "input": spec, "output": {"path": f"{tmp_path}/out.parquet"}}

    said = problem_of(lambda: prepare_job(JobSpec.model_validate(job), links=tmp_path / "links"))

    assert said.startswith(f"{tmp_path / name}:{len(first.splitlines()) + 3001}: not ")


def test_a_cut_off_zstd_file_is_refused_also_where_a_record_ends(tmp_path: Path) -> None:
    packing = zstandard.ZstdCompressor().compressobj()
    start = packing.compress(b'{"a": 1}\n' * 1000)
    start += packing.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    (tmp_path / "a.jsonl.zst").write_bytes(start)

    assert "cannot be read: Truncated" in problem_of(lambda: read_all(tmp_path / "a.jsonl.zst"))


def test_a_cut_off_gzip_file_is_refused(tmp_path: Path) -> None:
    packed = gzip.compress(os.urandom(10_000))
    (tmp_path / "a.jsonl.gz").write_bytes(packed[:5000])
    assert "a.jsonl.gz: cannot be read" in problem_of(lambda: read_all(tmp_path / "a.jsonl.gz"))


LINES = b'{"text": "a long line of some text"}\n' * 1_000
ARRAY = b'[{"text": "a long element of some text"}' + b', {"text": "x"}' * 1_000 + b"]"
SCRATCH = pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl.gz", gzip.compress(LINES)), ("a.json", ARRAY)]
)


@SCRATCH
def test_no_room_for_a_scratch_copy_names_its_folder(
    tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)

    with largest_file_bytes(10_000), pytest.raises(StoreFullError) as caught:
        open_path(tmp_path / name)

    place = tmp_path / name
    assert str(caught.value) == (
        f"{tempfile.gettempdir()}: no room for a scratch copy of {place}; free some space there, "
        "or name another folder in TMPDIR, and try again"
    )


@SCRATCH
def test_a_scratch_folder_that_is_gone_is_not_blamed_on_the_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))

    with pytest.raises(StoreError, match=r"a scratch copy cannot be made: No such .* TMPDIR"):
        open_path(tmp_path / name)


def test_a_truncated_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": list(range(1000))}), path)
    path.write_bytes(path.read_bytes()[:-200])
    assert "cut short" in problem_of(lambda: read_all(path))


def test_a_parquet_file_damaged_inside_is_refused_when_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": [f"value {i}" for i in range(10_000)]}), path)
    raw = bytearray(path.read_bytes())
    raw[4:2000] = b"\xff" * 1996
    path.write_bytes(raw)
    assert f"{path}: damaged" in problem_of(lambda: read_all(path))


@pytest.mark.parametrize("within", [pa.list_, lambda kind: pa.struct({"k": kind})])
def test_no_decimal_within_a_list_or_struct_is_rounded(
    tmp_path: Path, within: Callable[[pa.DataType], pa.DataType]
) -> None:
    for kind in (pa.decimal128(20, 2), pa.float64()):
        values = pa.nulls(1, within(kind))
        pq.write_table(pa.table({"v": values}), tmp_path / f"{kind}.parquet")
    with open_path(f"{tmp_path}/*.parquet") as data:
        problem = problem_of(lambda: data.check_types(["v"], is_one_table=True))
    assert ".parquet: its column types differ from those of the other files" in problem


def test_an_unusable_type_is_refused_only_when_used(tmp_path: Path) -> None:
    table = pa.table({"a": [1], "m": pa.array([[("k", 1)]], type=pa.map_("string", "int8"))})
    pq.write_table(table, tmp_path / "a.parquet")
    with open_path(tmp_path / "a.parquet") as data:
        assert data.read_rows([0], ["a"]) == [{"a": 1}]
        problem = problem_of(lambda: data.read_rows([0], ["m"]))
    assert "column 'm' has type map<string, int8 ('m')>, which cannot be used" in problem


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    "values",
    [
        pa.array([[("k", 1)]], type=pa.map_("string", "int8")),
        pa.array([b"abc"], type=pa.binary(3)),
        pa.array([["a"]], type=pa.list_(pa.string_view())),
    ],
)
def test_a_kept_type_that_cannot_be_read_is_refused_at_once(
    tmp_path: Path, values: pa.Array, suffix: str
) -> None:
    pq.write_table(pa.table({"a": ["x"], "m": values}), tmp_path / "a.parquet")
    spec = keeping(tmp_path, suffix)

    problem = problem_of(lambda: prepare_job(spec, links=tmp_path / "links"))

    assert problem.startswith("output.keep[0]: 'm' cannot be kept: ")
    assert "a.parquet: column 'm' has type " in problem and "which cannot be used" in problem


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_kept_column_that_is_damaged_is_refused_at_once(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": ["x", "y"], "m": ["long text", "longer text"]}), path)
    chunk = pq.read_metadata(path).row_group(0).column(1)
    raw = bytearray(path.read_bytes())
    raw[chunk.data_page_offset : chunk.data_page_offset + 16] = b"\xff" * 16
    path.write_bytes(raw)

    problem = problem_of(lambda: prepare_job(keeping(tmp_path, suffix), links=tmp_path / "links"))

    assert f"{path}: damaged or not readable as Parquet" in problem


def test_kept_types_that_share_none_are_refused_at_once_for_one_table(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": ["x"], "m": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": ["x"], "m": [[1]]}), tmp_path / "b.parquet")

    problem = problem_of(
        lambda: prepare_job(keeping(tmp_path, "parquet"), links=tmp_path / "links")
    )

    assert "'m' cannot be kept: " in problem and "b.parquet: its column types differ" in problem
    job = prepare_job(keeping(tmp_path, "jsonl"), links=tmp_path / "links")
    assert job.num_rows == 2


def keeping(folder: Path, suffix: str) -> JobSpec:
    return JobSpec.model_validate({
        "name": "x",
        "input": {
            "path": str(folder / "*.parquet"),
            "messages": [{"role": "user", "content": "{{ a }}"}],
        },
        "output": {"path": str(folder / f"out.{suffix}"), "keep": ["m"]},
    })


def test_missing_paths_and_folders_are_named(tmp_path: Path) -> None:
    assert problem_of(lambda: open_path(tmp_path / "no.csv")).endswith("no.csv: no such file")
    assert "is a folder; name a file" in problem_of(lambda: open_path(tmp_path))
    assert "no file matches" in problem_of(lambda: open_path(tmp_path / "*.parquet"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n")
    path.chmod(0)
    assert f"{path}: cannot be read: Permission denied" in problem_of(lambda: open_path(path))


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    assert "not a regular file" in problem_of(lambda: open_path(tmp_path / "a.jsonl"))


def test_a_row_over_64_mib_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"a": 1}\n{"a": "')
        file.write(b"x" * (65 << 20))
        file.write(b'"}\n')
    assert "a.jsonl:2: this row holds over 64 MiB" in problem_of(lambda: open_path(path))


def test_files_with_different_columns_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    (tmp_path / "b.csv").write_text("a,c\n1,2\n")
    assert "column 'b' is not in both" in problem_of(lambda: open_path(tmp_path / "*.csv"))


def test_a_used_column_that_a_file_of_another_kind_lacks_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1, "b": 2}\n')
    pq.write_table(pa.table({"a": [3]}), tmp_path / "b.parquet")
    spec = InputSpec(path=(str(tmp_path / "a.jsonl"), str(tmp_path / "b.parquet")))

    with open_input(spec) as data:
        assert data.read_rows([1, 0], ["a"]) == [{"a": 3}, {"a": 1}]
        assert "b.parquet: has no column 'b'" in problem_of(lambda: list(data.iter_rows()))
        assert "b.parquet: has no column 'b'" in problem_of(lambda: list(data.iter_batches()))
        assert "b.parquet: has no column 'b'" in problem_of(lambda: data.read_rows([1], ["b"]))


def test_an_absent_id_column_is_suggested_against(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("key,b\n1,2\n")
    problem = problem_of(lambda: open_path(tmp_path / "a.csv", id="kee"))
    assert "input.id: the input has no column 'kee' (did you mean 'key'?)" in problem


def test_an_absent_keep_column_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("key,b\n1,2\n")
    spec = JobSpec.model_validate({
        "name": "x",
        "input": {"path": str(tmp_path / "a.csv"), "prompt": "{{ b }}"},
        "endpoint": "/v1/completions",
        "output": {"path": "o.jsonl", "keep": ["gold"]},
    })
    with open_input(spec.input) as data, pytest.raises(JobSpecError, match=r"output\.keep\[0\]"):
        check_columns(spec, data)


def test_parquet_files_whose_types_cannot_meet_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1], "b": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": [1], "b": [{"k": 1}]}), tmp_path / "b.parquet")
    with open_path(tmp_path / "*.parquet") as data:
        assert [batch.num_rows for _, batch in data.iter_batches(["a"])] == [1, 1]
        problem = problem_of(lambda: list(data.iter_batches()))
    assert "b.parquet: its column types differ from those of the other files" in problem
