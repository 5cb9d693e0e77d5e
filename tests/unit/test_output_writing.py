"""The output file: every row, in order, whole or not at all."""

from __future__ import annotations

import io
import json
import multiprocessing
import resource
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.errors import BatchrunError, DataError, InputError, JobSpecError, StoreFullError
from batchrun.files import atomic_file
from batchrun.jobs.inputs.input_data import check_kept, open_input
from batchrun.jobs.results import output_parts
from batchrun.jobs.results.output_file import write_output
from batchrun.jobs.results.output_parts import atomic_folder
from batchrun.jobs.spec import JobSpec
from batchrun.store.results import StoredResult
from batchrun.types import RowError, Usage

TIMES = pa.timestamp("ns")
MONEY = pa.decimal128(20, 2)
CANCELLED = RowError("cancelled", "the job was cancelled")


def make_spec(folder: Path, num_rows: int = 600, **output: object) -> JobSpec:
    rows = {
        "key": [f"k{i}" for i in range(num_rows)],
        "gold": pa.array(range(num_rows), type=pa.uint16()),
        "when": pa.array([1_700_000_000_000] * num_rows, type=pa.timestamp("ms")),
    }
    pq.write_table(pa.table(rows), folder / "in.parquet", row_group_size=100)
    values = {
        "name": "x",
        "input": {"path": str(folder / "in.parquet"), "id": "key", "messages": "{{ key }}"},
        "output": {"path": str(folder / "out.parquet"), "keep": ["gold", "when"], **output},
    }
    return JobSpec.model_validate(values)


def result(row: int, *, error: RowError | None = None) -> StoredResult:
    reply = {"choices": [{"message": {"content": f"answer {row}"}}]}
    body = None if error else json.dumps(reply).encode()
    return StoredResult(row, body, error, None if error else "stop", Usage(10, 5, 3), attempts=2)


def write(spec: JobSpec, path: Path, results: Iterator[StoredResult], **options: object) -> int:
    missing = options.get("missing", CANCELLED)
    assert missing is None or isinstance(missing, RowError)
    with open_input(spec.input) as data:
        return write_output(path, results, spec=spec, data=data, missing=missing)


def read(path: Path) -> list[dict[str, object]]:
    if path.suffix == ".parquet":
        rows: list[dict[str, object]] = pq.read_table(path).to_pylist()
        return rows
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl"])
def test_every_row_is_there_once_and_in_input_order(tmp_path: Path, name: str) -> None:
    spec = make_spec(tmp_path)
    num_rows = write(spec, tmp_path / name, (result(row) for row in range(0, 600, 3)))
    rows = read(tmp_path / name)
    assert num_rows == len(rows) == 600
    assert [row["id"] for row in rows] == [f"k{i}" for i in range(600)]
    assert [row["gold"] for row in rows] == list(range(600))
    assert rows[3]["response"] == "answer 3"
    assert rows[4]["response"] is None
    assert [row["error"] is None for row in rows] == [i % 3 == 0 for i in range(600)]


def test_kept_values_that_python_cannot_hold_are_told_in_jsonl(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, num_rows=2, keep=["text", "when", "far", "nested"])
    odd = pa.Array.from_buffers(pa.string(), 2, pa.array([b"\xffa", b"b"]).buffers())
    rows = pa.table({
        "key": ["k0", "k1"],
        "text": odd,
        "when": pa.array([2**62, 5], pa.timestamp("us")),
        "far": pa.array([2**50, None], pa.timestamp("us", "Mars/Phobos")),
        "nested": pa.array([[{"at": 2**60 + 1}], []], pa.list_(pa.struct({"at": TIMES}))),
    })
    pq.write_table(rows, tmp_path / "in.parquet")
    assert write(spec, tmp_path / "out.jsonl", iter([result(0), result(1)])) == 2
    first, second = read(tmp_path / "out.jsonl")
    assert (first["text"], second["text"]) == ("\ufffda", "b")
    assert str(first["when"]) == "<value out of range: 4611686018427387904>"
    assert str(first["far"]).startswith("2005-09-05")
    assert first["nested"] == [{"at": "2006-07-14T23:58:24.606846"}]
    assert second["when"] == "1970-01-01T00:00:00.000005"


def test_what_no_jsonl_can_hold_is_named(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, num_rows=1, keep=["deep"])
    odd = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xffa"]).buffers())
    deep = pa.StructArray.from_arrays([odd], ["text"])
    pq.write_table(pa.table({"key": ["k0"], "deep": deep}), tmp_path / "in.parquet")
    with pytest.raises(DataError, match=r"from 0 on holds.*'deep'.*FILE.parquet"):
        write(spec, tmp_path / "out.jsonl", iter([result(0)]))
    assert write(spec, tmp_path / "out.parquet", iter([result(0)])) == 1


def test_columns_have_their_order_and_kept_types(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, body=True)
    write(spec, tmp_path / "out.parquet", iter([result(0)]))
    schema = pq.read_schema(tmp_path / "out.parquet")
    assert schema.names == [
        "id", "gold", "when", "response", "finish_reason", "prompt_tokens", "output_tokens",
        "cached_tokens", "attempts", "error", "body",
    ]  # fmt: skip
    assert schema.field("gold").type == pa.uint16()
    assert schema.field("when").type == pa.timestamp("ms")


