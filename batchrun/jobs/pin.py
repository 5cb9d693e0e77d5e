"""A pin: what the input files were at submit, by hashes of blocks, so that a change is noticed.

Inputs in object storage are fetched when a job is submitted, and kept while it needs them; a copy
that is lost is fetched again.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash
from pydantic import BaseModel, ConfigDict

from batchrun.errors import DataError, StoreError, StoreFullError
from batchrun.files import is_url, make_folder, name_of, scratch_folder, sync_file, sync_folder
from batchrun.jobs import objects
from batchrun.jobs.spec import InputSpec
from batchrun.types import ProgressSink

BLOCK_BYTES = 64 << 20
_READ_BYTES = 1 << 20


def even_block_ends(size_bytes: int) -> list[int]:
    """The ends of 64 MiB blocks; the last is the size of the file."""
    return [*range(BLOCK_BYTES, size_bytes, BLOCK_BYTES), size_bytes]


def hash_blocks(
    path: Path, ends: Sequence[int], *, on_bytes: Callable[[int], None] | None = None
) -> list[str]:
    """xxh3-128 of each block of the file; a block starts where the one before ends.

    Raises OSError. A file that is shorter than its blocks gives hashes of what is there.
    """
    hashes: list[str] = []
    position = 0
    with path.open("rb") as file:
        for end in ends:
            digest = xxhash.xxh3_128()
            while position < end and (block := file.read(min(_READ_BYTES, end - position))):
                digest.update(block)
                position += len(block)
            hashes.append(digest.hexdigest())
            if on_bytes is not None:
                on_bytes(position)
    return hashes


class PinnedFile(BaseModel):
    """One input file: `block_hashes[i]` is the xxh3-128 of the bytes up to `block_ends[i]`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    size_bytes: int
    mtime_ns: int
    block_ends: tuple[int, ...]
    block_hashes: tuple[str, ...]


