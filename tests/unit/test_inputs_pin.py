"""Pins notice a changed input; ids are unique."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.errors import DataError
from batchrun.jobs.inputs.input_data import InputData, check_ids, open_input, open_pinned
from batchrun.jobs.pin import InputPin, keep_input, verify_pin
from batchrun.jobs.spec import InputSpec


def write_parquet(path: Path, num_rows: int = 1000, *, first: int = 0) -> Path:
    table = pa.table({"id": [f"r{first + i}" for i in range(num_rows)]})
    pq.write_table(table, path, row_group_size=100)
    return path


def pin_of(path: Path) -> InputPin:
    with open_input(InputSpec(path=(str(path),))) as data:
        return data.pin()


def open_ids(path: Path, ids: list[object]) -> InputData:
    path.write_text("".join(json.dumps({"id": value}) + "\n" for value in ids))
    return open_input(InputSpec(path=(str(path),), id="id"))


def test_a_pin_has_a_hash_per_block_and_survives_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchrun.jobs.pin.BLOCK_BYTES", 1_000)
    path = write_parquet(tmp_path / "a.parquet")
    pin = pin_of(path)
    assert len(pin.files[0].block_hashes) == -(-path.stat().st_size // 1_000)
    assert pin.num_rows == 1000
    assert InputPin.model_validate_json(pin.model_dump_json()) == pin


def test_an_untouched_or_merely_touched_file_passes(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet")
    pin = pin_of(path)
    verify_pin(pin)
    os.utime(path, ns=(1, 1))
    verify_pin(pin)


def test_a_changed_byte_names_file_and_both_hashes(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet")
    pin = pin_of(path)
    raw = bytearray(path.read_bytes())
    raw[5] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError) as caught:
        verify_pin(pin)
    now = pin_blocks_hash(path, pin)
    message = str(caught.value)
    assert message.startswith(f"{path}: changed since")
    assert pin.files[0].block_hashes[0] in message
    assert now in message


def pin_blocks_hash(path: Path, pin: InputPin) -> str:
    import xxhash

    return xxhash.xxh3_128_hexdigest(path.read_bytes()[: pin.files[0].block_ends[0]])


@pytest.mark.parametrize("change", ["append", "cut", "delete"])
def test_a_longer_shorter_or_deleted_file_is_refused(tmp_path: Path, change: str) -> None:
    path = write_parquet(tmp_path / "a.parquet")
    pin = pin_of(path)
    raw = path.read_bytes()
    path.unlink()
    if change != "delete":
        path.write_bytes(raw + b"x" if change == "append" else raw[:-1])
    with pytest.raises(DataError, match=r"a\.parquet: (changed since|the pinned input cannot)"):
        verify_pin(pin)


@pytest.mark.parametrize("replaced", [True, False])
def test_a_hard_link_outlives_deletion_and_replacement(tmp_path: Path, *, replaced: bool) -> None:
    path = write_parquet(tmp_path / "a.parquet")
    pin, links = pin_of(path), tmp_path / "links"
    keep_input(pin, {}, links)
    path.unlink()
    if replaced:
        write_parquet(path, first=5000)
    verify_pin(pin, links=links)
    with open_pinned(InputSpec(path=(str(path),)), pin, links=links) as data:
        assert data.read_rows([7]) == [{"id": "r7"}]


def test_of_a_file_of_equal_size_and_time_in_its_place_the_pinned_bytes_are_read(
    tmp_path: Path,
) -> None:
    path, new, links = tmp_path / "a.jsonl", tmp_path / "new", tmp_path / "links"
    path.write_text(lines(0))
    pin = keep_input(pin_of(path), {}, links)
    new.write_text(lines(500))
    os.utime(new, ns=(0, pin.files[0].mtime_ns))
    assert new.stat().st_size == pin.files[0].size_bytes
    new.replace(path)
    verify_pin(pin, links=links)
    with open_pinned(InputSpec(path=(str(path),)), pin, links=links) as data:
        assert data.read_rows([0]) == [{"q": "000000"}]


def test_a_file_that_equals_one_whose_link_was_written_to_is_read_itself(tmp_path: Path) -> None:
    path, other, links = tmp_path / "a.jsonl", tmp_path / "x" / "a.jsonl", tmp_path / "links"
    other.parent.mkdir()
    for each in (other, path):
        each.write_text(lines(0))
        pin = keep_input(pin_of(each), {}, links)
    other.write_text(lines(500))
    os.utime(other, ns=(1, 1))
    verify_pin(pin, links=links)


def test_files_that_end_alike_have_links_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchrun.jobs.pin.BLOCK_BYTES", 1_000)
    path, new, pins = tmp_path / "a.jsonl", tmp_path / "new", []
    for letter in "AB":
        new.write_text(f'{{"q": "{letter * 990}"}}\n{{"q": "end"}}\n')
        new.replace(path)
        pins.append(keep_input(pin_of(path), {}, tmp_path / "links"))
    path.unlink()
    for pin in pins:
        verify_pin(pin, links=tmp_path / "links")


def test_a_link_whose_file_was_written_to_is_made_anew(tmp_path: Path) -> None:
    path, new, links = tmp_path / "a.jsonl", tmp_path / "new", tmp_path / "links"
    path.write_text(lines(0))
    keep_input(pin_of(path), {}, links)
    path.write_text(lines(500))
    new.write_text(lines(0))
    new.replace(path)
    pin = keep_input(pin_of(path), {}, links)
    path.unlink()
    verify_pin(pin, links=links)
    assert len(list(links.iterdir())) == 1


def test_of_a_symbolic_link_the_file_is_kept(tmp_path: Path) -> None:
    blob = write_parquet(tmp_path / "blob.parquet")
    path, links = tmp_path / "a.parquet", tmp_path / "links"
    path.symlink_to(blob)
    pin = pin_of(path)

    keep_input(pin, {}, links)
    blob.unlink()

    verify_pin(pin, links=links)


def test_an_input_that_goes_before_it_is_linked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(tmp_path / "a.parquet")
    pin = pin_of(path)
    monkeypatch.setattr("batchrun.jobs.pin.sync_file", Path.unlink)  # Just then.
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read: No such file"):
        keep_input(pin, {}, tmp_path / "links")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EROFS, errno.EIO])
def test_what_a_file_system_cannot_sync_is_pinned_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = write_parquet(tmp_path / "a.parquet")
    pin, may_fail = pin_of(path), number == errno.EIO

    def refuse(_: Path) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr("batchrun.jobs.pin.sync_file", refuse)
    with pytest.raises(DataError, match="refused") if may_fail else contextlib.nullcontext():
        keep_input(pin, {}, tmp_path / "links")


def lines(first: int) -> str:
    """A hundred rows, as long as those of any other hundred."""
    return "".join(json.dumps({"q": f"{first + i:06}"}) + "\n" for i in range(100))


@pytest.mark.parametrize(("name", "pack"), [("a.jsonl", bytes), ("a.jsonl.gz", gzip.compress)])
def test_rows_of_a_file_that_is_written_to_meanwhile_are_not_read(
    tmp_path: Path, name: str, pack: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / name
    path.write_bytes(pack(lines(0).encode()))
    os.utime(path, ns=(1, 1))
    with open_input(InputSpec(path=(str(path),))) as data:
        path.write_bytes(pack(lines(500).encode()))
        with pytest.raises(DataError, match=r"a\.jsonl\S*: was written to while it is read; with"):
            data.read_rows([7])
        with pytest.raises(DataError, match="was written to"):
            list(data.iter_rows())
        with pytest.raises(DataError, match="is being written to while it is read"):
            data.pin()


def test_rows_of_a_file_that_was_replaced_or_deleted_are_read_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines(0))
    with open_input(InputSpec(path=(str(path),))) as data:
        (tmp_path / "new").write_text(lines(500))
        (tmp_path / "new").replace(path)
        assert data.read_rows([7]) == [{"q": "000007"}]
        with pytest.raises(DataError, match="is being written to while it is read"):
            data.pin()
        path.unlink()
        assert data.read_rows([7]) == [{"q": "000007"}]


def test_pinning_reports_its_progress(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    with open_input(InputSpec(path=(str(write_parquet(tmp_path / "a.parquet")),))) as data:
        data.pin(lambda stage, done, total: seen.append((done, total)))
    size = (tmp_path / "a.parquet").stat().st_size
    assert seen[-1] == (size, size)


def test_unique_ids_pass_and_row_numbers_need_no_check(tmp_path: Path) -> None:
    with open_ids(tmp_path / "a.jsonl", ["a", "b", 3]) as data:
        check_ids(data)
        assert data.row_id({"id": 3}, 2) == "3"
    with open_input(InputSpec(path=(str(tmp_path / "a.jsonl"),))) as data:
        check_ids(data)
        assert data.row_id({}, 2) == "2"


def test_a_duplicate_id_names_both_rows(tmp_path: Path) -> None:
    ids: list[object] = [*map(str, range(500)), "77"]
    with open_ids(tmp_path / "a.jsonl", ids) as data, pytest.raises(DataError) as caught:
        check_ids(data)
    path = tmp_path / "a.jsonl"
    line = f"{path}:501: id '77' (column 'id') is also the id of {path}:78; ids must be unique"
    assert str(caught.value) == line


def test_rows_of_several_files_are_named_where_they_stand(tmp_path: Path) -> None:
    paths = [str(write_parquet(tmp_path / "a.parquet", 3)), str(tmp_path / "b.jsonl")]
    (tmp_path / "b.jsonl").write_text('{"id": "x"}\n\n{"id": "r2"}\n')
    with (
        open_input(InputSpec(path=(*paths, paths[0]), id="id")) as data,
        pytest.raises(DataError) as caught,
    ):
        check_ids(data)
    assert f"b.jsonl:3: id 'r2' (column 'id') is also the id of {paths[0]}: row 2;" in str(
        caught.value
    )


@pytest.mark.parametrize(("value", "kind"), [(None, "null"), (1.5, "a float"), (True, "a bool")])
def test_an_id_that_is_no_id_is_refused(tmp_path: Path, value: object, kind: str) -> None:
    with (
        open_ids(tmp_path / "a.jsonl", ["a", value]) as data,
        pytest.raises(DataError, match=f"a.jsonl:2: the id .* is {kind}"),
    ):
        check_ids(data)
