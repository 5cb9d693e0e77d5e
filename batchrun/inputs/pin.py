"""A pin: what the input files were at submit, so that a change is noticed and named."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import xxhash
from pydantic import BaseModel, ConfigDict

from batchrun.errors import DataError
from batchrun.inputs.pin_blocks import hash_blocks
from batchrun.remote import is_url, name_of


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
    (the folder given to `hard_link_inputs`) a kept link stands in for a replaced file.
    """
    for file in pin.files:
        _verify(file, pinned_path(file, links))


def hard_link_inputs(pin: InputPin, folder: Path) -> None:
    """Links the files into `folder`, as far as the file system allows, so that they outlive a
    deletion or a replacement. Links nothing across file systems, and no objects."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in pin.files:
        if not is_url(file.path):
            with contextlib.suppress(OSError):
                os.link(file.path, folder / link_name(file))


def pinned_path(file: PinnedFile, links: Path | None) -> Path:
    """Where to read a pinned file: its own path, or its link when the path shows another file. Of
    an object there is nothing but the copy that stands for a link."""
    path = Path(file.path)
    if links is None or (not is_url(file.path) and _looks_unchanged(path, file)):
        return path
    link = links / link_name(file)
    return link if link.exists() else path


def link_name(file: PinnedFile) -> str:
    """What the link to a pinned file is called. A copy of an object is the only one of its bytes,
    so its name stands for all of them."""
    if not is_url(file.path):
        return f"{file.block_hashes[-1]}-{Path(file.path).name}"
    digest = xxhash.xxh3_128_hexdigest("".join(file.block_hashes).encode())
    return f"{digest}-{name_of(file.path)}"


def _looks_unchanged(path: Path, file: PinnedFile) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (file.size_bytes, file.mtime_ns)


def _verify(file: PinnedFile, path: Path) -> None:
    if _looks_unchanged(path, file):
        return
    try:
        size_bytes = path.stat().st_size
        now = hash_blocks(path, file.block_ends)
    except OSError as failure:
        if is_url(file.path):
            raise DataError(
                f"{file.path}: the copy that was made of it at submission is gone; fetch it again "
                "with `batchrun resume JOB --accept-input`"
            ) from None
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
