"""Objects behind URLs: found, read, fetched, put and removed, all through fsspec.

Everything here blocks, and may hang for a while: call it in threads, which stand apart from all
others here. Nothing is cached, for an object may change at any time. Credentials, region and
endpoint are those of the environment (`AWS_*` and the like), and are neither kept nor shown. What
storage and its client libraries raise becomes an error of `batchrun.errors`.
"""

from __future__ import annotations

import asyncio
import glob
import io
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from batchrun.errors import (
    BatchrunError,
    ConfigError,
    DataError,
    MissingObjectError,
    StorageError,
    StorageUnreachableError,
    StoreError,
    StoreFullError,
)
from batchrun.files import DISK_FULL, LIBRARIES, check_url, is_url, scheme_of
from batchrun.types import ProgressSink

_PASSING_STATUSES = frozenset({408, 425, 429})
_PASSING_KINDS = frozenset({
    "ClientConnectionError",
    "ClientPayloadError",
    "ConnectionError",
    "FSTimeoutError",
    "HTTPClientError",
    "ServiceRequestError",
    "ServiceResponseError",
    "TimeoutError",
})
_DENIED_KINDS = frozenset({
    "ClientAuthenticationError",
    "CredentialRetrievalError",
    "DefaultCredentialsError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "PermissionError",
})
"""Names of classes of botocore, aiohttp, Google's and Azure's clients: none of them need be
installed."""


@contextmanager
def explained(url: str) -> Iterator[None]:
    """Raises MissingObjectError, StorageError or StorageUnreachableError, one line that names
    `url`, for whatever a client library raises within."""
    try:
        yield
    except BatchrunError:
        raise
    except Exception as failure:
        raise _explain(url, failure) from failure


def _explain(url: str, failure: Exception) -> BatchrunError:
    cause = failure.__cause__ if failure.__cause__ is not None else failure
    code, status = _code_of(cause), _status_of(cause)
    kinds = {kind.__name__ for kind in (*type(failure).__mro__, *type(cause).__mro__)}
    said = f" ({code})" if code else ""
    if isinstance(failure, FileNotFoundError) or status == 404:
        if code == "NoSuchBucket":
            return MissingObjectError(f"{url}: there is no such bucket")
        return MissingObjectError(f"{url}: there is no such object")
    if kinds & _DENIED_KINDS or status in {401, 403}:
        return StorageError(
            f"{url}: access denied{said or f' ({type(cause).__name__})'}; the credentials come "
            "from the environment"
        )
    is_passing = status is not None and (status >= 500 or status in _PASSING_STATUSES)
    if is_passing or (status is None and kinds & _PASSING_KINDS):
        why = said or f" ({type(cause).__name__})"
        return StorageUnreachableError(f"{url}: the storage does not answer{why}; try again later")
    words = " ".join(str(failure).split())[:200] or type(failure).__name__
    return StorageError(f"{url}: the storage cannot be used: {words}")


def _code_of(cause: BaseException) -> str | None:
    response = getattr(cause, "response", None)
    error = response.get("Error") if isinstance(response, dict) else None
    code = error.get("Code") if isinstance(error, dict) else None
    return code if isinstance(code, str) and not code.isdecimal() else None


