"""Where the bytes of the files of OpenAI's API lie: in the home folder, or in object storage.

New bytes are spooled: written to `spool / ID` on the local disk, whole and synced. Then comes
`keep`, then the row in the store, then `settle`. They go by `mark`, then the row goes, then
`remove`. Whoever dies between two of these leaves something in `spool` by which `recover` knows at
the next start what to finish. So nothing is listed that has no bytes, and no bytes stay that nobody
lists; and that takes no look at the rest of a bucket, where others may keep files of their own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from batchrun.errors import BatchrunError, ConfigError, MissingObjectError, StorageError, StoreError
from batchrun.files import make_folder, scratch_folder, sync_folder, write_atomically
from batchrun.home import UNLISTED, Home
from batchrun.jobs import objects
from batchrun.store import batches, files
from batchrun.store.check import Violation
from batchrun.store.database import Store
from batchrun.store.files import ID_PREFIX, FileRecord

log = logging.getLogger(__name__)

IsKnown = Callable[[str], bool]
"""Whether the store lists a file of this id, be it an expired one."""
READ_BYTES = 1 << 20
MARK = ".gone"
"""The ending of an empty file beside the bytes that are to go."""
_ID = re.compile(rf"{ID_PREFIX}[A-Za-z0-9]{{1,59}}")
"""As long as the store takes one. A batch may name anything: a path, or what no disk takes."""
_HALF_WRITTEN = re.compile(rf"\.{ID_PREFIX}[A-Za-z0-9]+\.[0-9a-f]+\.part")


class FileBytes:
    """The bytes of files, each under its file's id, in a folder of the home: the spool itself.

    Everything may block. What has not the form of an id is never marked or removed.
    """

    def __init__(self, spool: Path) -> None:
        self.spool = spool

    def place_of(self, file_id: str) -> str:
        """The path or URL of a file's bytes."""
        return str(self.spool / file_id)

    def keep(self, file_id: str) -> None:
        """Put what was spooled where it belongs, for good once this returns.

        Raises StorageError; the bytes are then in the spool, and perhaps also where they belong.
        """

    def settle(self, file_id: str) -> None:
        """The store lists the file: give back what was only needed until then."""

    def locate(self, file_id: str) -> Path | str:
        """The path, or the URL, at which the bytes are. Raises MissingObjectError, StorageError."""
        path = self.spool / file_id
        if not path.is_file():
            raise MissingObjectError(f"{path}: no such file")
        return path

    def mark(self, file_id: str) -> None:
        """Note, synced, that the bytes are to go if the store does not list the file. Raises
        StoreError."""
        if not _ID.fullmatch(file_id):
            return
        try:
            self._mark_of(file_id).touch()
            sync_folder(self.spool)
        except OSError as failure:
            raise StoreError(f"{self.spool}: cannot be written to: {failure.strerror}") from None

    def remove(self, file_id: str) -> None:
        """Remove the bytes of a marked file that the store does not list (any more). What cannot
        be removed stays marked."""
        if not _ID.fullmatch(file_id):
            return
        (self.spool / file_id).unlink(missing_ok=True)
        self._mark_of(file_id).unlink(missing_ok=True)

    def recover(self, is_known: IsKnown) -> int:
        """At the start, while nobody reads or writes files: set right what a kill left; how many
        whole files nobody lists. Others' files stay."""
        num_strays = 0
        for path in list(self.spool.iterdir()):
            if _HALF_WRITTEN.fullmatch(path.name):
                path.unlink(missing_ok=True)
        for file_id in self._marked():
            if is_known(file_id):
                self._mark_of(file_id).unlink(missing_ok=True)
        for file_id in self._spooled():
            if not is_known(file_id) and not self._mark_of(file_id).exists():
                self._put_aside(file_id)
                num_strays += 1
        return num_strays

    def sweep(self, is_known: IsKnown) -> None:
        """From time to time: finish what was put off. Raises StorageError."""
        for file_id in self._marked():
            if not is_known(file_id):
                self.remove(file_id)

    def _put_aside(self, file_id: str) -> None:
        """Bytes whose place in the store a kill prevented, or a store from before it has not."""
        aside = self.spool / UNLISTED
        make_folder(aside, mode=0o700)
        os.utime(self.spool / file_id)
        (self.spool / file_id).replace(aside / file_id)
        log.warning("%s is not listed in the store; it lies in %s now, until `gc`", file_id, aside)

    def _marked(self) -> list[str]:
        names = [path.name.removesuffix(MARK) for path in self.spool.glob(f"*{MARK}")]
        return [name for name in names if _ID.fullmatch(name)]

    def _spooled(self) -> list[str]:
        return [path.name for path in self.spool.iterdir() if _ID.fullmatch(path.name)]

    def _mark_of(self, file_id: str) -> Path:
        return self.spool / f"{file_id}{MARK}"


