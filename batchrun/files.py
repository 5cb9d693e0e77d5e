"""Files: written whole or not at all, counted and hashed, locked, how many a process may open, and
what else it must be allowed; scratch folders that vanish with their maker; and URLs of objects,
where a place is no path.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import os
import re
import resource
import secrets
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

from batchrun.errors import (
    BatchrunError,
    ConfigError,
    InputError,
    OverloadedError,
    StoreError,
    StoreFullError,
    StoreLockedError,
)
from batchrun.failpoints import failpoint


def write_atomically(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write `content` to `path` through a temporary file beside it: fsync, rename, fsync.

    Raises OSError, leaving the old content (or no file) in place.
    """
    with replacing(path, mode) as file:
        file.write(content)


def allow_many_open_files() -> None:
    """Raise this process's limit of open files, connections among them, to the most that it may
    have. Children inherit it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Allowance(NamedTuple):
    """What a process must be allowed. With less, libraries that it loads hang, abort or end it."""

    who: str
    memory_mb: int
    num_files: int
    num_threads: int


COMMAND = Allowance("a command", 400, 24, 0)
DAEMON = Allowance("a daemon", 1_000, 64, 32 + 4 * (os.cpu_count() or 1))
"""Several libraries start a thread for each core; gateway and engines count as well."""


def check_limits(need: Allowance) -> None:
    """Raises ConfigError where this process is allowed less."""
    for given, wanted, what, mend in (
        (_most(resource.RLIMIT_AS) // 1_000_000, need.memory_mb, "MB of address space", "-v"),
        (_most(resource.RLIMIT_NOFILE, hard=True), need.num_files, "open files", "-Hn"),
        (_try_threads(need.num_threads), need.num_threads, "more threads", "-u"),
    ):
        if given < wanted:
            raise ConfigError(
                f"{need.who} needs {wanted:,} {what}, and {given:,} are allowed: raise the limit "
                f"(`ulimit {mend}`, or that of the service or container)"
            )


_THREADS_PROGRAM = """
import sys, threading
threading.stack_size(1 << 16)
for number in range(int(sys.argv[1])):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    print(number + 1, flush=True)
"""


def _try_threads(num_wanted: int) -> int:
    """How many of so many threads can run at once. Several bounds hold for them, so it is tried:
    in another process, for each would leave its address space behind."""
    if not num_wanted:
        return 0
    command = [sys.executable, "-I", "-S", "-c", _THREADS_PROGRAM, str(num_wanted)]
    with suppress(OSError):
        tried = subprocess.run(command, capture_output=True, text=True, check=False)
        return len(tried.stdout.splitlines())
    return 0


def max_open_files() -> int:
    """How many files, connections among them, this process may have open."""
    return _most(resource.RLIMIT_NOFILE)


def _most(kind: int, *, hard: bool = False) -> int:
    limit = resource.getrlimit(kind)[hard]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Another path of a unix socket: the system takes about 100 characters, a home may be longer.
    Raises OSError."""
    folder_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder_fd}/{path.name}"
    finally:
        os.close(folder_fd)


def waited_for_core_s(pid: int) -> float:
    """For how long a process could have run and did not, since it began; 0 where that is not
    told."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def sync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file(path: Path) -> None:
    """Make what a file holds durable. Raises OSError."""
    sync_folder(path)


def make_folder(folder: Path, *, mode: int = 0o777) -> None:
    """Make a folder, with `mode`, and those above it that are missing, durably. Raises OSError."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(mode, parents=True, exist_ok=True)
    for place in missing:
        sync_folder(place.parent)