class InputPin(BaseModel):
    """All files of an input in row order. JSON in and out through pydantic."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    files: tuple[PinnedFile, ...]
    num_rows: int


def verify_pin(pin: InputPin, *, links: Path | None = None) -> None:
    """Raises DataError, naming file and hashes, when a file is not what it was at submit.

    Size and time are compared first; the bytes are read only when these differ. With `links`
    (the folder given to `keep_input`) a kept link stands in for a replaced file.
    """
    for file in pin.files:
        path = pinned_path(file, links)
        if not _looks_unchanged(path, file):
            _verify(file, path)


def fetch_missing(pin: InputPin, links: Path) -> None:
    """Fetch the objects of which `links` has no copy: another daemon made it, or it was lost.

    Raises DataError where one is gone or not what it was at submit, StorageError and StoreError.
    """
    for file in pin.files:
        link = links / link_name(file)
        if is_url(file.path) and not link.exists():
            if shutil.disk_usage(links).free < file.size_bytes:
                raise StoreFullError(f"{links}: no room for the copy of {file.path}")
            with scratch_folder(links) as scratch:
                objects.fetch(file.path, scratch / "copy")
                _verify(file, scratch / "copy")
                _move(scratch / "copy", link)


def pinned_path(file: PinnedFile, links: Path | None) -> Path:
    """Where to read a pinned file: its own path, or its link when the path shows another file. Of
    an object there is nothing but the copy that stands for a link."""
    path = Path(file.path)
    kept = [] if links is None else [links / name for name in link_names(file)]
    link = next((each for each in kept if each.exists()), path)
    if is_url(file.path) or not _looks_unchanged(path, file):
        return link
    with suppress(OSError):
        if _looks_unchanged(link, file) and not path.samefile(link):
            return link  # Another file may have been given the time of the old one.
    return path


def link_names(file: PinnedFile) -> tuple[str, str]:
    """What the link to a pinned file is called, and what older batchruns call it."""
    return link_name(file), f"{file.block_hashes[-1]}-{Path(file.path).name}"


def link_name(file: PinnedFile) -> str:
    """What the link to a pinned file is called, which stands for all of its bytes."""
    digest = xxhash.xxh3_128_hexdigest("".join(file.block_hashes).encode())
    return f"{digest}-{name_of(file.path)}"


def _looks_unchanged(path: Path, file: PinnedFile) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (file.size_bytes, file.mtime_ns)


def _verify(file: PinnedFile, path: Path) -> None:
    try:
        size_bytes = path.stat().st_size
        now = hash_blocks(path, file.block_ends)
    except OSError as failure:
        raise DataError(
            f"{file.path}: the pinned input cannot be read any more: {failure.strerror}"
        ) from None
    pairs = enumerate(zip(file.block_hashes, now, strict=True))
    changed = next(((index, pair) for index, pair in pairs if pair[0] != pair[1]), None)
    if changed is None and size_bytes == file.size_bytes:
        return
    last = len(now) - 1
    index, (was, is_now) = changed or (last, (file.block_hashes[last], now[last]))
    raise DataError(
        f"{file.path}: changed since the job was submitted: block {index} had xxh3 {was}, now "
        f"{is_now} ({file.size_bytes} bytes then, {size_bytes} now); put the old file back, or "
        "`batchrun resume JOB --accept-input`"
    )


Origins = Mapping[str, str]
"""Path of a copy -> the URL of what it is a copy of."""


@contextmanager
def fetched_input(
    spec: InputSpec, folder: Path, progress: ProgressSink | None = None
) -> Iterator[tuple[InputSpec, Origins]]:
    """The input with a copy in place of each object, and where the copies come from.

    The copies lie below `folder`, and go at the end unless `keep_input` takes them; an error that
    names one names its object instead. Nothing is done for an input of files. Raises DataError,
    StorageError, StoreFullError.
    """
    if not any(map(is_url, spec.path)):
        yield spec, {}
        return
    with scratch_folder(folder) as scratch:
        origins: dict[str, str] = {}
        paths = [path for place in spec.path for path in _local(place, scratch, origins, progress)]
        try:
            yield spec.model_copy(update={"path": tuple(paths)}), origins
        except DataError as error:
            text = str(error)
            for copy, url in origins.items():
                text = text.replace(copy, url)
            raise type(error)(text) from None


def keep_input(pin: InputPin, origins: Origins, links: Path) -> InputPin:
    """Keep the pinned files in `links` so that they outlive a deletion or a replacement, and say
    of copies where they come from.

    A file is synced, and linked where the file system allows it, which is not across file systems;
    a copy is moved there, for good once this returns. Raises StoreError and DataError.
    """
    files = []
    try:
        make_folder(links)
        for file in pin.files:
            if file.path in origins:
                copy, file = Path(file.path), file.model_copy(update={"path": origins[file.path]})
                _move(copy, links / link_name(file))
            else:
                _sync(file)
                _link(file, links)
            files.append(file)
        sync_folder(links)
    except OSError as failure:
        raise StoreError(f"{links}: cannot be written: {failure.strerror}") from None
    return pin.model_copy(update={"files": tuple(files)})


def _link(file: PinnedFile, links: Path) -> None:
    link = links / link_name(file)
    try:
        if link.exists():
            _verify(file, link)
    except DataError:
        link.unlink(missing_ok=True)  # It was written to.
    try:
        # A link to a symbolic link would follow it to another file one day.
        os.link(os.path.realpath(file.path), link)
    except FileNotFoundError as failure:
        # Deleted this very moment: nothing would be left of it.
        raise DataError(f"{file.path}: cannot be read: {failure.strerror}") from failure
    except OSError:
        return  # It is there already, or the file system takes none.


def _local(
    place: str, scratch: Path, origins: dict[str, str], progress: ProgressSink | None
) -> Sequence[str]:
    if not is_url(place):
        return [place]
    copies: list[str] = []
    for url in objects.expand(place):
        folder = scratch / str(len(origins))
        folder.mkdir()
        copies.append(str(folder / name_of(url)))
        objects.fetch(url, Path(copies[-1]), progress)
        origins[copies[-1]] = url
    return copies


_NOT_SYNCED = frozenset({errno.EINVAL, errno.EROFS})
"""What file systems say that are only read, and so have nothing to sync."""


def _sync(file: PinnedFile) -> None:
    try:
        sync_file(Path(file.path))
    except OSError as failure:
        if failure.errno in _NOT_SYNCED:
            return
        raise DataError(f"{file.path}: cannot be read: {failure.strerror}") from failure


def _move(copy: Path, link: Path) -> None:
    try:
        copy.replace(link)
        sync_folder(link.parent)
    except OSError as failure:
        raise StoreError(f"{link}: cannot be written: {failure.strerror}") from None