def categories(start: int) -> pa.Array:
    kind = pa.dictionary(pa.int8(), pa.string())
    return pa.array([f"c{i}" for i in range(start, start + 100)]).dictionary_encode().cast(kind)


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (pa.array([1, 2]), pa.array([0.5, None]), pa.float64()),
        (pa.array([2**60]), pa.array([0.5, None]), pa.string()),
        (pa.array(["12345678901234567.89"]).cast(MONEY), pa.array([1.5]), pa.string()),
        (pa.nulls(1, pa.list_(MONEY)), pa.array([[2]], pa.list_(pa.int32())), pa.list_(MONEY)),
        (pa.array([2**63], pa.uint64()), pa.array([-1]), pa.string()),
        (pa.array([2**57], pa.timestamp("us")), pa.array([1], TIMES), pa.string()),
        (categories(0), categories(100), pa.string()),
    ],
)
def test_kept_columns_of_several_files_have_a_type_that_holds_all_values(
    tmp_path: Path, first: pa.Array, second: pa.Array, kind: pa.DataType
) -> None:
    spec = make_spec(tmp_path, keep=["gold"])
    for name, values in {"in": first, "in2": second}.items():
        keys = [f"{name}{i}" for i in range(len(values))]
        pq.write_table(pa.table({"key": keys, "gold": values}), tmp_path / f"{name}.parquet")
    files = spec.input.model_copy(update={"path": (f"{tmp_path}/in*.parquet",)})
    spec = spec.model_copy(update={"input": files})

    with open_input(spec.input) as data:
        check_kept(spec, data)
    write(spec, tmp_path / "out.parquet", iter([]))

    found = pq.read_table(tmp_path / "out.parquet")["gold"]
    assert found.type == kind
    assert found.to_pylist() == [*first.cast(kind).to_pylist(), *second.cast(kind).to_pylist()]


def test_a_row_carries_usage_attempts_and_its_error(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, num_rows=2)
    failed = RowError("context_length_exceeded", "too long", 400)
    write(spec, tmp_path / "out.parquet", iter([result(0), result(1, error=failed)]))
    good, bad = read(tmp_path / "out.parquet")
    assert (good["prompt_tokens"], good["output_tokens"], good["cached_tokens"]) == (10, 5, 3)
    assert (good["attempts"], good["finish_reason"]) == (2, "stop")
    assert json.loads(str(bad["error"])) == {
        "code": "context_length_exceeded", "message": "too long", "status_code": 400
    }  # fmt: skip


def test_errors_and_bodies_are_objects_in_jsonl(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, num_rows=2, body=True)
    reply = {"choices": [{"message": {"content": "a\u2028\u2029\x85"}}]}
    body = json.dumps(reply, ensure_ascii=False).encode()
    write(spec, tmp_path / "out.jsonl", iter([StoredResult(0, body)]))
    good, missing = read(tmp_path / "out.jsonl")
    assert good["body"] == reply
    assert missing["error"] == {
        "code": "cancelled", "message": "the job was cancelled", "status_code": None
    }  # fmt: skip


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl"])
def test_a_partial_output_leaves_missing_rows_out(tmp_path: Path, name: str) -> None:
    spec = make_spec(tmp_path)
    wanted = [0, 255, 256, 599]
    assert write(spec, tmp_path / name, map(result, wanted), missing=None) == 4
    assert [row["gold"] for row in read(tmp_path / name)] == wanted


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl"])
def test_many_files_hold_every_row_once_and_replace_older_ones(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    suffix = folder.suffix
    for rows_per_file, sizes in ((90, [90] * 6 + [60]), (256, [256, 256, 88]), (600, [600])):
        spec = make_spec(tmp_path, rows_per_file=rows_per_file)
        assert write(spec, folder, map(result, range(600))) == 600

        parts = [read(path) for path in sorted(folder.iterdir())]
        assert [path.name for path in sorted(folder.iterdir())] == [
            f"part-{number:06}{suffix}" for number in range(len(sizes))
        ]
        assert [len(part) for part in parts] == sizes
        assert [row["gold"] for part in parts for row in part] == list(range(600))
        assert {path.name for path in tmp_path.iterdir()} == {"in.parquet", name}


def test_many_files_may_hold_no_row(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, rows_per_file=10)
    assert write(spec, tmp_path / "out.parquet", iter([]), missing=None) == 0
    assert read(tmp_path / "out.parquet" / "part-000000.parquet") == []
    assert pl.read_parquet(tmp_path / "out.parquet" / "*.parquet").columns[:2] == ["id", "gold"]


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, rows_per_file=10)
    write(spec, tmp_path / "out.parquet", iter([]))
    (tmp_path / "out.parquet" / "notes.txt").write_text("mine")

    with pytest.raises(InputError, match=r"notes\.txt there is no output of a job"):
        write(spec, tmp_path / "out.parquet", iter([]))

    assert (tmp_path / "out.parquet" / "notes.txt").read_text() == "mine"