def _status_of(cause: BaseException) -> int | None:
    """The HTTP status behind an error, where there was a reply."""
    response = getattr(cause, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status if isinstance(status, int) else None
    for name in ("status_code", "status", "code"):
        status = getattr(cause, name, None)
        if isinstance(status, int):
            return status
    return None


log = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20
"""As much of an object as is held at a time, on its way in or out."""
RANGE_BYTES = 1 << 20
MAX_PARTS = 9_000
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": 5, "read_timeout": 30}}
}


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object as it is now; `version` differs when its bytes may."""

    size_bytes: int
    version: str
    modified_at: float | None


def check_library(url: str) -> None:
    """Raises ConfigError when the library that serves this URL is not installed."""
    _open(url)


def check_bucket(url: str) -> None:
    """Raises when the bucket of `url` is not there, or does not answer. One that only may not be
    asked about itself passes."""
    storage, path = _open(url)
    bucket = path.partition("/")[0]
    try:
        with explained(url):
            storage.info(bucket)
    except MissingObjectError:
        raise MissingObjectError(f"{url}: there is no bucket {bucket!r}") from None
    except StorageUnreachableError:
        raise
    except StorageError as error:
        log.info("%s", error)


def find(url: str) -> ObjectInfo:
    """What an object is now."""
    storage, path = _open(url)
    with explained(url):
        found = storage.info(path)
    if found.get("type") != "file":
        raise MissingObjectError(f"{url}: there is no such object")
    named = {key: str(found[key]) for key in sorted(found.keys() - {"last_accessed_on"})}
    return ObjectInfo(int(found["size"]), repr(named), _modified_at(found))


def exists(url: str) -> bool:
    """Whether there is such an object."""
    try:
        find(url)
    except MissingObjectError:
        return False
    return True


def expand(place: str) -> list[str]:
    """The URLs of the objects that a URL or a pattern (`*`, `**`, `?`, `[...]`) stands for, in
    sorted order. Raises DataError when a pattern matches none."""
    if not glob.has_magic(place) or exists(place):
        return [place]
    return _match(place)


def _match(pattern: str) -> list[str]:
    storage, path = _open(pattern)
    try:
        with explained(pattern):
            found = storage.glob(path, detail=True)
    except MissingObjectError:
        found = {}
    keys = sorted(key for key, about in found.items() if about["type"] == "file")
    if not keys:
        # Nothing is found also where the bucket cannot be listed, which is another trouble.
        with suppress(MissingObjectError), explained(pattern):
            storage.ls(path.partition("/")[0])
        raise DataError(f"{pattern}: no object matches this pattern")
    # Azure's URLs name an account beside the container, which keys begin with.
    account, _, rest = pattern.partition("://")[2].partition("/")
    above = path.removesuffix(rest)
    urls = [f"{scheme_of(pattern)}://{account}/{key.removeprefix(above)}" for key in keys]
    for url in urls:
        try:
            check_url(url)
        except ValueError as problem:
            raise DataError(f"{pattern}: matches what cannot be read: {problem}") from None
    return urls


def read(url: str, start: int, end: int) -> bytes:
    """The bytes from `start` up to `end`, which must lie within the object."""
    storage, path = _open(url)
    with explained(url):
        content = bytes(storage.cat_file(path, start=start, end=end))
    if len(content) != end - start:
        raise StorageError(f"{url}: has become shorter while it was read")
    return content


def read_pieces(url: str, size_bytes: int) -> Iterator[bytes]:
    """All bytes of an object of this size, in order."""
    for start in range(0, size_bytes, PIECE_BYTES):
        yield read(url, start, min(start + PIECE_BYTES, size_bytes))


class _ObjectFile(io.RawIOBase):
    """An object as a file to read; each read asks for one range."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._size_bytes = find(url).size_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size_bytes}
        self._position = max(start[whence] + offset, 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self._size_bytes)
        if self._position >= end:
            return 0
        content = read(self._url, self._position, end)
        buffer[: len(content)] = content
        self._position = end
        return len(content)


def open_to_read(place: str) -> io.BufferedReader:
    """A file, or an object as a file that is read by ranges as it is asked for."""
    if is_url(place):
        return io.BufferedReader(_ObjectFile(place), RANGE_BYTES)
    return Path(place).open("rb")