@contextmanager
def replacing(
    path: Path, mode: int, before_rename: str = "file.rename.before"
) -> Iterator[BinaryIO]:
    """A new file that takes the name `path` on success, fsynced; on any failure an older one stays.

    Passes the failpoint `before_rename`. What writers of `path` left that were killed goes first:
    nobody holds its lock. Raises OSError.
    """
    name = name_of(path.name)
    for left in path.parent.glob(f".{glob.escape(name)}.*.part"):
        with suppress(OSError), left.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()
    temporary = path.with_name(f".{name}.{secrets.token_hex(8)}.part")
    try:
        with _locked(temporary, mode) as new:
            yield new
            new.flush()
            os.fsync(new.fileno())
            failpoint(before_rename)
            temporary.replace(path)
        sync_folder(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_TOO_MANY = frozenset({errno.EMFILE, errno.ENFILE})
PRIVATE_MODE = 0o600
"""Of files that hold what callers sent or got: their owner's alone."""


@contextmanager
def atomic_file(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A writable file that takes the name `path` on success, fsynced, its folder too.

    `mode` is cut by the umask. Missing parent folders are made. Several may write the same `path`
    at once: each writes a whole file, and the last to end stays. On any failure the temporary file
    is removed and an older file at `path` stays. Raises StoreFullError when there is no room,
    InputError when the folder cannot be written to, OverloadedError when too many files are open.
    """
    try:
        if path.is_dir():
            raise InputError(f"{path}: is a folder; name a file for the output")
        make_folder(path.parent)
        with replacing(path, mode, "output.rename.before") as file:
            yield file
            failpoint("output.sync.before")
        failpoint("output.rename.after")
    except OSError as failure:
        raise write_refusal(path, failure) from None


def _locked(path: Path, mode: int) -> BinaryIO:
    """A new file, locked for as long as it is open: whoever gets the lock knows that its writer is
    dead, whatever became of the writer's pid."""
    while True:
        file = open(path, "wb", opener=partial(os.open, mode=mode))  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            file.close()
            raise
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


def write_refusal(path: Path, failure: OSError) -> BatchrunError:
    """What to say of an output that could not be written to `path`."""
    if failure.errno in DISK_FULL:
        return StoreFullError(
            f"{path}: no room to write the results ({failure.strerror}); free some space and try "
            "again, nothing is lost"
        )
    if failure.errno in _TOO_MANY:
        return OverloadedError(f"{path}: cannot be written now: {failure.strerror}; try again")
    return InputError(f"{path}: cannot be written: {failure.strerror or failure}")


class HashedFile:
    """Writes to `file`, and knows how much that was and its SHA-256."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.size_bytes = 0

    def write(self, content: bytes) -> None:
        """Append. Raises OSError."""
        self._file.write(content)
        self._digest.update(content)
        self.size_bytes += len(content)

    @property
    def sha256(self) -> str:
        """Hex digest of all that was written."""
        return self._digest.hexdigest()


PREFIX, LOCK = ".scratch-", ".scratch-lock"


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A new folder in `parent`, gone with all that is in it afterwards. Raises StoreError.

    What a kill leaves goes when the next one is made, or by `remove_left_scratch`.
    """
    remove_left_scratch(parent)
    try:
        folder, lock = _locked_folder(parent)
    except OSError as failure:
        raise StoreError(f"{parent}: cannot be written to: {failure.strerror}") from None
    try:
        yield folder
    finally:
        _remove_scratch(folder)
        lock.close()


def remove_left_scratch(parent: Path) -> None:
    """Remove the folders whose makers are dead: the kernel has freed their locks."""
    for folder in parent.glob(PREFIX + "[0-9a-f]" * 16):
        with suppress(OSError):
            folder.rmdir()
        with suppress(OSError), (folder / LOCK).open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_scratch(folder)


def _remove_scratch(folder: Path) -> None:
    """Its lock goes last, so that a kill in between leaves what the next one removes."""
    with suppress(OSError):
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != LOCK:
                entry.unlink()
        shutil.rmtree(folder, ignore_errors=True)


def _locked_folder(parent: Path) -> tuple[Path, BinaryIO]:
    """A new folder, and the open file that holds its lock: of a folder itself, network file systems
    would tell no other machine. Whoever looks for left ones may be faster at each step."""
    while True:
        folder = parent / f"{PREFIX}{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
        with suppress(FileNotFoundError):
            return folder, _locked(folder / LOCK, 0o600)


POLL_INTERVAL_S = 0.05


class HeldLock(ABC):
    """A lock that is held while its `with` block runs. Not reentrant."""

    @abstractmethod
    def acquire(self) -> None:
        """Take the lock."""

    @abstractmethod
    def release(self) -> None:
        """Give the lock back; does nothing when it is not held."""

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


LOCKS = Path("/proc/locks")


class StoreLock(HeldLock):
    """An exclusive `flock` on `path` and on its folder, so that it holds though the file is gone;
    the holder's pid is written into the file for messages."""

    def __init__(self, path: Path, *, wait_s: float = 0.0) -> None:
        self._path = path
        self._wait_s = wait_s
        self._fds: tuple[int, ...] = ()

    def acquire(self) -> None:
        """Take the lock, waiting up to `wait_s`; raises StoreLockedError naming the holder."""
        with ExitStack() as exits:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            exits.callback(os.close, fd)
            folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            exits.callback(os.close, folder)
            self._wait(fd, folder)
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
            exits.pop_all()
        self._fds = (fd, folder)

    def _wait(self, fd: int, folder: int) -> None:
        deadline_s = time.monotonic() + self._wait_s
        while not (try_lock(fd) and try_lock(folder)):
            if time.monotonic() >= deadline_s:
                told = os.pread(fd, 32, 0).decode(errors="replace").strip()
                holder = told or _holder_of(folder) or "unknown"
                raise StoreLockedError(
                    f"{self._path.parent}: in use by process {holder}; "
                    "use another --home, or stop it with `batchrun down`"
                )
            time.sleep(POLL_INTERVAL_S)

    def find_holder(self) -> int | None:
        """The process that holds the lock: None for nobody, 0 when its pid is not known: neither
        its file nor the system tells.

        Writes nothing, so it answers on a full or read-only disk too.
        """
        for place in (self._path, self._path.parent):
            with suppress(FileNotFoundError):
                fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if not try_lock(fd):
                        is_file = place == self._path
                        holder = os.pread(fd, 32, 0).decode(errors="replace") if is_file else ""
                        return int(holder) if holder.strip().isdecimal() else _holder_of(fd)
                finally:
                    os.close(fd)
        return None

    def release(self) -> None:
        """Give the lock back; does nothing when it is not held."""
        for fd in self._fds:
            os.close(fd)
        self._fds = ()


def _holder_of(fd: int) -> int:
    """Who has the `flock` on an open file, as proc_locks(5) tells; 0 where it does not."""
    found = os.fstat(fd)
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    with suppress(OSError):
        for line in LOCKS.read_text().splitlines():
            fields = line.split()
            if fields[1:2] == ["FLOCK"] and fields[5:6] == [place]:
                return max(0, int(fields[4]))
    return 0


def try_lock(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Take the `flock` of an open file, unless another has it."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked_bytes(fd: int, num_bytes: int = 0, offset: int = 0) -> Iterator[None]:
    """Within, no other process has these bytes of a file; 0: all from `offset` on."""
    fcntl.lockf(fd, fcntl.LOCK_EX, num_bytes, offset)
    try:
        yield
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN, num_bytes, offset)


LIBRARIES = {
    "s3": "s3fs: pip install 'batchrun[s3]'",
    "gs": "gcsfs: pip install gcsfs",
    "az": "adlfs: pip install adlfs",
    "abfs": "adlfs: pip install adlfs",
}
"""What serves each scheme, and how to install it. No other scheme is ever handed to fsspec."""
MAX_NAME_BYTES = 128
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


def is_url(place: str) -> bool:
    """Whether this names an object, or tries to; else it is a path."""
    return _URL.match(place) is not None


def scheme_of(url: str) -> str:
    """`s3` and so on."""
    return url.partition("://")[0].lower()


def name_of(url: str) -> str:
    """The last part of a key or a path, or the end of a long one: what a copy of it is called."""
    name = url.rpartition("/")[2].encode("utf-8", "replace")
    return name[-MAX_NAME_BYTES:].decode("utf-8", "ignore")


def check_place(place: str) -> str:
    """The place of one input or output: any path, or the URL of an object. Raises ValueError."""
    if is_url(place):
        check_url(place)
        if not place.partition("://")[2].partition("/")[2] or place.endswith("/"):
            raise ValueError(f"{place}: names no object; write {scheme_of(place)}://BUCKET/KEY")
        return place
    if "\0" in place:
        raise ValueError(f"{place!r}: a path holds no null character")
    name = place.partition("/")[0]
    if absolute(Path(), name).startswith("~"):
        raise ValueError(f"{place!r}: no user {name!r}; a file of such a name is ./{name}")
    return place


def absolute(folder: Path, place: str) -> str:
    """A path from `folder` on; `~` is the user's home, `..` what is above where a link leads."""
    plain = "."
    for part in (folder / os.path.expanduser(place)).parts:  # noqa: PTH111 - pathlib changes ./~
        below = os.path.realpath(plain) if part == ".." and os.path.islink(plain) else plain  # noqa: PTH114 - Path's raises
        plain = os.path.normpath(Path(below) / part)
    return plain


def check_prefix(url: str) -> str:
    """The URL of a bucket, or of a part of one, without a slash at its end. Raises ValueError."""
    if not is_url(url):
        raise ValueError(f"must be a URL such as s3://BUCKET/PREFIX (got {url!r})")
    check_url(url)
    return url.rstrip("/")


def check_url(url: str) -> None:
    """Raises ValueError for a URL that is not served; the message repeats no credentials."""
    scheme, rest = scheme_of(url), url.partition("://")[2]
    if scheme not in LIBRARIES:
        known = ", ".join(f"{name}://" for name in LIBRARIES)
        raise ValueError(f"{scheme}:// is not served; use {known}, or a path")
    bucket = rest.partition("/")[0]
    if not bucket:
        raise ValueError(f"{url}: names no bucket")
    if "@" in bucket and (":" in bucket or scheme in {"s3", "gs"}):
        raise ValueError(
            f"{scheme}://: credentials do not belong in a URL; set them in the environment"
        )
    if "::" in url or any(ord(char) < 32 for char in url):
        raise ValueError(f"{url!r}: '::' and control characters cannot be part of a URL")
    if {".", ".."} & set(rest.split("/")):
        raise ValueError(f"{url}: '.' and '..' cannot be part of a URL")