def test_a_file_that_comes_into_the_folder_meanwhile_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    path.mkdir()
    with pytest.raises(InputError, match=r"notes\.txt there"), atomic_folder(path):
        (path / "notes.txt").write_text("mine")

    assert (path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("flags", [2, 1 << 20], ids=["exchanged", "in-two-steps"])
def test_of_two_writers_of_one_folder_each_writes_a_whole_one(
    tmp_path: Path, flags: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_parts, "_EXCHANGE", flags)
    path = tmp_path / "out.jsonl"
    path.write_text("an output of one file")
    for _ in range(2):
        with atomic_folder(path) as later:
            with atomic_folder(path) as sooner:
                (sooner / "part-000000.jsonl").write_text("sooner")
            assert (path / "part-000000.jsonl").read_text() == "sooner"
            (later / "part-000000.jsonl").write_text("later")
        assert (path / "part-000000.jsonl").read_text() == "later"
        assert [each.name for each in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_failure_keeps_the_old_folder_and_leaves_nothing_else(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, rows_per_file=300)
    write(spec, tmp_path / "out.jsonl", map(result, range(600)))
    before = {path.name: path.read_bytes() for path in (tmp_path / "out.jsonl").iterdir()}

    with pytest.raises(BatchrunError, match="went away"):
        write(spec, tmp_path / "out.jsonl", broken_results())

    assert {path.name: path.read_bytes() for path in (tmp_path / "out.jsonl").iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"in.parquet", "out.jsonl"}


def test_rows_stream_as_json_lines(tmp_path: Path) -> None:
    spec, stream = make_spec(tmp_path, rows_per_file=10), io.BytesIO()
    with open_input(spec.input) as data:
        found = iter([result(3), result(598)])
        assert write_output(stream, found, spec=spec, data=data, missing=None) == 2
    assert [json.loads(line)["id"] for line in stream.getvalue().splitlines()] == ["k3", "k598"]


def test_a_partial_output_may_be_empty(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    assert write(spec, tmp_path / "out.parquet", iter([]), missing=None) == 0
    assert read(tmp_path / "out.parquet") == []


def test_row_numbers_are_ids_when_no_column_is(tmp_path: Path) -> None:
    values = make_spec(tmp_path, num_rows=3, keep=[]).model_dump()
    values["input"]["id"] = None
    write(JobSpec.model_validate(values), tmp_path / "out.parquet", iter([]))
    assert [row["id"] for row in read(tmp_path / "out.parquet")] == [0, 1, 2]


def broken_results() -> Iterator[StoredResult]:
    yield result(0)
    raise BatchrunError("the store went away")


def test_a_failure_keeps_the_old_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    (tmp_path / "out.jsonl").write_text("old\n")
    with pytest.raises(BatchrunError, match="went away"):
        write(spec, tmp_path / "out.jsonl", broken_results())
    assert (tmp_path / "out.jsonl").read_text() == "old\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.parquet", "out.jsonl"]


def write_within(folder: Path, name: str, rows_per_file: int | None, answer: object) -> None:
    spec = make_spec(folder, rows_per_file=rows_per_file)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
    try:
        write(spec, folder / name, (result(row) for row in range(600)))
    except StoreFullError as failure:
        answer.send(str(failure))  # type: ignore[attr-defined]
    else:
        answer.send("no error")  # type: ignore[attr-defined]


@pytest.mark.parametrize("rows_per_file", [None, 300])
@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl"])
def test_a_full_disk_is_one_line_and_leaves_no_file(
    tmp_path: Path, name: str, rows_per_file: int | None
) -> None:
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    worker = context.Process(target=write_within, args=(tmp_path, name, rows_per_file, sending))
    worker.start()
    message = receiving.recv()
    worker.join()
    receiving.close()
    sending.close()
    assert message.startswith(f"{tmp_path / name}: no room to write the results")
    assert [path.name for path in tmp_path.iterdir()] == ["in.parquet"]


def test_missing_folders_are_made_and_dead_leftovers_removed(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, num_rows=2)
    target = tmp_path / "new" / "folder" / "out.jsonl"
    target.parent.mkdir(parents=True)
    (target.parent / ".out.jsonl.c0ffee00.part").write_text("left by a killed process")
    write(spec, target, iter([]))
    assert [path.name for path in target.parent.iterdir()] == ["out.jsonl"]


def test_two_writers_of_one_file_each_write_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with atomic_file(path) as later:
        with atomic_file(path) as sooner:
            sooner.write(b"sooner")
        assert path.read_bytes() == b"sooner"
        later.write(b"later")
    assert path.read_bytes() == b"later"
    assert [left.name for left in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"out\.jsonl: cannot be written: "):
        write(spec, tmp_path / "file" / "out.jsonl", iter([]))
    with pytest.raises(InputError, match="is a folder"):
        write(spec, tmp_path, iter([]))


def test_an_absent_keep_column_is_refused(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, keep=["absent"])
    with pytest.raises(JobSpecError, match="no column 'absent'"):
        write(spec, tmp_path / "out.jsonl", iter([]))