def fetch(url: str, path: Path, progress: ProgressSink | None = None) -> ObjectInfo:
    """Write an object to a new file, synced, with the object's time; returns what it was.

    Raises DataError when the object changes meanwhile, StoreFullError when the disk is full, and
    StoreError.
    """
    before = find(url)
    try:
        with path.open("wb") as file:
            for piece in read_pieces(url, before.size_bytes):
                file.write(piece)
                if progress is not None:
                    progress(f"fetching {url}", file.tell(), before.size_bytes)
            file.flush()
            os.fsync(file.fileno())
        if before.modified_at is not None:
            os.utime(path, (before.modified_at, before.modified_at))
    except OSError as failure:
        if failure.errno in DISK_FULL:
            raise StoreFullError(
                f"{path.parent}: no room for a copy of {url}; free some space and try again"
            ) from None
        raise StoreError(f"{path}: cannot be written: {failure.strerror}") from None
    if find(url).version != before.version:
        raise DataError(f"{url}: was replaced while it was read; submit it when complete")
    return before


def put(path: Path, url: str) -> None:
    """Make a local file an object, which appears whole or not at all."""
    storage, key = _open(url)
    size_bytes = path.stat().st_size
    options: dict[str, int] = {}
    if scheme_of(url) == "s3":
        part_bytes = max(PIECE_BYTES, -(-size_bytes // MAX_PARTS))
        options = {"chunksize": part_bytes, "max_concurrency": 1}
    try:
        with explained(url):
            if size_bytes >= PIECE_BYTES:
                _abort_uploads(storage, key)
            storage.put_file(str(path), key, **options)
    except MissingObjectError as error:
        raise StorageError(str(error)) from None


def remove(url: str) -> None:
    """Remove an object, and what a kill left of its upload; nothing happens if there is none."""
    storage, path = _open(url)
    try:
        with explained(url):
            _abort_uploads(storage, path)
            storage.rm_file(path)
    except MissingObjectError:
        return


def names_below(url: str) -> list[str]:
    """What the objects are called whose keys go on with a slash after `url` and have no other."""
    storage, path = _open(url)
    try:
        with explained(url):
            # `find` would take an error for an empty place.
            found = storage.ls(path, detail=True)
    except MissingObjectError:
        return []
    keys = [str(each["name"]) for each in found if each["type"] == "file"]
    return sorted(key.rpartition("/")[2] for key in keys if key.rpartition("/")[0] == path)


def _abort_uploads(storage: Any, path: str) -> None:
    """Give back what S3 keeps of uploads to this key that were killed; others forget by
    themselves."""
    if "s3" not in storage.protocol:
        return
    bucket, _, key = path.partition("/")
    try:
        left = storage.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key)
        for upload in left.get("Uploads", ()):
            if upload["Key"] == key:
                storage.call_s3(
                    "abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload["UploadId"]
                )
    except OSError as refusal:
        log.info("s3://%s: uploads that were killed are not cleared: %s", path, refusal)


def _open(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the URL's path in it."""
    check_url(url)
    scheme = scheme_of(url)
    try:
        import fsspec

        kind = fsspec.get_filesystem_class(scheme)
    except ImportError:
        raise ConfigError(f"{url}: reading {scheme}:// needs {LIBRARIES[scheme]}") from None
    given = tuple(kind._get_kwargs_from_urls(url).items())
    with explained(url):
        return file_system(kind, scheme, given), str(kind._strip_protocol(url))


@lru_cache(maxsize=16)
def file_system(kind: Any, scheme: str, given: tuple[tuple[str, object], ...]) -> Any:
    """The one client of an account, for all threads: fsspec would make one for each of them."""
    options = {**dict(given), **_OPTIONS.get(scheme, {})}
    storage = kind(**options, use_listings_cache=False, skip_instance_cache=True)
    if scheme == "s3":
        storage.retries = 2
    return storage


def _modified_at(found: dict[str, Any]) -> float | None:
    for key in ("LastModified", "last_modified", "updated", "mtime"):
        value = found.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
    return None


MAX_THREADS = 16
_THREADS = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="storage")

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do what blocks on storage or reads and writes large files, and return or raise what it does.
    It has threads of its own: short work never waits behind it."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_THREADS, partial(work, *args, **kwargs))