class ObjectBytes(FileBytes):
    """Bytes in object storage below a URL. The spool holds files on their way in, and an empty
    `ID.gone` for each on its way out.

    A file that the store lists and that still lies in the spool was there before the home had
    object storage, or was just added: `sweep` moves it.
    """

    def __init__(self, spool: Path, url: str) -> None:
        super().__init__(spool)
        self._url = url

    def place_of(self, file_id: str) -> str:
        """The URL."""
        return f"{self._url}/{file_id}"

    def keep(self, file_id: str) -> None:
        """Upload what was spooled. Raises StorageError."""
        objects.put(self.spool / file_id, self.place_of(file_id))

    def settle(self, file_id: str) -> None:
        """Remove the local copy."""
        (self.spool / file_id).unlink(missing_ok=True)

    def locate(self, file_id: str) -> Path | str:
        """The URL, or the path of bytes that are yet to be moved."""
        url, path = self.place_of(file_id), self.spool / file_id
        if objects.exists(url):
            return url
        # What lies in the spool may be moved meanwhile.
        return url if not path.is_file() and objects.exists(url) else super().locate(file_id)

    def remove(self, file_id: str) -> None:
        """Remove the object, its copy and its mark."""
        if not _ID.fullmatch(file_id):
            return
        self.settle(file_id)
        try:
            objects.remove(self.place_of(file_id))
        except StorageError as error:
            log.warning("%s is not removed yet: %s", file_id, error)
        else:
            self._mark_of(file_id).unlink(missing_ok=True)

    def sweep(self, is_known: IsKnown) -> None:
        """Remove what is marked, and move what lies here and is listed. Raises StorageError, when
        all of it was tried."""
        super().sweep(is_known)
        trouble = None
        for file_id in filter(is_known, self._spooled()):
            try:
                self._move(file_id, is_known)
            except StorageError as error:
                trouble = error
        if trouble is not None:
            raise trouble

    def _put_aside(self, file_id: str) -> None:
        """The object goes too, should there be one: it was on its way."""
        self.mark(file_id)
        self.settle(file_id)

    def _move(self, file_id: str, is_known: IsKnown) -> None:
        with suppress(FileNotFoundError):
            if not objects.exists(self.place_of(file_id)):
                self.keep(file_id)
        if is_known(file_id):
            self.settle(file_id)
        else:
            self.mark(file_id)
            self.remove(file_id)


def pieces_of(place: FileBytes, file_id: str) -> Iterator[bytes]:
    """All bytes of a file, in order. Raises MissingObjectError, StorageError and OSError."""
    where = place.locate(file_id)
    if isinstance(where, str):
        yield from objects.read_pieces(where, objects.find(where).size_bytes)
        return
    with where.open("rb") as file:
        yield from iter(lambda: file.read(READ_BYTES), b"")


@contextmanager
def local_file(place: FileBytes, file_id: str, *, scratch: Path) -> Iterator[Path]:
    """The bytes as a file on the local disk: the very file, or a link or copy in the folder
    `scratch` that goes afterwards. Raises MissingObjectError, StorageError, StoreError."""
    if not isinstance(place, ObjectBytes):
        yield Path(place.locate(file_id))
        return
    with scratch_folder(scratch) as folder:
        copy = folder / file_id
        try:
            copy.hardlink_to(place.spool / file_id)
        except OSError:
            objects.fetch(place.place_of(file_id), copy)
        yield copy


