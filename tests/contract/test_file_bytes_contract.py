"""Where the bytes of API files lie: the home folder and object storage keep the same promises."""

from __future__ import annotations

from pathlib import Path

import pytest
from object_store import ObjectStore

from batchrun.errors import MissingObjectError, StorageUnreachableError
from batchrun.home import UNLISTED
from batchrun.jobs import objects
from batchrun.jobs.results.file_bytes import (
    FileBytes,
    ObjectBytes,
    local_file,
    pieces_of,
)
from batchrun.store.files import new_file_id

CONTENT = bytes(range(256)) * (objects.PIECE_BYTES // 128)
"""Two pieces."""


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    return tmp_path / "files"


@pytest.fixture
def in_bucket(spool: Path, bucket: ObjectStore) -> ObjectBytes:
    return ObjectBytes(spool, f"s3://bucket/{spool.parent.name}")


@pytest.fixture(params=["folder", "objects"])
def place(request: pytest.FixtureRequest, spool: Path) -> FileBytes:
    if request.param == "folder":
        return FileBytes(spool)
    remote: ObjectBytes = request.getfixturevalue("in_bucket")
    return remote


def spooled(place: FileBytes, content: bytes = b"one\n") -> str:
    """The id of a file that is spooled, and no more."""
    file_id = new_file_id()
    (place.spool / file_id).write_bytes(content)
    return file_id


def kept(place: FileBytes, content: bytes = b"one\n") -> str:
    """The id of a file that is where it belongs, but not listed yet."""
    file_id = spooled(place, content)
    place.keep(file_id)
    return file_id


def is_there(place: FileBytes, file_id: str) -> bool:
    try:
        place.locate(file_id)
    except MissingObjectError:
        return False
    return True


def start_anew(place: FileBytes, *known: str) -> None:
    """What a daemon does at its start and every minute, when the store lists these."""
    place.recover(known.__contains__)
    place.sweep(known.__contains__)


def left_in(place: FileBytes, bucket: ObjectStore) -> list[str]:
    """Everything that lies in the spool or below the prefix."""
    prefix = place.spool.parent.name
    here = [path.name for path in place.spool.iterdir()]
    return sorted(here + [key.rpartition("/")[2] for key in bucket.keys(prefix)])


def test_bytes_that_are_kept_come_back_whole(place: FileBytes, tmp_path: Path) -> None:
    file_id = kept(place, CONTENT)
    place.settle(file_id)

    assert b"".join(pieces_of(place, file_id)) == CONTENT
    with local_file(place, file_id, scratch=tmp_path) as path:
        assert path.read_bytes() == CONTENT
    assert str(place.locate(file_id)) == place.place_of(file_id)
    assert list(tmp_path.glob(".scratch-*")) == []


def test_bytes_that_are_removed_are_gone(place: FileBytes, bucket: ObjectStore) -> None:
    file_id = kept(place)
    place.settle(file_id)

    place.mark(file_id)
    place.remove(file_id)
    place.remove(file_id)

    assert not is_there(place, file_id)
    assert left_in(place, bucket) == []


def test_what_is_no_files_id_is_not_removed(place: FileBytes, bucket: ObjectStore) -> None:
    theirs = [place.spool / "notes", place.spool.parent / "notes"]
    for path in theirs:
        path.write_bytes(b"theirs")
    bucket.write(f"{place.spool.parent.name}/notes", b"theirs")
    for text in ("notes", "../notes", str(theirs[1])):
        place.mark(text)
        place.remove(text)

    assert theirs[1].exists() and left_in(place, bucket) == ["notes", "notes"]


def test_an_empty_file_is_a_file(place: FileBytes) -> None:
    file_id = kept(place, b"")
    place.settle(file_id)

    assert list(pieces_of(place, file_id)) == [] and is_there(place, file_id)


def test_what_a_kill_cuts_off_on_the_way_in_leaves_a_bucket(
    in_bucket: ObjectBytes, bucket: ObjectStore
) -> None:
    spooled(in_bucket)
    kept(in_bucket)
    (in_bucket.spool / ".file-x.0123.part").write_bytes(b"half")

    start_anew(in_bucket)

    assert left_in(in_bucket, bucket) == []


def test_whole_files_of_the_home_that_no_store_lists_are_put_aside(spool: Path) -> None:
    """A kill leaves some, and an older store that was put back."""
    place = FileBytes(spool)
    newer, listed, going = kept(place), kept(place), kept(place)
    place.mark(going)
    (spool / ".file-x.0123.part").write_bytes(b"half")

    start_anew(place, listed)

    assert {path.name for path in spool.iterdir()} == {listed, UNLISTED}
    assert [(path.name, path.read_bytes()) for path in (spool / UNLISTED).iterdir()] == [
        (newer, b"one\n")
    ]


def test_what_others_keep_in_the_folder_stays(place: FileBytes) -> None:
    names = ["notes.txt", "photo.gone", ".draft.part", "file-of-mine"]
    for name in names:
        (place.spool / name).write_bytes(b"theirs")

    start_anew(place)

    assert sorted(path.name for path in place.spool.iterdir()) == sorted(names)


def test_a_kill_after_a_file_was_listed_loses_nothing(
    place: FileBytes, bucket: ObjectStore
) -> None:
    file_id = kept(place)

    start_anew(place, file_id)

    assert b"".join(pieces_of(place, file_id)) == b"one\n"
    assert left_in(place, bucket) == [file_id]


def test_a_kill_on_the_way_out_is_finished_or_undone(place: FileBytes, bucket: ObjectStore) -> None:
    undone, finished = kept(place), kept(place)
    for file_id in (undone, finished):
        place.settle(file_id)
        place.mark(file_id)

    start_anew(place, undone)

    assert left_in(place, bucket) == [undone]
    assert is_there(place, undone) and not is_there(place, finished)


def test_nothing_is_touched_while_it_is_on_its_way(place: FileBytes, bucket: ObjectStore) -> None:
    coming, going = spooled(place), kept(place)
    place.settle(going)
    place.mark(going)

    place.sweep([going].__contains__)
    place.keep(coming)
    place.settle(coming)

    assert b"".join(pieces_of(place, coming)) == b"one\n"
    assert is_there(place, going)


def test_what_storage_cannot_remove_at_once_goes_later(
    in_bucket: ObjectBytes, bucket: ObjectStore
) -> None:
    file_id = kept(in_bucket)
    in_bucket.settle(file_id)
    in_bucket.mark(file_id)
    with bucket.away():
        in_bucket.remove(file_id)
        with pytest.raises(StorageUnreachableError):
            in_bucket.locate(file_id)
    assert left_in(in_bucket, bucket) == [file_id, f"{file_id}.gone"]

    in_bucket.sweep([].__contains__)

    assert left_in(in_bucket, bucket) == []


def test_files_of_the_home_folder_move_and_foreign_objects_stay(
    in_bucket: ObjectBytes, bucket: ObjectStore
) -> None:
    file_id = spooled(in_bucket)
    bucket.write(f"{in_bucket.spool.parent.name}/{new_file_id()}", b"of another deployment")
    assert b"".join(pieces_of(in_bucket, file_id)) == b"one\n"

    start_anew(in_bucket, file_id)

    assert in_bucket.locate(file_id) == in_bucket.place_of(file_id)
    assert len(left_in(in_bucket, bucket)) == 2
    assert list(in_bucket.spool.iterdir()) == []