def file_bytes_of(home: Home) -> FileBytes:
    """Where a home's files are, as its daemon recorded it."""
    url = home.files_url
    return FileBytes(home.files) if url is None else ObjectBytes(home.files, url)


def open_file_bytes(home: Home, url: str | None, store: Store) -> FileBytes:
    """Where a home's files are as batchrun.yaml has it; a URL is recorded in the home.

    Files in the home folder move to object storage by and by. Raises ConfigError, and changes
    nothing, when there are files at another URL, or when the URL's library is not installed.
    """
    if url is not None:
        objects.check_library(url)
    recorded = home.files_url
    is_in_use = bool(files.list_all(store)) or any(home.files.glob(f"*{MARK}"))
    if recorded not in {None, url} and is_in_use:
        wanted = "no `files`" if url is None else f"`files` {url}"
        raise ConfigError(
            f"the files of {home.path} are in {recorded}, and batchrun.yaml has {wanted}; name "
            "that place there, or delete the files first, and wait a minute"
        )
    if url is None:
        home.files_url_file.unlink(missing_ok=True)
    elif url != recorded:
        write_atomically(home.files_url_file, f"{url}\n".encode(), mode=0o600)
    return file_bytes_of(home)


def check_contents(store: Store, place: FileBytes) -> Iterator[Violation]:
    """What is wrong with the bytes of the files. Reads all of them.

    A file that is deleted meanwhile is none that is missing.
    """
    for record in files.list_all(store):
        where = place.place_of(record.id)
        digest = hashlib.sha256()
        size_bytes = 0
        try:
            for piece in pieces_of(place, record.id):
                digest.update(piece)
                size_bytes += len(piece)
        except (BatchrunError, OSError) as failure:
            if files.find(store, record.id, now_s=record.created_at) is not None:
                reason = getattr(failure, "strerror", None) or str(failure)
                yield Violation(f"file {record.id}: {where} cannot be read: {reason}")
            continue
        if size_bytes != record.size_bytes:
            yield Violation(
                f"file {record.id}: had {record.size_bytes} bytes, and {where} has {size_bytes}"
            )
        elif digest.hexdigest() != record.sha256:
            yield Violation(
                f"file {record.id}: the bytes of {where} are not those that were stored"
            )


def remove_file(store: Store, place: FileBytes, file_id: str) -> None:
    """Forget a file, then remove its bytes; a kill in between leaves a mark to go on from. So does
    an input of batches that have not ended, until they have: the copy of it may be lost.

    Raises StoreError, and then the file is as it was.
    """
    place.mark(file_id)
    files.remove(store, file_id)
    if not batches.is_input(store, file_id):
        place.remove(file_id)


def remove_input(store: Store, place: FileBytes, batch_id: str) -> None:
    """A batch has ended: its input goes with it where its caller has deleted that meanwhile,
    perhaps at another daemon. Raises StoreError."""
    batch = batches.find(store, batch_id)
    assert batch is not None
    file_id = batch.input_file_id
    if not _ID.fullmatch(file_id) or _is_known(store, file_id):
        return
    if not batches.is_input(store, file_id):
        place.mark(file_id)
        place.remove(file_id)


def remove_expired(store: Store, place: FileBytes, *, now_s: float) -> list[FileRecord]:
    """Remove the files whose time is over; returns which."""
    expired = files.find_expired(store, now_s=now_s)
    for record in expired:
        remove_file(store, place, record.id)
    return expired


def recover_files(store: Store, place: FileBytes) -> int:
    """Set right what a kill left of files on their way in or out; how many are to go.

    The caller holds the store's lock, and nobody reads or writes files meanwhile.
    """
    return place.recover(partial(_is_known, store))


def sweep_files(store: Store, place: FileBytes) -> None:
    """Finish what was put off while object storage did not answer, or a batch needed its input.
    Raises StorageError."""
    place.sweep(lambda each: _is_known(store, each) or batches.is_input(store, each))


def _is_known(store: Store, file_id: str) -> bool:
    return files.find(store, file_id, now_s=0.0) is not None
